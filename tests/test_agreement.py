"""Every kernel of both implementations against the float64 oracle, and against each other, on the grid of cases."""

import numpy as np
import pytest
from support import cases, machine, oracle
from support.compare import assert_rows_close
from support.problems import build

pytestmark = pytest.mark.kernel


def runs_here(implementation, case):
    """Whether `case` ends in reasonable time where kernels run (Case.size)."""
    if machine.HAS_GPU or case.size == "small":
        return True
    return case.size == "many_rows" and implementation == "cuda_ref"


@pytest.mark.parametrize("kernel", machine.KERNELS)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_agreement(case, kernel):
    if case.deterministic and kernel != "paged":
        pytest.skip("naive and flash cut nothing: deterministic or not is one code path")
    names = [name for name in machine.IMPLEMENTATIONS if runs_here(name, case)]
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


@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS if c.size != "gpu"], ids=str)
def test_reference(case):
    """kernel="reference" reads the index arrays; the oracle does not."""
    if machine.HAS_GPU:
        pytest.skip("the reference runs on NumPy arrays, which test_agreement does not use on a GPU")
    problem = build(case)
    out, lse = machine.Call("numba_verify", "reference", problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} reference")
