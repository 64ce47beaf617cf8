"""Run kernels on the CPU, one greenlet per CUDA thread.

    launch(kernel, grid=(x, y), block=128, shared_bytes=0, args=[...])

`kernel` is what a kernel factory returned for `language()`, the twin of `ptx`. A thread runs until it has to wait for
others (a barrier or an instruction of its warp or warpgroup), then the next one runs; nothing is parallel, so a run is reproducible,
and when nobody can go on the divergence is reported instead of hanging. Blocks run one after another.

Numbers: integers are Python's (a kernel masks with uint32(...) where the GPU would wrap), float32 values are Python
floats: rounding to float32 happens when a value is stored to memory, shared or global, and in mma. Results therefore
carry less rounding error than the GPU's, never the same bits.
"""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy
from greenlet import GreenletExit, getcurrent, greenlet

from .simulator_barriers import Copies
from .simulator_memory import Address, SharedMemory, SimulatorError, address_of
from .simulator_races import RaceTracker
from .simulator_report import describe_failure, describe_waiting

WARP = 32
MAX_BLOCK = 1024


def language() -> ModuleType:
    """The device vocabulary for `build(lang, config)`: a module with the names of `ptx`, to be simulated."""
    from . import simulator_language

    return simulator_language


class Thread(greenlet):
    """One CUDA thread. It serves one block after another: starting a greenlet costs more than a short kernel."""

    def __init__(self, block, warp, tid):
        super().__init__(self.run_kernels)
        self.block = block
        self.warp = warp
        self.tid = tid
        self.lane = tid % WARP
        self.returned = False
        self.has_waited = False  # griddepcontrol_wait
        self.copies = Copies(tid)

    def run_kernels(self):
        block = self.block
        block.hub.switch()
        while True:
            try:
                block.kernel(*block.args)
            except (GreenletExit, SimulatorError):
                raise
            except Exception as error:
                raise SimulatorError(describe_failure(self, error)) from error
            if block.overlaps and not self.has_waited:
                raise SimulatorError(f"block {block.index}, thread {self.tid}: ends without griddepcontrol_wait, "
                                     "so that its grid may end before the one before it")
            self.returned = True
            block.wait()

    def begin(self):
        self.returned = self.has_waited = False
        self.copies = Copies(self.tid)


class Together:
    """Threads that execute instructions together, a warp or a warpgroup, and what they have brought to the one in progress."""

    def __init__(self, members, size):
        self.members = members
        self.size = size
        self.all_but_one = size - 1
        # What the first of them came to; the others must come to the same: operation, kernel code, place in it.
        self.operation = self.code = self.instruction = None
        self.values = [None] * size
        self.waiting = []
        self.result = None


