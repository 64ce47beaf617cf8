"""Result files as a measurement would leave them, with invented figures: for tests of what reads them."""

import itertools

from asv_bench.benchmarks import common, device

CONDITIONS = {"cpu": "a CPU", "cores": "16", "gpu": "NVIDIA H200", "driver": "580.1", "sm_clock": "1980 MHz", "power_limit": "700 W",
              "versions": {"python": "3.12.3", "numba": "0.68.1"}}


def measured(family, track, values, **more):
    """What asv_bench/measure.py writes of one benchmark; `values`: parameters -> figure, NaN where there is none."""
    name = f"{family.__module__.rpartition('.')[2]}.{family.__name__}.{track}"
    keys = common.all_keys(family)
    axes = [[repr(value) for value in axis] for axis in family.params]
    row = [[values.get(key, float("nan")) for key in keys], axes, getattr(family, track).version, 1, 0.1]
    return {"results": {name: row}, "measured": {name: list(range(len(keys)))}, "failures": {}, "versions": CONDITIONS["versions"], "under_load": {},
            **more}


def device_times(us):
    """Of every kernel and shape, cold; us(implementation, kernel, shape) -> microseconds."""
    keys = itertools.product(common.IMPLEMENTATIONS, common.KERNELS, common.SHAPES)
    return measured(device.Device, "track_device_us", {(*key, device.COLD): us(*key) for key in keys})


def about(**conditions):
    """A machine as tools/results.py describes it."""
    details = {"arch": "x86_64", "cpu": "a CPU + NVIDIA H200", "num_cpu": "16", "os": "Linux", "ram": "128 GiB"}
    return "nvidia-h200", details, {**{key: value for key, value in CONDITIONS.items() if key != "versions"}, **conditions}
