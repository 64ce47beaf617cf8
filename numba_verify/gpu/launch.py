"""cubin -> launch through cuda.bindings: pointers and scalars only.

numba's dispatcher spends 16 to 100 us of host time a launch (docs/facts.md), and cuda.core looks at the type of every argument anew. Here a
launch writes what changed into storage that keeps its place, and is one call of the driver. A kernel is loaded once a process and GPU.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from . import driver
from .compile import Cubin, KernelSource, compile_kernel

# Every argument has a slot of 8 bytes; the driver reads as many of them as the kernel's parameter has.
_SLOT = {"address": "Q", "i64": "q", "f32": "f4x"}


class LoadedKernel:
    """A kernel on one device, ready to launch with a fixed number of threads and bytes of dynamic shared memory."""

    def __init__(self, source: KernelSource, ordinal: int, cubin: Cubin | None = None):
        from cuda.core import ObjectCode

        self.source, self.ordinal = source, ordinal
        self.cubin = cubin or compile_kernel(source, driver.device_info(ordinal).arch)
        with driver.context(ordinal):
            self._kernel = ObjectCode.from_cubin(self.cubin.code).get_kernel(self.cubin.symbol)  # kept: its end would unload the code
            self.function = driver.prepare_kernel(int(self._kernel.handle), source.shared_bytes)

    def launch(self, stream: int, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        """Launch once, with storage of its own; who launches again keeps a `Launcher`."""
        Launcher(self)(stream, grid, (), tuple(arguments))


@functools.cache
def _addresses_packer(count: int):
    return struct.Struct(f"={count}Q").pack_into


class Launcher:
    """Launches one kernel again and again, from one storage of its arguments.

    The driver copies the arguments before its call returns, so the storage is free for the next launch, also while a graph is captured. But
    the call lets other Python threads run: whoever owns a launcher lets one thread in at a time. A plan has launchers of its own and a lock.
    """

    def __init__(self, kernel: LoadedKernel):
        kinds, cuda = kernel.source.signature, driver._driver()
        self._kernel, self._launch, self._launch_with = kernel, cuda.cuLaunchKernel, cuda.cuLaunchKernelEx
        self._pack = struct.Struct("=" + "".join(_SLOT[kind] for kind in kinds)).pack_into
        self._slots = (ctypes.c_uint64 * max(len(kinds), 1))()
        begin = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * max(len(kinds), 1))(*range(begin, begin + 8 * len(kinds), 8))
        self._parameters = ctypes.addressof(self._pointers)
        self._grid = self._fixed = None  # those of the last launch: the slots behind the leading ones hold `_fixed`
        self._overlapping: Any = None  # the configuration of a kernel that overlaps

    def __call__(self, stream: int, grid: tuple[int, int], leading: Sequence[int], fixed: tuple) -> None:
        """Enqueue on `stream` with the arguments `leading` (addresses), then `fixed`. The context of the device has to be current.

        Cheapest when `grid` and `fixed` are the very objects of the last launch. Nothing is launched for an empty grid.
        """
        if fixed is self._fixed and grid is self._grid:
            self._pack_leading(self._slots, 0, *leading)
        elif 0 in grid:
            return
        else:
            source, self._fixed = self._kernel.source, None  # an argument that is refused leaves the slots half written
            self._pack(self._slots, 0, *leading, *fixed)
            self._pack_leading = _addresses_packer(len(leading))
            self._head = (self._kernel.function, *grid, 1, source.threads, 1, 1, source.shared_bytes)
            if source.overlaps:
                self._overlapping, self._stream = driver.overlapping_launch(grid, source.threads, source.shared_bytes), None
            self._grid, self._fixed = grid, fixed
        if self._overlapping is None:
            status, = self._launch(*self._head, stream, self._parameters, 0)
        else:
            if stream != self._stream:
                self._overlapping.hStream = self._stream = stream
            status, = self._launch_with(self._overlapping, self._kernel.function, self._parameters, 0)
        if status:
            driver.fail("cuLaunchKernel" if self._overlapping is None else "cuLaunchKernelEx", status)


_lock = threading.Lock()
_loaded: dict[tuple, LoadedKernel] = {}


def load(source: KernelSource, ordinal: int) -> LoadedKernel:
    """The kernel on GPU `ordinal`, compiled and loaded at most once a process."""
    key = (source.name, source.config, source.threads, source.min_blocks, ordinal)
    with _lock:
        if key not in _loaded:
            _loaded[key] = LoadedKernel(source, ordinal)
        return _loaded[key]
