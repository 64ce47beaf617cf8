"""Device time of short kernels, measured so that it can be believed.

Event pairs around one short launch time the queue, not the kernel; back-to-back launches of one input time the L2 cache. Here the calls
are captured into a CUDA graph, one for each of several copies of the KV pool that together exceed the L2 cache, and the graph is replayed
between two events: microseconds per call = replay time / calls. The figure is the median over replays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .gpu import driver

#: Bytes the rotated pools hold together at least; twice the L2 cache where that is more.
COLD_BYTES = 160 << 20


class Timing(NamedTuple):
    """Microseconds of one call: median, least and greatest over `replays` graph replays of `calls` calls."""

    median_us: float
    low_us: float
    high_us: float
    calls: int
    replays: int


def graph_time(ordinal: int, calls: Sequence[Callable[[int], None]], replays: int = 30, warm_up: int = 3) -> Timing:
    """Capture every function of `calls` (each takes a stream handle) in one graph and time its replay."""
    kinds = driver._driver()
    with driver.context(ordinal):
        stream = driver.call("cuStreamCreate", kinds.CUstream_flags.CU_STREAM_NON_BLOCKING)
        events = [driver.call("cuEventCreate", kinds.CUevent_flags.CU_EVENT_DEFAULT) for _ in range(2)]
        try:
            handle = int(stream)
            for enqueue in calls:  # everything is compiled, loaded and has run once before the capture
                enqueue(handle)
            driver.call("cuStreamSynchronize", stream)
            driver.call("cuStreamBeginCapture", stream, kinds.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            for enqueue in calls:
                enqueue(handle)
            graph = driver.call("cuStreamEndCapture", stream)
            executable = driver.call("cuGraphInstantiate", graph, 0)
            times = []
            for i in range(warm_up + replays):
                driver.call("cuEventRecord", events[0], stream)
                driver.call("cuGraphLaunch", executable, stream)
                driver.call("cuEventRecord", events[1], stream)
                driver.call("cuEventSynchronize", events[1])
                if i >= warm_up:
                    times.append(1000.0 * driver.call("cuEventElapsedTime", *events) / len(calls))
            driver.call("cuGraphExecDestroy", executable)
            driver.call("cuGraphDestroy", graph)
        finally:
            for event in events:
                driver.call("cuEventDestroy", event)
            driver.call("cuStreamDestroy", stream)
    return Timing(statistics.median(times), min(times), max(times), len(calls), replays)


def host_time(call: Callable[[], None], synchronize: Callable[[], None], repeats: int = 200) -> float:
    """Host microseconds of `call`, the median of single calls, without waiting for the device; `synchronize` keeps the queue short."""
    import time

    times = []
    for i in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1000.0)
        if i % 20 == 19:
            synchronize()
    synchronize()
    return statistics.median(times)
