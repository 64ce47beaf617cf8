"""How long does the caller's thread take for `run` and `update`? The GPU is not waited for. Lower is better."""

from __future__ import annotations

import functools
from collections.abc import Iterable

try:
    from . import common
except ImportError:  # run as a script
    import common

SHAPE = "b1_kv4096_t16_h64"
#: Figures of a call and kernel: the implementations are measured in turn, and the median of the rounds counts.
ROUNDS = 3


def collect(keys: Iterable[tuple[str, ...]]) -> dict[tuple[str, str, str], float | str]:
    """(implementation, kernel, call) -> microseconds, or a text as common.attempt gives it. Empty with no GPU."""
    wanted = list(dict.fromkeys(keys))
    if common.gpu_reason():
        return {}
    work, figures, plans = common.workload(common.shape_of(SHAPE)), {}, {}
    for name, kernel in dict.fromkeys(key[:2] for key in wanted):
        plans[name, kernel] = common.attempt(functools.partial(_plan, work, name, kernel))
    rounds = [{key: _time(work, plans[key[:2]], key[2]) for key in sorted(wanted, key=lambda key: key[1:])} for _ in range(ROUNDS)]
    for key in wanted:
        times = [one[key] for one in rounds]
        figures[key] = times[0] if any(isinstance(time, str) for time in times) else sorted(times)[ROUNDS // 2]
    return figures


def _plan(work, name, kernel):
    plan = work.plan(common.implementation(name), kernel)
    common.run_checked(work, plan)
    return plan


def _time(work, plan, call):
    if isinstance(plan, str):
        return plan
    from numba_verify.gpu import driver
    from numba_verify.timing import host_time

    calls = {
        "run": lambda: work.run(plan),
        "update": lambda: plan.update(work.qo_indptr, work.kv_indptr, work.kv_indices, tree=work.tree),
    }

    def measured():
        with driver.context(work.ordinal):
            return host_time(calls[call], lambda: driver.synchronize(0))

    return common.attempt(measured)


class Host:
    """Host time of one call with `out` and `lse` given: checks, argument lists, launches. The shape hardly matters, the launches do."""

    params = [common.IMPLEMENTATIONS, common.KERNELS, ("run", "update")]
    param_names = ["impl", "kernel", "call"]
    timeout = 60
    collect = staticmethod(collect)

    def setup_cache(self):
        return collect(common.all_keys(Host))

    setup_cache.timeout = 600

    def setup(self, figures, impl, kernel, call):
        if not figures:
            common.require_gpu()
        common.figure_or_skip(figures[impl, kernel, call])

    def track_host_us(self, figures, impl, kernel, call):
        return common.figure_or_failure(figures[impl, kernel, call])

    track_host_us.unit = "us"
    track_host_us.version = "1"


if __name__ == "__main__":
    common.run_script(Host)
