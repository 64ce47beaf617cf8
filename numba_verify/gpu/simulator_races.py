"""The race tracker: finds two accesses of shared memory, at least one a write, that nothing orders.

Happens-before by vector clocks. Each thread has a time of its own, which goes up whenever it publishes what it did (arrives somewhere), and
knows for every other thread up to which time it has seen what that one did. An access is stamped with its thread's time; another thread's
access to the same bytes races with it unless that thread knows the stamp. What carries knowledge:

    bar_sync                       everybody to everybody
    bar_warp_sync                  the lanes of a warp to each other; shuffles, votes and matrix instructions order no memory (PTX: shfl.sync)
    named barrier                  who came by sync or arrive, to who came by sync
    mbarrier_arrive                to those who wait for that phase or a later one
    cp_async_mbarrier_arrive_noinc the copies, and what the thread knew of others; not its own other stores
    wgmma_wait                     that the products of the warp have read, to its lanes; see `simulator_proxies`

Asynchronous copies of a thread are stamped as if a second thread, its copy engine, had made them when they land. Who waits for them, by
cp_async_wait or an mbarrier, gets to know. Between start and landing any access to the target is a race.
"""
import sys

import numpy

from .simulator_memory import SimulatorError
from .simulator_proxies import CHUNK, WARPGROUP, AsyncReads

WARP = 32
_NOTHING = "no bar_sync (or bar_warp_sync in one warp, named barrier, or mbarrier)"


def _line(frame):
    return frame.f_code.co_filename, frame.f_lineno


