"""Each tile configuration, whatever the number of heads or of rows would choose: flash and paged of both implementations, mma and wgmma
of numba_verify. Those in CUDA C have such tests in test_cuda_ref_mma.py and test_cuda_ref_wgmma.py."""

import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from support import cases, machine, mma_cases, oracle
from support.problems import build

from numba_verify.api import make_api
from numba_verify.gpu import driver
from numba_verify.kernels.config import TILE_CONFIGS, Shape
from numba_verify.kernels.mma_config import MMA_TILES, Registers
from numba_verify.kernels.wgmma_config import WGMMA_TILES, WgmmaTile
from numba_verify.planner import Implementation

pytestmark = pytest.mark.kernel

# Heads that fill, overfill and underfill a tile of 8 and of 16; a prefix that ends inside a tile of 16 and of 32; a cut tile.
NAMES = ("ragged", "nine_heads", "three_heads", "full_row_fp32", "nan_draft_aside", "split")
# The same of a tile of 16, 32 and 64 rows, in rows of every size; a ring used more than once; peaks that move in every group; poison.
MMA_NAMES = ("rows_21", "rows_63", "full_row_heads", "no_rope_heads", "rounds", "cut_aside", "random_70", "rise_again", "nan_hidden_word",
             "inf_hidden")
ON_TILES = [(case, kernel, tile, name) for case in cases.CORRECTNESS if case.name in NAMES
            for kernel in ("flash", "paged") for tile in TILE_CONFIGS for name in machine.IMPLEMENTATIONS]
ON_TILES += [(case, "mma", tile, "numba_verify") for case in mma_cases.ALL if case.name in MMA_NAMES for tile in MMA_TILES]
#: The tile that plans take, and what else a tile can be: every number of keys, a ring of two, all of Q in registers or hardly any,
#: value warpgroups that wait. These would not fit a GPU's registers, or run slower.
WGMMA_SHAPES = (WgmmaTile(64, 3, 9, Registers(168, 160, 24)), WgmmaTile(48, 2, 1, Registers(168, 160, 24), delayed=1),
                WgmmaTile(32, 5, 6, Registers(168, 160, 24), delayed=2))
ON_TILES += [(case, "wgmma", tile, "numba_verify") for case in mma_cases.ALL if case.name in MMA_NAMES for tile in (*WGMMA_TILES, *WGMMA_SHAPES)]


def with_tile(name, tile):
    """verify_mla of an implementation with `tile`."""
    module = importlib.import_module(f"{name}.backend")
    make = functools.partial(module.make_executor, tile=tile)
    # A name of its own: plans that verify_mla keeps must not be shared with another tile's.
    implementation = Implementation(f"{name} {tile}", module.AVAILABLE, module.support, make, "reference")
    return SimpleNamespace(verify_mla=make_api(implementation, module.warm).verify_mla)


@pytest.mark.parametrize("case, kernel, tile, name", ON_TILES, ids=str)
def test_tile(case, kernel, tile, name, monkeypatch):
    if machine.HAS_GPU and kernel == "wgmma" and not (machine.HAS_WGMMA and tile in WGMMA_TILES):
        pytest.skip("this GPU has no wgmma" if tile in WGMMA_TILES else f"{tile} is for the simulator")
    if machine.HAS_GPU and kernel == "mma" and (limit := beyond_this_gpu(tile)):
        pytest.skip(limit)
    problem = build(case)
    monkeypatch.setitem(machine.IMPLEMENTATIONS, "tile under test", with_tile(name, tile))
    out, lse = machine.Call("tile under test", kernel, problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} {kernel} {name} {tile}")
    assert not np.isnan(lse[:problem.total_q]).any() or case.nan_at


def beyond_this_gpu(tile):
    """Why this GPU cannot run a tile of mma at 512/64, the largest row here."""
    info, need = driver.device_info(0), tile.shared_bytes(Shape(512, 64, "bfloat16"))
    if need > info.shared_bytes:
        return f"{tile} needs {need:,} B of shared memory, {info.name} has {info.shared_bytes:,} B"
    return f"{tile} hands over registers, {info.name} ({info.arch}) cannot" if tile.registers and not info.arch.endswith("a") else ""


def test_no_case_is_missing():
    assert {case.name for case, *_ in ON_TILES} == {*NAMES, *MMA_NAMES}
