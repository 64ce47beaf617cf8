"""How long does the GPU take for one call, how exact is the result, how much scratch does a plan take? Lower is better.

The three families share one measurement. All figures of a run are taken in one process, and the graphs of the implementations of a kernel
and shape are replayed in turn: clocks and temperature drift, and two figures are compared only when they saw the same. asv then reads
them one by one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

try:
    from . import common
except ImportError:  # run as a script
    import common

COLD, WARM = "cold", "warm"
#: A call slower than this is not measured: `naive` at the large shapes, which nobody would run and which would take minutes.
SLOWEST_MS = 20.0
#: Graph replays of a figure: as many as fit in the seconds, within the bounds. A slow call's relative noise is small.
MOST_REPLAYS, LEAST_REPLAYS, REPLAY_SECONDS = 30, 5, 0.4

Key = tuple[str, str, str]  # implementation, kernel, shape


class Entry(NamedTuple):
    """What was found of one implementation, kernel and shape: numbers, or texts as common.attempt gives them."""

    cold_us: float | str
    warm_us: float | str
    error: float | str
    workspace_bytes: int | str


def collect(keys: Iterable[tuple[str, ...]]) -> dict[Key, Entry]:
    """Entries of all (implementation, kernel, shape, ...) of `keys`. Empty with no GPU."""
    wanted = dict.fromkeys(tuple(key[:3]) for key in keys)
    if common.gpu_reason():
        return {}
    entries = {}
    for shape in dict.fromkeys(shape for _, _, shape in wanted):
        together = [key for key in wanted if key[2] == shape]
        if common.out_of_time():
            entries.update(dict.fromkeys(together, Entry(*["not measured: out of time"] * 4)))
            continue
        work = common.workload(common.shape_of(shape))
        for kernel in dict.fromkeys(kernel for _, kernel, _ in together):
            names = [name for name, of, _ in together if of == kernel]
            entries.update({(name, kernel, shape): entry for name, entry in measure(work, kernel, names).items()})
    return entries


def measure(work: Any, kernel: str, names: list[str]) -> dict[str, Entry]:
    """Check every implementation, then time those that are right, their graphs in turn."""
    entries, ready = {}, {}
    for name in names:
        found = common.attempt(functools.partial(prepare, work, kernel, name))
        if isinstance(found, str):
            entries[name] = Entry(found, found, found, found)
            continue
        plan, error, milliseconds = found
        slow = f"takes {milliseconds:.0f} ms a call; measured up to {SLOWEST_MS:.0f}"
        entries[name] = Entry(slow, slow, error, plan.workspace_bytes)
        if milliseconds <= SLOWEST_MS:
            ready[name] = (plan, milliseconds)
    if ready:
        slowest = max(milliseconds for _, milliseconds in ready.values())
        for state in (COLD, WARM):
            times = common.attempt(functools.partial(medians_in_turn, work, [plan for plan, _ in ready.values()], state, slowest))
            for i, name in enumerate(ready):
                entries[name] = entries[name]._replace(**{f"{state}_us": times if isinstance(times, str) else times[i]})
    return entries


def prepare(work: Any, kernel: str, name: str) -> tuple[Any, float, float]:
    """(plan, error, milliseconds of a call by the host's clock)."""
    from numba_verify.gpu import driver

    plan = work.plan(common.implementation(name), kernel)
    error = common.run_checked(work, plan)
    begin = time.perf_counter()
    with driver.context(work.ordinal):
        work.run(plan)
        driver.synchronize(0)
    return plan, error, 1e3 * (time.perf_counter() - begin)


def medians_in_turn(work: Any, plans: list[Any], state: str, milliseconds: float) -> list[float]:
    """Median microseconds of each plan."""
    from numba_verify.gpu import driver
    from numba_verify.timing import Replay, interleaved_times

    l2_bytes, kv_bytes = driver.device_info(work.ordinal).l2_bytes, work.pools[0].buffer.nbytes
    if state == WARM and kv_bytes > l2_bytes:
        raise common.skip(f"{kv_bytes / 1e6:.0f} MB of KV do not fit in an L2 cache of {l2_bytes / 1e6:.0f} MB")
    graphs = []
    try:
        for plan in plans:
            graphs.append(Replay(work.ordinal, work.calls(plan, warm=state == WARM)))
        return [timing.median_us for timing in interleaved_times(graphs, replays(graphs[0].calls, milliseconds))]
    finally:
        for graph in graphs:
            graph.close()


def replays(calls: int, milliseconds: float) -> int:
    return max(LEAST_REPLAYS, min(MOST_REPLAYS, int(1e3 * REPLAY_SECONDS / (calls * milliseconds))))


class _Family:
    """setup_cache and setup of the families below; `_figure` picks theirs from an Entry."""

    timeout = 60
    collect = staticmethod(collect)

    def setup_cache(self):
        return collect(common.all_keys(Device))

    setup_cache.timeout = 1200

    def setup(self, entries, impl, kernel, shape, *rest):
        if not entries:
            common.require_gpu()
        common.figure_or_skip(self._figure(entries[impl, kernel, shape], *rest))


class Device(_Family):
    """Device time of `Plan.run`, 512/64 in bfloat16, page size 1, KV scattered token by token, a random draft tree."""

    params = [common.IMPLEMENTATIONS, common.KERNELS, common.SHAPES, (COLD, WARM)]
    param_names = ["impl", "kernel", "shape", "l2"]

    @staticmethod
    def _figure(entry, l2):
        return getattr(entry, f"{l2}_us")

    def track_device_us(self, entries, impl, kernel, shape, l2):
        return common.figure_or_failure(self._figure(entries[impl, kernel, shape], l2))

    track_device_us.unit = "us"
    track_device_us.version = "1"


class Accuracy(_Family):
    """Largest error of a few rows against float64, as a part of the row's norm."""

    params = [common.IMPLEMENTATIONS, common.KERNELS, common.SHAPES]
    param_names = ["impl", "kernel", "shape"]

    @staticmethod
    def _figure(entry):
        return entry.error

    def track_max_relative_error(self, entries, impl, kernel, shape):
        return common.figure_or_failure(entries[impl, kernel, shape].error)

    track_max_relative_error.unit = "of the norm"
    track_max_relative_error.version = "1"


class Workspace(_Family):
    """Scratch memory of a plan."""

    params = Accuracy.params
    param_names = Accuracy.param_names

    @staticmethod
    def _figure(entry):
        return entry.workspace_bytes

    def track_workspace_bytes(self, entries, impl, kernel, shape):
        return common.figure_or_failure(entries[impl, kernel, shape].workspace_bytes)

    track_workspace_bytes.unit = "bytes"
    track_workspace_bytes.version = "1"


if __name__ == "__main__":
    common.run_script(Device, Accuracy, Workspace)
