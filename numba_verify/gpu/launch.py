"""cubin -> launch through cuda.core: pointers and scalars only.

numba's dispatcher spends 16 to 100 us of host time a launch; this path spends about 6 (docs/facts.md). Arguments are Python ints, passed
as 8 bytes (addresses and int64), and np.float32. A kernel is loaded once a process; its handle serves every device of its architecture.
"""

from __future__ import annotations

import threading
from typing import Any

from . import driver
from .compile import Cubin, KernelSource, compile_kernel


class LoadedKernel:
    """A kernel on one device, ready to launch with a fixed number of threads and bytes of dynamic shared memory."""

    def __init__(self, source: KernelSource, ordinal: int, cubin: Cubin | None = None):
        from cuda.core import ObjectCode, launch

        self._launch = launch
        self.source, self.ordinal = source, ordinal
        self.cubin = cubin or compile_kernel(source, driver.device_info(ordinal).arch)
        with driver.context(ordinal):
            self._kernel = ObjectCode.from_cubin(self.cubin.code).get_kernel(self.cubin.symbol)
            driver.prepare_kernel(int(self._kernel.handle), source.shared_bytes, ordinal)
        self._configs: dict[tuple[int, ...], Any] = {}

    def launch(self, stream: int, grid: tuple[int, ...], arguments: list) -> None:
        """Enqueue on `stream`. The context of the device has to be current. Nothing is launched for an empty grid."""
        if 0 in grid:
            return
        config = self._configs.get(grid)
        if config is None:
            from cuda.core import LaunchConfig

            config = self._configs[grid] = LaunchConfig(grid=grid, block=self.source.threads, shmem_size=self.source.shared_bytes)
        self._launch(_stream(self.ordinal, stream), config, self._kernel, *arguments)


# A wrapper of a handle holds nothing but the handle until it is asked for more, so one that outlives its stream does no harm.
_streams: dict[tuple[int, int], Any] = {}


def _stream(ordinal: int, handle: int) -> Any:
    stream = _streams.get((ordinal, handle))
    if stream is None:
        from cuda.core import Stream

        stream = _streams[ordinal, handle] = Stream.from_handle(handle)
    return stream


_lock = threading.Lock()
_loaded: dict[tuple, LoadedKernel] = {}


def load(source: KernelSource, ordinal: int) -> LoadedKernel:
    """The kernel on GPU `ordinal`, compiled and loaded at most once a process."""
    key = (source.name, source.config, source.threads, source.min_blocks, ordinal)
    with _lock:
        if key not in _loaded:
            _loaded[key] = LoadedKernel(source, ordinal)
        return _loaded[key]

