"""Guarded buffers: memory that shows every stray read and write of a kernel.

An array made here lies inside a larger allocation filled with poison. Whatever the caller did not put there, red zones on both sides,
gaps between strided rows, slots that no request owns, outputs not yet written, reads as NaN in bf16, fp16 and fp32 (and as an
impossible index in int32 and int64), so a stray read spoils the result. Every byte that the kernel has no right to write is compared
afterwards, as bytes, so a stray write is seen even when it writes NaN.
"""

import numpy as np

# One KV tile of the largest kernel configuration: 16 rows of 576 float32 are 36,864 B. An error of a whole tile still lands in the zone.
RED_ZONE_BYTES = 64 * 1024

# Vector loads and 16-byte copies need aligned rows; 128 B is a cache line.
ALIGNMENT = 128


def poison_bytes(size):
    """Bytes that read as NaN at every even offset: odd bytes are FF, even bytes run through 81 .. FE.

    They depend on the position (a shifted copy is seen) and hold no FFFF and no 7Fxx (the NaNs that a GPU writes are seen).
    """
    pattern = np.full(size, 0xFF, np.uint8)
    low = pattern[::2]
    low[:] = 0x81 + np.arange(len(low)) % 126
    return pattern


class Guarded:
    """One array inside its red zones. ``array`` is the view to hand out, ``backing`` the whole allocation as bytes.

    To test on a device: copy ``backing`` there, build the view with ``offset`` and the array's shape and strides, run, copy the bytes
    back and give them to ``check``.
    """

    def __init__(self, name, shape, dtype, *, row_gap=0, misalign=0):
        dtype = np.dtype(dtype)
        if misalign % max(2, dtype.itemsize) or row_gap % max(2, dtype.itemsize):
            raise ValueError(f"{name}: expected row_gap and misalign in multiples of 2 B and of the item, got {row_gap} and {misalign}")
        self.name = name
        strides = _strides(shape, dtype.itemsize, row_gap)
        span = 0 if 0 in shape else sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + dtype.itemsize
        whole = np.empty(span + 2 * RED_ZONE_BYTES + 2 * ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        self.backing = whole[start : start + span + 2 * RED_ZONE_BYTES + misalign]
        self.backing[:] = poison_bytes(len(self.backing))
        self.offset = RED_ZONE_BYTES + misalign
        self.span = span
        self.array = np.ndarray(shape, dtype, self.backing, self.offset, strides)
        self._writable = np.zeros(len(self.backing), bool)
        self._before = None

    def allow_writes(self, rows):
        """Lets the kernel write ``array[:rows]``; all the rest stays guarded."""
        bytes_of_item = np.ndarray((*self.array.shape, self.array.itemsize), bool, self._writable, self.offset, (*self.array.strides, 1))
        bytes_of_item[:rows] = True

    def arm(self):
        """Remembers the bytes as they are now: from here on only what ``allow_writes`` named may change."""
        self._before = self.backing.copy()

    def check(self, backing=None):
        """Raises AssertionError with the place of the first byte that changed without right."""
        if self._before is None:
            raise RuntimeError(f"{self.name}: the guard was never armed")
        now = self.backing if backing is None else np.asarray(backing)
        if now.shape != self._before.shape or now.dtype != np.uint8:
            raise ValueError(f"{self.name}: expected the {len(self._before)} bytes of backing, got {now.dtype} {now.shape}")
        changed = (now != self._before) & ~self._writable
        if changed.any():
            first = int(np.argmax(changed))
            raise AssertionError(
                f"{self.name}: {changed.sum()} bytes changed that no kernel may write, first {self._describe(first)}: "
                f"{self._before[first]:02x} became {now[first]:02x}"
            )

    def _describe(self, byte):
        at = byte - self.offset
        if at < 0:
            return f"{-at} B before the array"
        if at >= self.span:
            return f"{at - self.span} B behind the array"
        place = []
        for size, stride in zip(self.array.shape, self.array.strides, strict=True):
            index = min(at // stride, size - 1) if stride else 0
            place.append(index)
            at -= index * stride
        where = f"at {tuple(place)}"
        return where if at < self.array.itemsize else f"in the gap behind the row {where}"


class GuardedArrays:
    """All the guarded buffers of one test; ``check_guards()`` looks at each, and so does leaving the ``with`` block::

    with GuardedArrays() as guarded:
        q = guarded.input("q", q_values)
        pool = guarded.pool("kv_cache", (num_slots, 576), rows, slots)
        out = guarded.output("out", (rows_of_q, heads, 512), "float16", written=total_q)
        run(q, pool, out)
    """

    def __init__(self):
        self.guards = {}

    def input(self, name, values, **layout):
        """A guarded copy of ``values``, which nobody may write. ``layout``: ``row_gap``, ``misalign`` (bytes)."""
        values = np.asarray(values)
        guard = self._add(name, values.shape, values.dtype, layout)
        guard.array[...] = values
        guard.arm()
        return guard.array

    def pool(self, name, shape, rows, slots, **layout):
        """A guarded KV pool ``[slots, D]`` or ``[pages, page_size, (1,) D]``: ``rows[i]`` in token slot ``slots[i]``, NaN in all others."""
        rows, slots = np.asarray(rows), np.asarray(slots, np.int64)
        guard = self._add(name, shape, rows.dtype, layout)
        if len(shape) == 2:
            guard.array[slots] = rows
        else:
            target = guard.array if len(shape) == 3 else guard.array[:, :, 0, :]
            target[slots // shape[1], slots % shape[1]] = rows
        guard.arm()
        return guard.array

    def output(self, name, shape, dtype, *, written=None, **layout):
        """A guarded output that reads as NaN, of which the kernel may write the first ``written`` rows (all when None)."""
        guard = self._add(name, shape, dtype, layout)
        guard.allow_writes(written)
        guard.arm()
        return guard.array

    def check_guards(self):
        """Raises AssertionError naming the buffer and the place when a byte changed that no kernel may write."""
        for guard in self.guards.values():
            guard.check()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is None:
            self.check_guards()

    def _add(self, name, shape, dtype, layout):
        if name in self.guards:
            raise ValueError(f"expected a new name, got {name!r} twice")
        self.guards[name] = Guarded(name, tuple(shape), dtype, **layout)
        return self.guards[name]


def _strides(shape, itemsize, row_gap):
    """Byte strides of a C-ordered array with ``row_gap`` spare bytes behind each run of the last dimension."""
    strides = [itemsize]
    for axis in range(len(shape) - 1, 0, -1):
        strides.append(strides[-1] * max(shape[axis], 1) + (row_gap if axis == len(shape) - 1 else 0))
    return tuple(reversed(strides))
