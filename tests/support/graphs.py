"""Streams and CUDA graphs of the tests, by the driver's own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba_verify.gpu import driver


@contextmanager
def new_stream() -> Iterator[int]:
    """A stream that does not wait for the legacy default stream; its handle."""
    flag = driver._driver().CUstream_flags.CU_STREAM_NON_BLOCKING
    with driver.context(0):
        stream = driver.call("cuStreamCreate", flag)
        try:
            yield int(stream)
        finally:
            driver.call("cuStreamSynchronize", stream)
            driver.call("cuStreamDestroy", stream)


class Graph:
    """What `record(stream)` enqueues, captured once; `replay` runs it and waits. `kinds`: type name of each node."""

    def __init__(self, stream: int, record: Callable[[int], None]):
        driver_api = driver._driver()
        self._stream = stream
        driver.call("cuStreamBeginCapture", stream, driver_api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        try:
            record(stream)
        finally:
            graph = driver.call("cuStreamEndCapture", stream)
        _, count = driver.call("cuGraphGetNodes", graph, 0)
        nodes, _ = driver.call("cuGraphGetNodes", graph, count) if count else ([], 0)
        self.kinds = [driver.call("cuGraphNodeGetType", node).name for node in nodes]
        self._executable = driver.call("cuGraphInstantiate", graph, 0)
        driver.call("cuGraphDestroy", graph)

    def replay(self) -> None:
        driver.call("cuGraphLaunch", self._executable, self._stream)
        driver.synchronize(self._stream)
