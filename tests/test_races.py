"""Kernels under the simulator's race checker, and in shuffled order of blocks and threads: clean, and the same bits.

A GPU runs blocks and warps in any order, so a result that depends on the order is a race, whether or not the order at hand shows it. Each
case makes all launches of a step run: schedule, expand, the kernel, and combine for `paged`.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.mutant_list import FIXED, NO_REQUESTS, PAGES, PARENTS, SMALL, WHOLE_AND_CUT
from support.mutants import run_and_check, simulated

from numba_verify.backend import launched_kernels

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
    ("paged", WHOLE_AND_CUT, "cut tiles, merged by combine"),
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
