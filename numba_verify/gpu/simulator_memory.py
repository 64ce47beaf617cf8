"""Memory of the simulated GPU: addresses with a provenance, typed pointers, and shared memory.

A pointer is a memoryview of the memory behind it, so that `p[i]` costs what C indexing costs. A memoryview takes a
negative index as Python does, from the end; kernels index by unsigned numbers, and the checked pointers (used with
`check_races=True`) refuse negative ones as well.
"""
from typing import NamedTuple

import numpy

#: What `shared_address(0)` returns. Not 0, so that an offset passed where an address is due is out of bounds.
SHARED_BASE = 1024
POISON = 0xFF


class SimulatorError(RuntimeError):
    """A simulated kernel did what a GPU would answer with a fault, a hang or silent nonsense."""


class MemoryFault(Exception):
    """An access or an operand that a GPU would fault on. The scheduler makes a SimulatorError of it: it knows block, thread and line."""


class Tag(NamedTuple):
    """An element type: its name, its memoryview format, its bytes."""

    name: str
    format: str
    size: int


u8 = Tag("u8", "B", 1)
u16 = Tag("u16", "H", 2)
u32 = Tag("u32", "I", 4)
i32 = Tag("i32", "i", 4)
u64 = Tag("u64", "Q", 8)
i64 = Tag("i64", "q", 8)
f32 = Tag("f32", "f", 4)


class Span:
    """The bytes of one NumPy array from the lowest to the highest that its elements occupy."""

    def __init__(self, array, name):
        low, high = numpy.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
        self.owner = array
        self.name = name
        self.machine_address = low
        self.size = high - low
        self.bytes = _raw_bytes(low, high - low, array.flags.writeable)
        self._views = {}

    def view(self, tag):
        """The whole span as elements of `tag` (a tail smaller than one element is left out)."""
        view = self._views.get(tag)
        if view is None:
            view = self._views[tag] = self.bytes[:self.size // tag.size * tag.size].cast(tag.format)
        return view

    def __str__(self):
        return f"{self.name} ({self.size} bytes, array of {self.owner.dtype} {list(self.owner.shape)})"


def _raw_bytes(address, size, writeable):
    if not size:
        return memoryview(b"")
    interface = {"data": (address, not writeable), "shape": (size,), "typestr": "|u1", "version": 3}
    return memoryview(numpy.asarray(type("RawMemory", (), {"__array_interface__": interface})()))


class Address:
    """A place in a kernel argument's memory: kernels add byte counts to it and hand it to `pointer` and the copies."""

    __slots__ = ("span", "offset")

    def __init__(self, span, offset):
        self.span = span
        self.offset = offset

    def __add__(self, byte_count):
        return Address(self.span, self.offset + byte_count)

    __radd__ = __add__

    def __sub__(self, byte_count):
        return Address(self.span, self.offset - byte_count)

    def __rand__(self, mask):
        # uint64(address) is a mask, and an address has 64 bits already.
        if mask != 0xFFFFFFFFFFFFFFFF:
            raise MemoryFault(f"an address is cut to {mask.bit_length()} bits: {self!r}")
        return self

    def __eq__(self, other):
        return isinstance(other, Address) and self.span is other.span and self.offset == other.offset

    def __hash__(self):
        return hash((id(self.span), self.offset))

    def __repr__(self):
        return f"Address(byte {self.offset} of {self.span})"


def address_of(array, name="array"):
    """The `Address` of element 0 of a NumPy array (strided views included), as a kernel argument.

    Reads and writes go to the array itself. A kernel may touch every byte between the view's first and last element.
    """
    span = Span(array, name)
    return Address(span, array.ctypes.data - span.machine_address)


def check_access(address, size, alignment, what):
    """Raise unless `size` bytes at an `Address` lie in its span and are aligned; returns the span and the offset."""
    if not isinstance(address, Address):
        raise MemoryFault(f"{what}: null or invalid address {address!r}")
    span, offset = address.span, address.offset
    if not 0 <= offset <= span.size - size:
        raise MemoryFault(f"{what}: bytes {offset} to {offset + size - 1} are outside {span}")
    if (span.machine_address + offset) % alignment:
        raise MemoryFault(f"{what}: byte {offset} of {span} is not aligned to {alignment} bytes")
    return span, offset


_NULL = {tag: memoryview(b"").cast(tag.format) for tag in (u8, u16, u32, i32, u64, i64, f32)}


def global_pointer(address, tag):
    """The elements of `tag` from `address` to the end of its span. Null (integer 0) gives a pointer to nothing."""
    if not isinstance(address, Address):
        if address != 0:
            raise MemoryFault(f"pointer: expected an address from the kernel's arguments, got {address!r}")
        return _NULL[tag]
    span, offset = address.span, address.offset
    if (span.machine_address + offset) % tag.size:
        raise MemoryFault(f"pointer: byte {offset} of {span} is not aligned for {tag.name}")
    view = span.view(tag)
    if offset == 0:
        return view
    if not 0 <= offset <= span.size:
        raise MemoryFault(f"pointer: byte {offset} is outside {span}")
    index, rest = divmod(offset, tag.size)
    return span.bytes[offset:offset + (span.size - offset) // tag.size * tag.size].cast(tag.format) if rest else view[index:]


class CheckedPointer:
    """A global pointer that refuses negative indices too."""

    __slots__ = ("view",)

    def __init__(self, view):
        self.view = view

    def __len__(self):
        return len(self.view)

    def __getitem__(self, index):
        if index < 0:
            raise IndexError(index)
        return self.view[index]

    def __setitem__(self, index, value):
        if index < 0:
            raise IndexError(index)
        self.view[index] = value


class SharedMemory:
    """One block's dynamic shared memory."""

    def __init__(self, size):
        self.size = size
        # Whole 16-byte rows, for ldmatrix; what a kernel may touch ends at `size`.
        self.bytes = memoryview(bytearray(-(-size // 16) * 16))
        self.views = {tag: self.bytes[:size // tag.size * tag.size].cast(tag.format)
                      for tag in (u8, u16, u32, i32, u64, i64, f32)}
        self._poison = bytes([POISON]) * len(self.bytes)

    def poison(self):
        self.bytes[:] = self._poison

    def pointer(self, offset, tag):
        if offset % tag.size or not 0 <= offset <= self.size:
            raise MemoryFault(f"shared: byte {offset} is not aligned for {tag.name} or lies outside the block's "
                                 f"{self.size} bytes of shared memory")
        return self.views[tag][offset // tag.size:] if offset else self.views[tag]

    def check(self, address, size, what):
        """The offset of `size` bytes, aligned to `size`, at a shared address."""
        offset = address - SHARED_BASE
        if not 0 <= offset <= self.size - size:
            raise MemoryFault(f"{what}: shared address {address} (byte {offset}) is outside the block's {self.size} "
                                 "bytes of shared memory; addresses come from shared_address()")
        if offset % size:
            raise MemoryFault(f"{what}: shared address {address} is not aligned to {size} bytes")
        return offset
