"""Device time of short kernels, measured so that it can be believed.

Event pairs around one short launch time the queue, not the kernel; back-to-back launches of one input time the L2 cache. Here the calls
are captured into a CUDA graph, one for each of several copies of the KV pool that together exceed the L2 cache, and the graph is replayed
between two events: microseconds per call = replay time / calls. The figure is the median over replays.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .gpu import driver

#: Bytes the rotated pools hold together at least; twice the L2 cache where that is more.
COLD_BYTES = 160 << 20
#: Before a replay the GPU rests so many times as long as the longest took, but at most so many seconds. Large products reach its power limit
#: some 30 ms after they begin (an H200: 1.75 GHz, then 1.5), and what is measured then depends on what was measured before.
REST, LONGEST_REST = 2.0, 0.1


class Timing(NamedTuple):
    """Microseconds of one call: median, least and greatest over `replays` graph replays of `calls` calls."""

    median_us: float
    low_us: float
    high_us: float
    calls: int
    replays: int


class Replay:
    """Functions (each takes a stream handle) captured in one CUDA graph. Close it to free the graph; until then the functions are kept, and with
    them the plans and arrays whose memory the graph works on."""

    def __init__(self, ordinal: int, calls: Sequence[Callable[[int], None]]):
        kinds = driver._driver()
        self.calls, self._ordinal, self._kept = len(calls), ordinal, tuple(calls)
        with contextlib.ExitStack() as undo, driver.context(ordinal):
            self._stream = driver.call("cuStreamCreate", kinds.CUstream_flags.CU_STREAM_NON_BLOCKING)
            undo.callback(driver.call, "cuStreamDestroy", self._stream)
            self._events = []
            for _ in range(2):
                self._events.append(driver.call("cuEventCreate", kinds.CUevent_flags.CU_EVENT_DEFAULT))
                undo.callback(driver.call, "cuEventDestroy", self._events[-1])
            for enqueue in calls:  # everything is compiled, loaded and has run once before the capture
                enqueue(int(self._stream))
            driver.call("cuStreamSynchronize", self._stream)
            driver.call("cuStreamBeginCapture", self._stream, kinds.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            for enqueue in calls:
                enqueue(int(self._stream))
            graph = driver.call("cuStreamEndCapture", self._stream)
            undo.callback(driver.call, "cuGraphDestroy", graph)
            self._executable = driver.call("cuGraphInstantiate", graph, 0)
            undo.callback(driver.call, "cuGraphExecDestroy", self._executable)
            self._undo = undo.pop_all()

    def replay_us(self) -> float:
        """Replay once: microseconds per call."""
        with driver.context(self._ordinal):
            driver.call("cuEventRecord", self._events[0], self._stream)
            driver.call("cuGraphLaunch", self._executable, self._stream)
            driver.call("cuEventRecord", self._events[1], self._stream)
            driver.call("cuEventSynchronize", self._events[1])
            return 1000.0 * driver.call("cuEventElapsedTime", *self._events) / self.calls

    def close(self) -> None:
        with driver.context(self._ordinal):
            self._undo.close()
        self._kept = ()


class Replayed(Protocol):
    """What interleaved_times takes: a Replay, or the same of a library with graphs of its own."""

    calls: int

    def replay_us(self) -> float: ...


def interleaved_times(graphs: Sequence[Replayed], replays: int, warm_up: int = 3) -> list[Timing]:
    """Replay the graphs in turn, A B A B and not A A B B, so that clocks and temperature drift alike for all of them, and rest in between."""
    times: list[list[float]] = [[] for _ in graphs]
    longest = 0.0  # seconds of a replay: all rest alike
    for i in range(warm_up + replays):
        for graph, measured in zip(graphs, times, strict=True):
            time.sleep(min(REST * longest, LONGEST_REST))
            us = graph.replay_us()
            longest = max(longest, us * graph.calls * 1e-6)
            if i >= warm_up:
                measured.append(us)
    return [Timing(statistics.median(us), min(us), max(us), graph.calls, replays) for graph, us in zip(graphs, times, strict=True)]


def graph_time(ordinal: int, calls: Sequence[Callable[[int], None]], replays: int = 30, warm_up: int = 3) -> Timing:
    """Capture every function of `calls` (each takes a stream handle) in one graph and time its replay."""
    graph = Replay(ordinal, calls)
    try:
        return interleaved_times([graph], replays, warm_up)[0]
    finally:
        graph.close()


def host_time(call: Callable[[], None], synchronize: Callable[[], None], repeats: int = 200) -> float:
    """Host microseconds of `call`, the median of single calls, without waiting for the device; `synchronize` keeps the queue short."""
    times = []
    for i in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1000.0)
        if i % 20 == 19:
            synchronize()
    synchronize()
    return statistics.median(times)
