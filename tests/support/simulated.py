"""Helpers of the simulator's tests."""

import inspect

import pytest

from numba_verify.gpu.simulator import SimulatorError, launch


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
