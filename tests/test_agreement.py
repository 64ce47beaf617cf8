"""Every kernel of both implementations against the float64 oracle, and against each other, on the grid of cases."""

import numpy as np
import pytest
from support import cases, machine, mma_cases, oracle
from support.compare import assert_rows_close
from support.problems import build

import numba_verify
from numba_verify.kernels.work import HEADER_FEW, HEADER_MANY

pytestmark = pytest.mark.kernel

#: Steps of a kernel on tensor cores in the simulator, 32 rows x 32 keys, that end in reasonable time.
MOST_STEPS = 60


def takes(implementation, kernel, case):
    return machine.takes(implementation, kernel, case.latent_dim, case.rope_dim, case.dtype)


def runs_here(implementation, kernel, case):
    """Whether `case` ends in reasonable time where kernels run (Case.size)."""
    if machine.HAS_GPU or case.size == "small":
        return True
    steps = sum(-(-len(tree) * case.heads // 32) * (-(-(prefix + len(tree)) // 32)) for tree, prefix in zip(case.trees, case.prefix, strict=True))
    return case.size == "many_rows" and (implementation == "cuda_ref" or kernel in machine.TENSOR and steps <= MOST_STEPS)


#: Every kernel on every case whose rows it takes. deterministic=True is another code path only in kernels that cut tiles.
PAIRS = [(case, kernel) for case in cases.ALL for kernel in machine.KERNELS
         if takes("numba_verify", kernel, case) and (kernel in machine.SPLITTING or not case.deterministic)]
PAIRS += [(case, kernel) for case in mma_cases.ALL for kernel in machine.TENSOR if takes("numba_verify", kernel, case)]
PAIRS += [(case, "wgmma") for case in mma_cases.WIDE if takes("numba_verify", "wgmma", case)]


@pytest.mark.parametrize("case, kernel", PAIRS, ids=str)
def test_agreement(case, kernel):
    names = [name for name in machine.IMPLEMENTATIONS if takes(name, kernel, case) and runs_here(name, kernel, case)]
    if not names:
        pytest.skip(f"{case} needs a GPU: it would take minutes on the CPU")
    problem = build(case)
    results = {name: machine.Call(name, kernel, problem)() for name in names}
    answer = oracle.solve(problem)
    for name, (out, lse) in results.items():
        oracle.check(problem, answer, out, lse, f"{case} {kernel} {name}")
    if len(results) == 2:
        (ours, _), (twin, _) = results.values()
        ours, twin = ours[:problem.total_q], twin[:problem.total_q].astype(np.float64)
        # Each is within the bound of the oracle; against each other they differ by the order of summation and by the rounding, for which the
        # dense computation's own error, moved from the oracle to the twin, is the same yardstick.
        with np.errstate(invalid="ignore"):
            moved = [np.nan_to_num(twin) + np.nan_to_num(dense - answer.out) for dense in answer.dense]
        assert_rows_close(ours, twin, moved, case.dtype, f"{case} {kernel} numba_verify against cuda_ref")


@pytest.mark.skipif(machine.HAS_GPU, reason="a GPU of more SMs cuts elsewhere, and its tables are not in the host's memory")
@pytest.mark.parametrize("kernel", machine.TENSOR)
@pytest.mark.parametrize("case", [case for case in mma_cases.ALL if "cut" in case.name], ids=str)
def test_cases_named_so_are_cut(case, kernel):
    """Where the schedule cuts is its own affair, and may change: then these cases would test nothing of what they are here for."""
    problem = build(case)
    plan = numba_verify.plan(problem.qo_indptr, problem.kv_indptr, problem.kv_indices, tree=problem.tree, num_heads=case.heads,
                             latent_dim=case.latent_dim, rope_dim=case.rope_dim, dtype=case.dtype, page_size=case.page_size,
                             kv_lens=problem.kv_lens, draft_in_cache=case.draft_in_cache, kernel=kernel, deterministic=case.deterministic)
    merges = plan._executor._place["merges"].view(np.int64)
    assert merges[HEADER_FEW] + merges[HEADER_MANY] > 0


@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS + mma_cases.ALL if c.size != "gpu"], ids=str)
def test_reference(case):
    """kernel="reference" reads the index arrays; the oracle does not."""
    if machine.HAS_GPU:
        pytest.skip("the reference runs on NumPy arrays, which test_agreement does not use on a GPU")
    problem = build(case)
    out, lse = machine.Call("numba_verify", "reference", problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} reference")
