"""Where the commands run kernels: a GPU, or NumPy arrays on the host (the simulator, and the host build of cuda_ref)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..gpu import driver
from ..gpu.device_array import DeviceArray, to_device


class Place(NamedTuple):
    """GPU `ordinal`, or the host for None."""

    ordinal: int | None

    @property
    def name(self) -> str:
        return "the CPU" if self.ordinal is None else driver.device_info(self.ordinal).name

    def put(self, array: Any) -> Any:
        """A copy of a NumPy array here; anything else (None, a DraftTree) as it is."""
        if not isinstance(array, np.ndarray):
            return array
        return array.copy() if self.ordinal is None else to_device(array, self.ordinal)

    def get(self, array: Any) -> np.ndarray:
        """The contents of an array of `put`, after all work of the default stream."""
        return array.numpy() if isinstance(array, DeviceArray) else array.copy()

    def overwrite(self, target: Any, values: np.ndarray) -> None:
        """New contents for an array of `put`, of the same shape and dtype, at the same address."""
        if self.ordinal is None:
            target[...] = values
            return
        with driver.context(self.ordinal):
            driver.copy_to_device(target.buffer.address, np.ascontiguousarray(values), 0)
            driver.synchronize(0)

    def synchronize(self) -> None:
        """Wait for the default stream."""
        if self.ordinal is not None:
            with driver.context(self.ordinal):
                driver.synchronize(0)


HOST = Place(None)


def best_place() -> Place:
    """The first GPU, or the host when there is none."""
    return Place(0) if driver.device_count() else HOST


@contextmanager
def captured(ordinal: int, enqueue: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """A CUDA graph of what `enqueue(stream)` does; the function that comes out replays it and waits."""
    kinds = driver._driver()
    with driver.context(ordinal):
        stream = driver.call("cuStreamCreate", kinds.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            driver.call("cuStreamBeginCapture", stream, kinds.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            try:
                enqueue(int(stream))
            finally:
                graph = driver.call("cuStreamEndCapture", stream)
            executable = driver.call("cuGraphInstantiate", graph, 0)

            def replay() -> None:
                driver.call("cuGraphLaunch", executable, stream)
                driver.synchronize(stream)

            yield replay
            driver.call("cuGraphExecDestroy", executable)
            driver.call("cuGraphDestroy", graph)
        finally:
            driver.call("cuStreamDestroy", stream)


def driver_text() -> str:
    """Version of the installed driver and of the CUDA it speaks. DriverError with no driver."""
    speaks = driver.call("cuDriverGetVersion")
    try:
        from cuda.core import system

        version = ".".join(f"{part:02}" for part in system.get_kernel_mode_driver_version())
    except (ImportError, AttributeError, RuntimeError):  # the answer is NVML's, which not every container has
        version = "of unknown version"
    return f"driver {version}, CUDA {speaks // 1000}.{speaks % 1000 // 10}"