class Block:
    """The block in progress: its threads, its shared memory and the queue of threads that can run."""

    def __init__(self, kernel, args, threads, shared_bytes, grid_width, check_races, overlaps):
        self.kernel = kernel
        self.args = args
        self.grid_width = grid_width
        self.overlaps = overlaps
        self.index = None
        self.hub = getcurrent()
        self.shared = SharedMemory(shared_bytes)
        self.races = RaceTracker(threads, shared_bytes) if check_races else None
        warps = [Together("lanes of a warp", WARP) for _ in range(threads // WARP)]
        self.threads = [Thread(self, warps[tid // WARP], tid) for tid in range(threads)]
        for thread in self.threads:
            # A greenlet inherits the recursion depth of the one that starts it: all start here, not each in the last.
            thread.switch()
        self.all_but_one = threads - 1
        # Threads at the barrier, and where the first of them stands; the others must come to the same place.
        self.waiting = []
        self.code = self.instruction = None
        self.named = {}  # by number
        self.mbarriers = {}  # by shared address
        self.warpgroups = {}  # by number, those that multiply
        self.ready = deque()

    def run(self, index, order):
        """Run block `index` of the grid, starting its threads in `order`."""
        self.index = index
        self.shared.poison()
        self.named.clear()
        self.mbarriers.clear()
        self.warpgroups.clear()
        if self.races is not None:
            self.races.begin()
        for thread in self.threads:
            thread.begin()
        self.ready.extend(order)
        self.wait()
        stuck = [thread for thread in self.threads if not thread.returned]
        if stuck:
            raise SimulatorError(describe_waiting(self, stuck, "no thread can go on"))

    def wait(self):
        """Run somebody else: the next thread that can run or, when there is none, whoever runs the block."""
        try:
            following = self.ready.popleft()
        except IndexError:
            following = self.hub
        following.switch()

    def close(self):
        # Suspended threads hold frames and, through them, the arguments; end them here, not in the collector.
        for thread in self.threads:
            thread.throw(GreenletExit)


def barrier(frame):
    """The current thread arrives at bar_sync, called in `frame`."""
    me = getcurrent()
    block = me.block
    waiting = block.waiting
    if not waiting:
        block.code, block.instruction = frame.f_code, frame.f_lasti
    elif frame.f_lasti != block.instruction or frame.f_code is not block.code:
        raise SimulatorError(describe_waiting(block, waiting, "threads meet at two different bar_sync", me))
    if len(waiting) < block.all_but_one:
        waiting.append(me)
        block.wait()
        return
    block.ready.extend(waiting)
    waiting.clear()
    if block.races is not None:
        block.races.join_block()


def collective(me, operation, value, frame, group=None):
    """The current thread `me` brings `value` to an instruction of its warp, or of a larger `group`, called in `frame`.

    The last of its threads computes operation(values of all of them, block); each gets that object.
    """
    if group is None:
        group = me.warp
    waiting = group.waiting
    if not waiting:
        group.operation, group.code, group.instruction = operation, frame.f_code, frame.f_lasti
    elif frame.f_lasti != group.instruction or frame.f_code is not group.code or operation is not group.operation:
        raise SimulatorError(describe_waiting(me.block, waiting, f"{group.members} meet at two different instructions", me))
    group.values[me.tid % group.size] = value
    if len(waiting) < group.all_but_one:
        waiting.append(me)
        me.block.wait()
        return group.result
    result = group.result = operation(group.values, me.block)
    group.values = [None] * group.size
    me.block.ready.extend(waiting)
    waiting.clear()
    return result


def _argument(position, value):
    """A kernel argument as the kernel sees it: an Address, an int, a float or a bool."""
    if isinstance(value, numpy.ndarray):
        return address_of(value, f"argument {position}")
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, (Address, int, float)):
        return value
    raise TypeError(f"argument {position}: expected a NumPy array, an Address or a number, got {type(value).__name__}; "
                    "convert it with numpy.asarray")


def _check_geometry(grid, block, shared_bytes):
    if len(grid) != 2 or not all(isinstance(n, (int, numpy.integer)) and n >= 0 for n in grid):
        raise ValueError(f"grid: expected two integers (x, y) >= 0, got {grid!r}")
    if block % WARP or not 0 < block <= MAX_BLOCK:
        raise ValueError(f"block: expected a multiple of {WARP} up to {MAX_BLOCK} (the simulator runs whole warps), got {block!r}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes: expected a number of bytes >= 0, got {shared_bytes!r}")


def launch(kernel: Callable, grid: tuple[int, int], block: int, shared_bytes: int = 0, args: Sequence = (),
           check_races: bool = False, seed: int | None = None, overlaps: bool = False) -> None:
    """Run `kernel(*args)` for a grid of blocks; returns when all are done.

    grid: (x, y) blocks. block: threads, a multiple of 32. shared_bytes: dynamic shared memory, filled with 0xFF when a
    block starts. args: NumPy arrays (the kernel sees their address and works on their memory, strided views included),
    `Address` objects, numbers. check_races: report shared-memory accesses of two threads that no barrier orders, and
    negative indices (slower). seed: run the blocks, and the threads of each, in a shuffled order. overlaps: see `KernelSource`; a thread
    that ends without griddepcontrol_wait is reported.

    Raises SimulatorError, naming block, threads and source lines, for diverging barriers and warp-wide instructions,
    accesses out of bounds or misaligned, races, and every exception in a thread; ValueError for a geometry that no GPU
    takes.
    """
    _check_geometry(grid, block, shared_bytes)
    width, height = (int(n) for n in grid)
    indices = [(x, y) for y in range(height) for x in range(width)]
    current = Block(kernel, [_argument(position, value) for position, value in enumerate(args)], int(block),
                    int(shared_bytes), width, check_races, overlaps)
    order = list(current.threads)
    shuffle = (lambda items: None) if seed is None else random.Random(seed).shuffle
    shuffle(indices)
    try:
        for index in indices:
            shuffle(order)
            current.run(index, order)
    finally:
        current.close()
