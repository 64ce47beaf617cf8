"""Where a kernel of the test suite can run. A test that takes the fixture's `backend` runs on every one of them.

A backend has a `name` and

    run_kernel(build, grid, block, shared_bytes, arrays)

build(lang, config) is a kernel factory (config is None); grid is (x, y) blocks of `block` threads; the kernel's arguments are the
addresses of the NumPy `arrays`, in order, which hold what the kernel wrote when the call returns.
"""

import functools

from numba_verify.gpu import driver, launch, simulator
from numba_verify.gpu.compile import KernelSource, compile_uncached
from numba_verify.gpu.device_array import to_device


class Simulator:
    """Greenlets on the CPU, with the race checker on: a test kernel has to be right, not lucky."""

    name = "simulator"

    @staticmethod
    def run_kernel(build, grid, block, shared_bytes, arrays):
        kernel = build(simulator.language(), None)
        simulator.launch(kernel, grid=grid, block=block, shared_bytes=shared_bytes, args=arrays, check_races=True)


class Gpu:
    """The first GPU, through the same compiler and launcher as the product's kernels."""

    name = "gpu"

    @staticmethod
    def run_kernel(build, grid, block, shared_bytes, arrays):
        source = KernelSource("instruction_test", build, None, ("address",) * len(arrays), block, shared_bytes=shared_bytes)
        # Past the caches: their key cannot tell the build function of one test from that of another.
        cubin = compile_uncached(source, driver.device_info(0).arch)
        placed = [to_device(array) for array in arrays]
        with driver.context(0):
            launch.LoadedKernel(source, 0, cubin).launch(0, grid, [array.buffer.address for array in placed])
        for array, device_array in zip(arrays, placed, strict=True):
            array[...] = device_array.numpy()


@functools.cache
def backends():
    """Every place that this machine offers, the simulator first."""
    return [Simulator()] + ([Gpu()] if driver.device_count() else [])
