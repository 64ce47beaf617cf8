"""Helpers of the simulator's tests."""

import inspect

import pytest

from numba_verify.gpu import simulator
from numba_verify.gpu.simulator import SimulatorError, launch

lang = simulator.language()
WARP = 32
FIRST = lang.shared_address(0)
wait = lang.mbarrier_wait(True)
#: Named barriers of all 64 threads of a block.
ready, free = lang.named_barrier(1, 64), lang.named_barrier(2, 64)


def fails(kernel, *texts, block=64, args=(), shared_bytes=1024, grid=(1, 1), **options):
    """Launch, expect a SimulatorError whose text matches every pattern, return it."""
    with pytest.raises(SimulatorError) as caught:
        launch(kernel, grid=grid, block=block, shared_bytes=shared_bytes, args=args, **options)
    for text in texts:
        assert text in str(caught.value)
    return caught.value


def line_of(kernel, marker):
    """"file:line" of the line of `kernel` that ends in the comment `marker`."""
    lines, first = inspect.getsourcelines(kernel)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {marker}")]
    return f"{inspect.getsourcefile(kernel)}:{first + offset}"


def run(kernel, block=64, shared_bytes=1024, args=(), **options):
    launch(kernel, grid=(2, 1), block=block, shared_bytes=shared_bytes, args=args, **options)


def in_every_order(kernel, **options):
    """No race and no failed assertion, whichever thread is first."""
    for seed in (None, 1, 2, 3):
        run(kernel, check_races=True, seed=seed, **options)


def mbarriers(*counts):
    """In a kernel: thread 0 makes an mbarrier of each count at bytes 0, 8, ...; then all threads know them."""
    if lang.tid_x() == 0:
        for i, count in enumerate(counts):
            lang.mbarrier_init(FIRST + 8 * i, count)
    lang.bar_sync()
