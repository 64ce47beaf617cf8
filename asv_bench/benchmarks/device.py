"""How long does the GPU take for one call? Median of CUDA graph replays, rotated KV pools, cold L2. Lower is better.

All figures of a run are taken in one process, the implementations of a shape and kernel one right after the other: clocks and
temperature drift, and two figures are compared only when they saw the same. asv then reads them one by one.
"""

from __future__ import annotations

import time

try:
    from . import common
except ImportError:  # run as a script
    import common

#: A call slower than this is not measured: `naive` at the large shapes, which nobody would run and which would take minutes.
SLOWEST_MS = 60.0
#: Graph replays; few for slow calls, whose relative noise is small.
REPLAYS, REPLAYS_SLOW, SLOW_MS = 30, 5, 5.0


def measure(implementation: str, kernel: str, work) -> float | str:
    """Microseconds of one call, or why there is none. "failed ..." is a failure, anything else a skip."""
    from numba_verify.errors import UnsupportedError
    from numba_verify.gpu import driver

    try:
        plan = work.plan(common.implementation(implementation), kernel)
        common.run_checked(work, plan)
        begin = time.perf_counter()
        with driver.context(work.ordinal):
            work.run(plan)
            driver.synchronize(0)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        if milliseconds > SLOWEST_MS:
            return f"takes {milliseconds:.0f} ms a call; measured up to {SLOWEST_MS:.0f}"
        return work.time(plan, replays=REPLAYS if milliseconds < SLOW_MS else REPLAYS_SLOW).median_us
    except (NotImplementedError, UnsupportedError) as reason:
        return str(reason)
    except RuntimeError as error:
        return f"failed: {error}"


class Device:
    """Device time of `Plan.run`, 512/64 in bfloat16, page size 1, KV scattered token by token, a random draft tree."""

    params = [common.IMPLEMENTATIONS, common.KERNELS, common.SHAPES]
    param_names = ["impl", "kernel", "shape"]
    timeout = 300

    def setup_cache(self):
        """(impl, kernel, shape) -> microseconds, or a text. Empty with no GPU."""
        figures = {}
        if common.gpu_reason():
            return figures
        for shape in common.SHAPES:
            work = common.workload(shape)
            for kernel in common.KERNELS:
                for implementation in common.IMPLEMENTATIONS:
                    figures[implementation, kernel, shape] = measure(implementation, kernel, work)
        return figures

    setup_cache.timeout = 1200

    def setup(self, figures, impl, kernel, shape):
        common.require_gpu()
        figure = figures[impl, kernel, shape]
        if isinstance(figure, str) and not figure.startswith("failed"):
            raise common.skip(figure)

    def track_device_us(self, figures, impl, kernel, shape):
        figure = figures[impl, kernel, shape]
        if isinstance(figure, str):
            raise RuntimeError(figure)
        return figure

    track_device_us.unit = "us"
    track_device_us.version = "1"


if __name__ == "__main__":
    common.run_script(Device)
