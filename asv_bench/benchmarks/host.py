"""How long does the caller's thread take for `run` and `update`? The GPU is not waited for. Lower is better."""

from __future__ import annotations

try:
    from . import common
except ImportError:  # run as a script
    import common


class Host:
    """Host time of one call with `out` and `lse` given: checks, argument lists, launches. The shape hardly matters, the launches do."""

    params = [common.IMPLEMENTATIONS, ("paged", "naive"), ("run", "update")]
    param_names = ["impl", "kernel", "call"]
    shape = "b1_kv4096_t16_h64"
    timeout = 300

    def setup(self, impl, kernel, call):
        common.require_gpu()
        self.work = common.workload(self.shape)
        self.plan = self.work.plan(common.implementation(impl), kernel)
        common.run_checked(self.work, self.plan)

    def track_host_us(self, impl, kernel, call):
        from numba_verify.gpu import driver
        from numba_verify.timing import host_time

        work, plan = self.work, self.plan
        calls = {
            "run": lambda: work.run(plan),
            "update": lambda: plan.update(work.qo_indptr, work.kv_indptr, work.kv_indices, tree=work.tree),
        }
        with driver.context(work.ordinal):
            return host_time(calls[call], lambda: driver.synchronize(0))

    track_host_us.unit = "us"
    track_host_us.version = "1"


if __name__ == "__main__":
    common.run_script(Host)