class RaceTracker:
    """Clocks of a block's threads, and who touched which shared word. Words are 4 bytes, with a mask for smaller accesses."""

    def __init__(self, threads, shared_bytes):
        self._threads = threads
        # Row: what a thread knows. Columns: of which thread; of which copy engine; of the products of which warp; and once more of threads
        # and engines, what is behind a proxy fence.
        products, fences = 2 * threads, 2 * threads + threads // WARP
        self._width = fences + 2 * threads
        self._clocks = numpy.zeros((threads, self._width), numpy.int32)
        self._async = AsyncReads(self._clocks, products, fences, shared_bytes)
        self._elements = self._async.elements
        self._rows = list(self._clocks)
        # To read one number from, a memoryview costs less than an array.
        self._known = [memoryview(row) for row in self._rows]
        self._own = self._clocks.reshape(-1)[::self._width + 1]
        self._landings = numpy.zeros(threads, numpy.int32)
        self._words = {}
        # By 16 bytes: copies under way, (thread, line that started it).
        self._in_flight = {}
        # mbarrier -> thread, time and line of its init
        self._made = {}

    def begin(self):
        """A new block: nobody knows anything."""
        self._clocks.fill(0)
        self._own += 1
        self._landings.fill(0)
        self._elements.begin()
        for table in (self._words, self._in_flight, self._made):
            table.clear()

    # --- who knows what ---

    def join_block(self):
        """All threads of the block have met."""
        known = self._clocks.max(axis=0)
        self._clocks[:] = known
        self._own += 1
        if (known[self._threads:2 * self._threads] < self._landings).any():
            # Copies that landed, but nobody waited for them: the barrier does not order them.
            known = known.tolist()
            late = {word: {key: site for key, site in writers.items() if site[0] > known[key[0]]} for word, (_, writers) in self._words.items()}
            self._words = {word: ({}, writers) for word, writers in late.items() if writers}
        else:
            self._words.clear()

    def join_warp(self, thread):
        """All lanes of the thread's warp have met."""
        first = thread.tid // WARP * WARP
        rows = self._clocks[first:first + WARP]
        rows[:] = rows.max(axis=0)
        self._own[first:first + WARP] += 1

    def _release(self, thread, clock):
        numpy.maximum(clock, self._rows[thread.tid], out=clock)
        self._known[thread.tid][thread.tid] += 1

    def _acquire(self, thread, clock):
        row = self._rows[thread.tid]
        numpy.maximum(row, clock, out=row)

    def _new_clock(self):
        return numpy.zeros(self._width, numpy.int32)

    def release_named(self, thread, barrier):
        if barrier.clock is None:
            barrier.clock = self._new_clock()
        self._release(thread, barrier.clock)

    def complete_named(self, barrier, threads):
        """`threads` came by sync, and go on."""
        for thread in threads:
            self._acquire(thread, barrier.clock)
        barrier.clock.fill(0)

    def init_mbarrier(self, thread, barrier, frame):
        self.record(thread, barrier.offset, 8, True, frame)
        # What the arrivals so far tell, and what those of complete phases told.
        barrier.clock = (self._new_clock(), self._new_clock())
        self._made[barrier] = (thread.tid, self._known[thread.tid][thread.tid], *_line(frame))

    def _check_made(self, thread, barrier, what, frame):
        tid, time, file, line = self._made[barrier]
        if self._known[thread.tid][tid] < time:
            here, number = _line(frame)
            raise SimulatorError(f"block {thread.block.index}: race on the mbarrier at byte {barrier.offset}: mbarrier_init by thread {tid} at "
                                 f"{file}:{line}, then {what} by thread {thread.tid} at {here}:{number}, with {_NOTHING} between them")

    def release_mbarrier(self, thread, barrier, frame):
        self._check_made(thread, barrier, "mbarrier_arrive", frame)
        self._release(thread, barrier.clock[0])

    def release_copies(self, thread, barrier, frame):
        """The thread's copies so far will arrive, those under way and those that have landed."""
        self._check_made(thread, barrier, "cp_async_mbarrier_arrive_noinc", frame)
        tid = thread.tid
        told = self._rows[tid].copy()
        told[tid] = 0
        told[self._threads + tid] = self._landings[tid]
        numpy.maximum(barrier.clock[0], told, out=barrier.clock[0])

    def complete_mbarrier(self, barrier):
        """The copies of `barrier` have landed, and a phase is complete."""
        arriving, complete = barrier.clock
        for batch in barrier.copies:
            engine = self._threads + batch.tid
            arriving[engine] = max(arriving[engine], batch.landed)
        complete[:] = arriving

    def acquire_mbarrier(self, thread, barrier, frame):
        self._check_made(thread, barrier, "mbarrier_wait", frame)
        self._acquire(thread, barrier.clock[1])

    def acquire_copies(self, thread, batches):
        """The thread has waited for these of its own copies."""
        known, engine = self._known[thread.tid], self._threads + thread.tid
        for batch in batches:
            known[engine] = max(known[engine], batch.landed)

    # --- wgmma ---

    def fence_proxy(self, thread):
        self._async.fence(thread.tid)

    def issue_product(self, block, group, number, chunks, frame):
        """Product `number` of warpgroup `group` starts to read these chunks of 16 bytes."""
        under_way = self._in_flight.keys() & chunks.tolist() if self._in_flight else ()
        for chunk in sorted(under_way)[:1]:
            tid, file, line = self._in_flight[chunk]
            self._report(block.threads[WARPGROUP * group], CHUNK * chunk, _copy(tid, (file, line)), "read by the wgmma", frame)
        self._async.issue(block, group, number, chunks, _line(frame))

    def complete_products(self, group, number):
        """The warps of `group` have waited for its products up to `number`."""
        self._async.complete(group, number)

    # --- who touched what ---

    def record(self, thread, offset, size, write, frame):
        """Thread `thread` reads or writes `size` bytes at `offset`, in the source line where `frame` stands."""
        tid = thread.tid
        known = self._known[tid]
        if self._in_flight:
            copy = self._in_flight.get(offset >> 4)
            if copy is not None:
                self._report(thread, offset, _copy(copy[0], (copy[1], copy[2])), "write" if write else "read", frame)
        mask = 15 if size >= 4 else ((1 << size) - 1) << (offset & 3)
        key, site = (tid, mask), (known[tid], frame.f_code.co_filename, frame.f_lineno)
        for word in range(offset >> 2, (offset + size + 3) >> 2):
            entry = self._words.get(word)
            if entry is None:
                entry = self._words[word] = ({}, {})
            readers, writers = entry
            for (other, touched), earlier in writers.items():
                if earlier[0] > known[other] and touched & mask:
                    self._report(thread, 4 * word, self._write(other, earlier), "write" if write else "read", frame)
            if not write:
                readers[key] = site
                continue
            for (other, touched), earlier in readers.items():
                if earlier[0] > known[other] and touched & mask:
                    self._report(thread, 4 * word, f"read by thread {other} at {earlier[1]}:{earlier[2]}", "write", frame)
            # Whoever is ordered after this write is ordered after what came before it: those may be forgotten.
            for accesses in entry:
                for old in [old for old in accesses if not old[1] & ~mask]:
                    del accesses[old]
            writers[key] = site
        if write:
            self._elements.wrote(tid, known[tid], offset, size, site[1:])
            if self._elements.readers:
                reader = self._async.unfinished_read(known, offset, size)
                if reader is not None:
                    self._report(thread, CHUNK * reader[0], reader[1], "write", frame, "no wgmma_wait and barrier")

    def begin_copy(self, thread, target, frame):
        """The thread starts a copy to the 16 bytes at `target`."""
        self.record(thread, target, 16, True, frame)
        self._in_flight[target >> 4] = (thread.tid, *_line(frame))

    def land(self, batch, frame):
        """A batch of copies lands, in the source line where `frame` stands: of a wait, or of the last arrival at an mbarrier."""
        self._landings[batch.tid] += 1
        batch.landed = int(self._landings[batch.tid])
        key, here = (self._threads + batch.tid, 15), _line(frame)
        for target, _ in batch:
            _, file, line = self._in_flight.pop(target >> 4)
            site = (batch.landed, file, line, *here)
            self._elements.wrote(key[0], batch.landed, target, 16, (file, line))
            # record() has seen to it that whatever came before the start is ordered before it.
            for word in range(target >> 2, (target >> 2) + 4):
                self._words[word] = ({}, {key: site})

    def _write(self, who, site):
        if who < self._threads:
            return f"write by thread {who} at {site[1]}:{site[2]}"
        return _copy(who - self._threads, site[1:3], site[3:])

    @staticmethod
    def _report(thread, byte, earlier, later, frame, missing=_NOTHING):
        file, line = _line(frame)
        raise SimulatorError(f"block {thread.block.index}: race on bytes {byte & ~3} to {byte & ~3 | 3} of shared memory: {earlier}, then {later} by "
                             f"thread {thread.tid} at {file}:{line}, with {missing} between them")


def _copy(tid, begun, landed=None):
    end = "not landed yet" if landed is None else f"landed at {landed[0]}:{landed[1]}"
    return f"asynchronous copy by thread {tid} begun at {begun[0]}:{begun[1]}, {end}"


class TrackedPointer:
    """A shared pointer that reports every access to the block's race tracker."""

    __slots__ = ("view", "offset", "size", "thread")

    def __init__(self, view, offset, size, thread):
        self.view = view
        self.offset = offset
        self.size = size
        self.thread = thread

    def __len__(self):
        return len(self.view)

    def _record(self, index, write):
        if not 0 <= index < len(self.view):
            raise IndexError(index)
        self.thread.block.races.record(self.thread, self.offset + index * self.size, self.size, write, sys._getframe(2))

    def __getitem__(self, index):
        self._record(index, False)
        return self.view[index]

    def __setitem__(self, index, value):
        self._record(index, True)
        self.view[index] = value
