"""Kernels under the simulator's race checker, and in shuffled order of blocks and threads: clean, and the same bits.

A GPU runs blocks and warps in any order, so a result that depends on the order is a race, whether or not the order at hand shows it. Each
case makes all launches of a step run: schedule, expand, the kernel, and combine for those that cut tiles.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.mma_cases import MMA, SIBLINGS
from support.mma_mutants import HOLDING, HOLDING_LONG
from support.mutant_list import FIXED, NO_REQUESTS, PAGES, PARENTS, SMALL, SPLIT, TWO_APART
from support.mutants import run_and_check, simulated
from support.wgmma_mutants import DELAYED

from numba_verify.backend import launched_kernels
from numba_verify.kernels.mma_config import MMA_TILES
from numba_verify.kernels.wgmma_config import WGMMA_TILES

pytestmark = pytest.mark.kernel

#: Kernel, case, why. `paged` is cut in one case and not in the other; trees and masks take different paths through `expand`.
CASES = [
    ("naive", SMALL, "no shared memory, but schedule before it has some"),
    ("naive", NO_REQUESTS, "schedule has no chunk to scan"),
    ("naive", PARENTS, "expand walks parents"),
    ("naive", replace(SMALL, name="dense", tree_form="dense"), "expand reads a mask by warps"),
    (
        "naive",
        replace(SMALL, name="many_requests", trees=((-1,),) * 300, prefix=(1,) * 300, heads=1, latent_dim=32, rope_dim=0),
        "schedule needs a second chunk of 256 requests",
    ),
    ("flash", SMALL, "two KV tiles and a tail"),
    ("flash", replace(SMALL, name="two_head_tiles", heads=18, prefix=(3, 2)), "16 heads a tile, one block more a row"),
    ("flash", replace(PAGES, name="aside", draft_in_cache=False), "draft rows from a second place"),
    ("paged", SMALL, "several tiles a CTA, none cut"),
    ("paged", SPLIT, "tiles cut evenly, merged by combine"),
    ("paged", TWO_APART, "tiles with CTAs of their own"),
    (
        "paged",
        replace(FIXED, name="deterministic", trees=((-1,),), prefix=(1030,), rope_dim=0),
        "cut by the request, merged by combine",
    ),
]
IDS = [f"{kernel}-{case.name}" for kernel, case, _ in CASES]


@pytest.mark.parametrize("kernel, case, reason", CASES, ids=IDS)
def test_no_races(kernel, case, reason, monkeypatch):
    with simulated(monkeypatch, check_races=True) as launched:
        run_and_check(case, kernel)
    assert tuple(launched) == launched_kernels(kernel)


@pytest.mark.parametrize("kernel, case, reason", CASES, ids=IDS)
def test_order_does_not_matter(kernel, case, reason, monkeypatch):
    """Bit for bit, the padding rows included: they hold the poison they were made with."""
    results = []
    for seed in (None, 1, 2):
        with simulated(monkeypatch, seed=seed):
            results.append(run_and_check(case, kernel))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), results[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), results[0][1].view(np.uint32))


ROUNDS = replace(MMA, name="rounds", trees=(SIBLINGS,), prefix=(250,))
POISONED = replace(MMA, name="poisoned", trees=(SIBLINGS, (-1, 0)), prefix=(30, 5), nan_at=(0, 32), heads=9)
PIECES = replace(MMA, name="pieces", trees=((-1,),) * 4 + ((-1, 0, 0),) * 3, prefix=(3, 0, 40, 17, 33, 9, 0))
CUT = replace(MMA, name="cut", trees=((-1, 0),), prefix=(520,))
#: Value warps that hold back; two groups of two warps each; four groups of one; a ring with fewer blocks than a step of every group takes.
SOME_TILES = [HOLDING, HOLDING_LONG] + [next(tile for tile in MMA_TILES if wanted(tile)) for wanted in (
    lambda tile: tile.row_warps == 2, lambda tile: tile.groups == 4 and tile.keys == 16, lambda tile: tile.blocks < tile.full_barriers)]
#: `mma`: every tile on the case in which ring blocks and barriers are used again and again, some on the others.
MMA_CASES = [(tile, ROUNDS) for tile in (*MMA_TILES, *SOME_TILES[:2])] + [(tile, case) for tile in SOME_TILES for case in (POISONED, PIECES, CUT)]


#: `wgmma`: as it is, and where the value warpgroups wait for the scores of the step that follows.
WGMMA_CASES = [(tile, case) for tile in (*WGMMA_TILES, DELAYED) for case in (ROUNDS, POISONED, PIECES, CUT)]


@pytest.mark.parametrize("kernel, tile, case", [("mma", *some) for some in MMA_CASES] + [("wgmma", *some) for some in WGMMA_CASES], ids=str)
def test_roles_have_no_races_in_any_order(kernel, tile, case, monkeypatch):
    """Roles wait for each other by named barriers and mbarriers, and wgmma reads by another proxy; whoever is first, the bits are the same."""
    results = []
    for seed in (None, 1, 2):
        with simulated(monkeypatch, tile=tile, check_races=True, seed=seed) as launched:
            results.append(run_and_check(case, kernel))
        assert tuple(launched) == launched_kernels(kernel)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out.view(np.uint16), results[0][0].view(np.uint16))
        np.testing.assert_array_equal(lse.view(np.uint32), results[0][1].view(np.uint32))
