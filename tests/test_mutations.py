"""Tests of the tests: every known way to break a kernel is caught by a check that exists, and by the one that is meant to catch it.

The mutants and their reasons are data in support/mutant_list.py. They run in the simulator, with or without a GPU.
"""

import re

import pytest
from support import machine, mutants
from support.mma_cases import MMA
from support.mma_mutants import MMA_MUTANTS, SIGNAL_MODULES
from support.mutant_list import MUTANTS, SMALL, Mutant
from support.mutants import (
    MODULES_WITH_BARRIERS,
    SPECIAL_BARRIERS,
    StaleMutant,
    barrier_mutants,
    mutate,
    mutated_kernels,
    run_and_check,
    signal_mutants,
    simulated,
)
from support.wgmma_mutants import WGMMA_MUTANTS, WGMMA_SIGNAL_MODULES

from numba_verify.gpu.simulator import SimulatorError

pytestmark = pytest.mark.kernel

BARRIERS, SIGNALS = barrier_mutants(), signal_mutants()
NUMBERS = MUTANTS + MMA_MUTANTS + WGMMA_MUTANTS
#: Cases of the race checker have their control in test_races.py.
CONTROLS = {f"{mutant.case}-{'_'.join(map(str, mutant.case.prefix))}-{mutant.kernel}-{mutant.tile or ''}": mutant
            for mutant in [*NUMBERS, SIGNALS[0], SIGNALS[-1]]}


@pytest.mark.parametrize("mutant", CONTROLS.values(), ids=CONTROLS)
def test_the_kernels_as_they_are_pass(mutant, monkeypatch):
    """The other half of every test below: the case itself is not what fails."""
    with simulated(monkeypatch, tile=mutant.tile, check_races=mutant.races):
        run_and_check(mutant.case, mutant.kernel)


@pytest.mark.parametrize("mutant", NUMBERS + BARRIERS + SIGNALS, ids=str)
def test_mutant_is_caught(mutant, monkeypatch, tmp_path):
    with mutated_kernels(mutant, tmp_path) as modules, simulated(monkeypatch, modules, mutant.tile, check_races=mutant.races) as launched:
        with pytest.raises((AssertionError, SimulatorError), match=mutant.caught):
            run_and_check(mutant.case, mutant.kernel)
    assert launched


def test_a_stale_mutation_says_so():
    with pytest.raises(StaleMutant, match=re.escape("m: the mutation is stale: 'b' stands 2 times in the source, expected once")):
        mutate("a b b", "b", "c", "m")
    with pytest.raises(StaleMutant, match="stands 0 times"):
        mutate("a", "b", "c", "m")
    assert mutate("a b", "b", "c", "m") == "a c"


def test_a_copy_without_a_defect_passes(monkeypatch, tmp_path):
    """The machinery itself breaks nothing: what a mutant does is due to its edit."""
    for kernel in machine.KERNELS:
        nothing = Mutant("nothing", kernel, (), MMA if kernel in machine.TENSOR else SMALL, "")
        folder = tmp_path / kernel
        folder.mkdir()
        with mutated_kernels(nothing, folder) as modules, simulated(monkeypatch, modules) as launched:
            run_and_check(nothing.case, kernel)
            assert modules["flash"].build.__module__ == "numba_verify.mutant_nothing.flash"
        assert kernel in launched


def test_every_barrier_is_tried():
    found = sum(mutants.source_of(path.stem).count("bar_sync()\n") for path in mutants.KERNELS_FOLDER.glob("*.py"))
    assert {mutant.edits[0][0] for mutant in SIGNALS} == {*SIGNAL_MODULES, *WGMMA_SIGNAL_MODULES}
    assert len(BARRIERS) == found, "a module with barriers is missing in support.mutant_list.BARRIERS"
    sources = "".join(mutants.source_of(module) for module in MODULES_WITH_BARRIERS)
    for comment in SPECIAL_BARRIERS:
        assert comment in sources, f"no barrier has this comment any more: {comment}"
