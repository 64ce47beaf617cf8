"""What wgmma reads of shared memory, for the race tracker: through another proxy, from its issue until a wait has ended it.

Three rules, for every 16-bit element of an operand:

    before the product   the last write is known to every thread of the warpgroup (barriers, mbarriers),
                         and so is a fence_proxy_async of a thread that knew the write
    after the product    who writes next knows that all four warps have waited for it

The clocks of `simulator_races` carry both kinds of knowledge. A product's time is its number in its warpgroup; a warp knows it when it has waited.
"""
import numpy

from .simulator_memory import SimulatorError

WARPGROUP = 128
CHUNK = 16
_ELEMENTS = CHUNK // 2
# A write as one number: time | source line | who.
_WHO_BITS, _LINE_BITS = 12, 20


class Elements:
    """Of each 16-bit element of a block's shared memory: who wrote it last, and which product of each warpgroup read it last."""

    def __init__(self, shared_bytes):
        self._chunks = -(-shared_bytes // CHUNK)
        self._writes = numpy.zeros((self._chunks, _ELEMENTS), numpy.int64)
        self._flat = self._writes.reshape(-1)
        self._lines = {}
        # By warpgroup: the number of the last product that reads a chunk. By warpgroup and number: its source line.
        self.readers = {}
        self._issued = {}

    def begin(self):
        self._flat.fill(0)
        self._lines.clear()
        self.readers.clear()
        self._issued.clear()

    def wrote(self, who, time, offset, size, line):
        """`who` wrote `size` bytes at `offset` at its `time`, in the source line (file, number)."""
        number = self._lines.setdefault(line, len(self._lines))
        self._flat[offset >> 1:(offset + size + 1) >> 1] = time << _WHO_BITS + _LINE_BITS | number << _WHO_BITS | who

    def last_writes(self, chunks):
        """Who wrote the elements of these chunks, and when: two flat arrays."""
        codes = self._writes[chunks].reshape(-1)
        return codes & (1 << _WHO_BITS) - 1, codes >> _WHO_BITS + _LINE_BITS

    def describe_write(self, chunks, element):
        """(first byte, source line) of the last write of one of these elements."""
        chunk, rest = divmod(element, _ELEMENTS)
        chunk = chunks.reshape(-1)[chunk]
        line = int(self._writes[chunk, rest]) >> _WHO_BITS & (1 << _LINE_BITS) - 1
        return int(CHUNK * chunk + 2 * rest), list(self._lines)[line]

    def read(self, group, number, chunks, line):
        """Product `number` of warpgroup `group`, issued in this source line, reads these chunks."""
        if group not in self.readers:
            self.readers[group] = numpy.zeros(self._chunks, numpy.int32)
        self.readers[group][chunks] = number
        self._issued[group, number] = line

    def describe_read(self, group, number):
        file, line = self._issued[group, number]
        return f"read by the wgmma of {group_threads(group)} at {file}:{line}"


def group_threads(group):
    return f"threads {WARPGROUP * group}-{WARPGROUP * group + WARPGROUP - 1}"


class AsyncReads:
    """The checks. `clocks`: what a thread (row) knows, with the columns that the race tracker gave them."""

    def __init__(self, clocks, product_columns, fence_columns, shared_bytes):
        self._clocks = clocks
        self._products = product_columns  # of the first warp
        self._fences = fence_columns  # of the first thread; as many as there are who can write
        self.elements = Elements(shared_bytes)

    def fence(self, tid):
        """What the thread knows is fenced. Its time goes up, as what it writes from now on is not."""
        row = self._clocks[tid]
        writers = len(row) - self._fences
        row[self._fences:] = numpy.maximum(row[self._fences:], row[:writers])
        row[tid] += 1

    def issue(self, block, group, number, chunks, line):
        """A product begins to read these chunks."""
        rows = self._clocks[WARPGROUP * group:WARPGROUP * (group + 1)]
        who, times = self.elements.last_writes(chunks)
        known = rows.min(axis=0)
        self._check(block, group, chunks, line, times > known[who], lambda writer, time: (rows[:, writer] < time).argmax(),
                    "no bar_sync (or named barrier, or mbarrier)")
        self._check(block, group, chunks, line, times > known[self._fences + who],
                    lambda writer, time: (rows[:, self._fences + writer] < time).argmax(), "no fence_proxy_async")
        self.elements.read(group, number, chunks, line)

    def _check(self, block, group, chunks, line, wrong, find_thread, missing):
        if not wrong.any():
            return
        element = int(wrong.argmax())
        who, times = self.elements.last_writes(chunks)
        byte, (file, number) = self.elements.describe_write(chunks, element)
        threads = len(self._clocks)
        writer = int(who[element])
        written = f"write by thread {writer}" if writer < threads else f"asynchronous copy by thread {writer - threads}"
        thread = WARPGROUP * group + int(find_thread(writer, times[element]))
        raise SimulatorError(f"block {block.index}: race on bytes {byte} to {byte + 1} of shared memory: {written} at {file}:{number}, then read by "
                             f"the wgmma of {group_threads(group)} at {line[0]}:{line[1]}, with {missing} between them that thread {thread} knows of")

    def complete(self, group, number):
        """All four warps have waited for the products up to `number`."""
        for warp in range(4 * group, 4 * group + 4):
            self._clocks[32 * warp:32 * warp + 32, self._products + warp] = number

    def unfinished_read(self, known, offset, size):
        """(chunk, description) of a product that may still read these bytes when a thread that knows so much writes them, or None."""
        for group, readers in self.elements.readers.items():
            column = self._products + 4 * group
            waited = min(known[column:column + 4])
            for chunk in range(offset >> 4, (offset + size + CHUNK - 1) >> 4):
                if readers[chunk] > waited:
                    return chunk, self.elements.describe_read(group, int(readers[chunk]))
        return None
