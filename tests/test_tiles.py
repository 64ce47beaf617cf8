"""Each of the three tile configurations, whatever the number of heads would choose, in both implementations."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from support import cases, machine, oracle
from support.problems import build

import cuda_ref.backend
import numba_verify.backend
from numba_verify.api import make_api
from numba_verify.kernels.config import TILE_CONFIGS
from numba_verify.planner import Implementation

pytestmark = pytest.mark.kernel

# Heads that fill, overfill and underfill a tile of 8 and of 16; a prefix that ends inside a tile of 16 and of 32; a cut tile.
NAMES = ("ragged", "nine_heads", "three_heads", "full_row_fp32", "nan_draft_aside", "split")


def with_tile(name, index):
    """verify_mla of an implementation with tile configuration number `index`."""
    if name == "numba_verify":
        module, make = numba_verify.backend, functools.partial(numba_verify.backend.make_executor, tile=TILE_CONFIGS[index])
    else:
        # nvr_tile_config counts from 1 in the same order; 0 leaves the choice to the library
        module, make = cuda_ref.backend, functools.partial(cuda_ref.backend.Executor, tile_config=index + 1)
    # A name of its own: plans that verify_mla keeps must not be shared with another tile's.
    implementation = Implementation(f"{name} {TILE_CONFIGS[index]}", module.AVAILABLE, module.support, make, "reference")
    return SimpleNamespace(verify_mla=make_api(implementation, module.warm).verify_mla)


@pytest.mark.parametrize("index", range(len(TILE_CONFIGS)), ids=[str(tile) for tile in TILE_CONFIGS])
@pytest.mark.parametrize("kernel", ["flash", "paged"])
@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS if c.name in NAMES], ids=str)
def test_tile(case, name, kernel, index, monkeypatch):
    problem = build(case)
    monkeypatch.setitem(machine.IMPLEMENTATIONS, "tile under test", with_tile(name, index))
    out, lse = machine.Call("tile under test", kernel, problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} {kernel} {name} {TILE_CONFIGS[index]}")
    assert not np.isnan(lse[:problem.total_q]).any() or case.nan_at
