"""Every kernel of both implementations against the float64 oracle, and against each other, on the grid of cases."""

import numpy as np
import pytest
from support import cases, machine, oracle
from support.compare import assert_rows_close
from support.problems import build

pytestmark = pytest.mark.kernel


def runs_here(implementation, case):
    return not (case.slow_in_simulator and implementation == "numba_verify" and not machine.HAS_GPU)


@pytest.mark.parametrize("kernel", machine.KERNELS)
@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_agreement(case, kernel):
    if case.deterministic and kernel != "paged":
        pytest.skip("naive and flash cut nothing: deterministic or not is one code path")
    problem = build(case)
    results = {name: machine.Call(name, kernel, problem)() for name in machine.IMPLEMENTATIONS if runs_here(name, case)}
    answer = oracle.solve(problem)
    for name, (out, lse) in results.items():
        oracle.check(problem, answer, out, lse, f"{case} {kernel} {name}")
    if len(results) == 2:
        (ours, _), (twin, _) = results.values()
        total = problem.total_q
        # Both are within the bound of the oracle; against each other they differ by float32 summation order alone, and by the rounding.
        assert_rows_close(ours[:total], twin[:total].astype(np.float64), None, case.dtype, f"{case} {kernel} numba_verify against cuda_ref")


@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS if not c.slow_in_simulator], ids=str)
def test_reference(case):
    """kernel="reference" reads the index arrays; the oracle does not."""
    if machine.HAS_GPU:
        pytest.skip("the reference runs on NumPy arrays, which test_agreement does not use on a GPU")
    problem = build(case)
    out, lse = machine.Call("numba_verify", "reference", problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} reference")
