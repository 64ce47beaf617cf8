"""The comparator must fail: every way in which a wrong result could look right is given to it here."""

import ml_dtypes
import numpy as np
import pytest
from support.compare import (
    ROW_FLOOR,
    VacuousTestError,
    assert_close,
    assert_lse_close,
    assert_rows_close,
    require_signal,
    score_scale,
)

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@pytest.fixture
def reference():
    """float64 [rows 6, H 3, V 32], with outputs as small as attention over many keys gives them."""
    return np.random.default_rng(0).standard_normal((6, 3, 32)) * 1e-3


def test_close_values_pass():
    assert_close(np.float32([1, 2, 3]), np.float32([1, 2.001, 3]), 0.01, name="x")
    assert_close(np.zeros(3), np.zeros(3), 1.0, name="zeros")
    assert_close(np.float32([np.nan, np.inf, -np.inf, 1]), np.float32([np.nan, np.inf, -np.inf, 1]), 0, name="x")
    assert_close(np.empty((0, 3)), np.empty((0, 3)), 0, name="empty")
    assert_close(np.float32([1, 2]), np.array([1.0, 2.0]), 0.01, name="x", dtype="float32")


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (np.float32([1, 2, 3.2]), r"x: 1 of 3 entries are off. Worst at \(2,\): expected 3, got 3.2.*, error 0.2, allowed 0.01"),
        (np.float32([1, 2, np.nan]), r"NaN stands in 1 places, expected in 0; 1 differ, first at \(2,\): expected 3, got nan"),
        (np.float32([1, 2, np.inf]), r"\+Inf stands in 1 places"),
        (np.float32([1, 2]), r"expected shape \(3,\), got \(2,\)"),
        (np.float64([1, 2, 3]), "expected dtype float32, got float64"),
    ],
)
def test_wrong_values_fail(actual, text):
    with pytest.raises(AssertionError, match=text):
        assert_close(actual, np.float32([1, 2, 3]), 0.01, name="x")


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_must_stand_where_they_are_expected(special):
    expected = np.float32([special, 1, 2])
    for actual in (np.float32([0, 1, 2]), np.float32([1, special, 2]), np.float32([-special if special == special else 0, 1, 2])):
        with pytest.raises(AssertionError, match="stands in"):
            assert_close(actual, expected, 0.01, name="x")


@pytest.mark.parametrize("tolerance", [0.06, np.inf, np.nan, -1.0])
def test_vacuous_tolerance_is_refused_even_when_the_values_agree(tolerance):
    with pytest.raises(VacuousTestError):
        assert_close(np.ones(4), np.ones(4), tolerance, name="x")


def test_vacuous_tolerance_of_a_small_output_is_refused():
    # The classic: a usual tolerance against attention over 100,000 keys.
    small = np.random.default_rng(1).standard_normal(1000) / np.sqrt(1e5)
    with pytest.raises(VacuousTestError, match="is 32.0% of what is expected"):
        assert_close(small, small, 1e-3, name="out")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_rows_pass(reference, dtype):
    assert_rows_close(reference.astype(DTYPES[dtype]), reference, None, dtype, "out")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_just_outside_its_floor_fails(reference, dtype):
    out = reference.astype(DTYPES["float32"])
    rows = out if dtype == "float32" else reference.astype(DTYPES[dtype])
    error = 3 * ROW_FLOOR[dtype]
    rows[4, 1] = (reference[4, 1] * (1 + error)).astype(DTYPES[dtype])
    with pytest.raises(AssertionError, match=r"1 of 18 \(row, head\) vectors are off.\nWorst: row 4, head 1: error"):
        assert_rows_close(rows, reference, None, dtype, "out")


def test_a_worse_dense_computation_widens_the_bound_of_its_row_alone(reference):
    dense = reference.copy()
    dense[2, 0] *= 1.004
    for row, allowed in ((2, True), (3, False)):
        out = reference.astype(np.float16)
        out[row, 0] = (reference[row, 0] * 1.006).astype(np.float16)
        if allowed:
            assert_rows_close(out, reference, [dense], "float16", "out")
        else:
            with pytest.raises(AssertionError, match="Worst: row 3, head 0"):
                assert_rows_close(out, reference, [dense], "float16", "out")


def test_a_useless_dense_computation_is_refused(reference):
    with pytest.raises(VacuousTestError, match="could pass"):
        assert_rows_close(reference.astype(np.float16), reference, [np.zeros_like(reference)], "float16", "out")
    with pytest.raises(VacuousTestError, match="NaN or Inf where the reference is finite"):
        assert_rows_close(reference.astype(np.float16), reference, [np.full_like(reference, np.nan)], "float16", "out")
    with pytest.raises(VacuousTestError, match="expected the dense computation in shape"):
        assert_rows_close(reference.astype(np.float16), reference, [reference[:1]], "float16", "out")


def test_a_reference_in_low_precision_is_refused(reference):
    with pytest.raises(VacuousTestError, match="expected a float64 reference, got float32"):
        assert_rows_close(reference.astype(np.float16), reference.astype(np.float32), None, "float16", "out")
    with pytest.raises(VacuousTestError, match="expected a float64 reference, got float32"):
        assert_lse_close(np.float32([[1]]), np.float32([[1]]), 0.0, name="lse")


def test_rows_of_nan_must_match(reference):
    reference[1] = np.nan
    out = reference.astype(np.float16)
    assert_rows_close(out, reference, None, "float16", "out")
    assert_rows_close(out, reference, [reference], "float16", "out")
    for row in (0, 1):
        wrong = out.copy()
        wrong[row, 2, 5] = np.nan if row == 0 else 0.0
        with pytest.raises(AssertionError, match=rf"NaN stands in .* first at \({row}, 2, 5\)"):
            assert_rows_close(wrong, reference, None, "float16", "out")


def test_rows_of_zero_are_exact(reference):
    reference[3] = 0
    out = reference.astype(np.float16)
    assert_rows_close(out, reference, None, "float16", "out")
    out[3, 0, 0] = 1e-7
    with pytest.raises(AssertionError, match="Worst: row 3, head 0: error .* of norm 0, allowed 0; column 0: expected 0, got"):
        assert_rows_close(out, reference, None, "float16", "out")


def test_wrong_dtype_and_shape_of_rows_fail(reference):
    with pytest.raises(AssertionError, match="expected dtype bfloat16, got float16"):
        assert_rows_close(reference.astype(np.float16), reference, None, "bfloat16", "out")
    with pytest.raises(AssertionError, match="expected shape"):
        assert_rows_close(reference[:2].astype(np.float16), reference, None, "float16", "out")


def test_failures_are_counted_by_request_and_tile():
    reference = np.random.default_rng(2).standard_normal((100, 2, 8))
    out = reference.astype(np.float32)
    out[40:72] += 1  # request 1 begins at row 40: its first 64 (token, head) rows are one whole tile
    out[5, 1] += 1
    with pytest.raises(AssertionError) as caught:
        assert_rows_close(out, reference, None, "float32", "out", qo_indptr=[0, 40, 100])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("out: 65 of 200")
    assert [line.split() for line in lines[3:]] == [
        ["request", "0", "tile", "0", "#", "1", "of", "64"],
        ["request", "1", "tile", "0", "#" * 20, "64", "of", "64"],
    ]


def test_the_histogram_is_capped():
    reference = np.random.default_rng(3).standard_normal((64 * 30, 1, 4))
    with pytest.raises(AssertionError, match="and 10 more tiles$"):
        assert_rows_close(np.float32(reference + 1), reference, None, "float32", "out")


def test_lse_rule():
    lse = np.array([[0.0, 10.0], [-np.inf, np.nan]])
    assert_lse_close(np.float32(lse), lse, 0.0, name="lse")
    assert_lse_close(np.float32(lse + 0.9e-5), lse, 0.0, name="lse")
    with pytest.raises(AssertionError, match=r"1 of 4 entries are off. Worst at \(0, 0\)"):
        assert_lse_close(np.float32(lse + 5e-5), lse, 0.0, name="lse")
    # A score scale of 1e3 allows 1.5e-4 more.
    assert_lse_close(np.float32(lse + 5e-5), lse, np.array([[1e3, 1e3], [0.0, np.nan]]), name="lse")
    with pytest.raises(AssertionError, match="-Inf stands in 0 places, expected in 1"):
        assert_lse_close(np.float32([[0, 10], [-1e30, np.nan]]), lse, 0.0, name="lse")
    with pytest.raises(AssertionError, match="expected dtype float32, got float64"):
        assert_lse_close(lse, lse, 0.0, name="lse")


def test_lse_in_base_two_fails():
    lse = np.random.default_rng(4).uniform(5, 12, (8, 4))
    with pytest.raises(AssertionError, match="32 of 32 entries are off"):
        assert_lse_close(np.float32(lse / np.log(2)), lse, 1.0, name="lse")


def test_a_score_scale_that_allows_everything_is_refused():
    with pytest.raises(VacuousTestError, match="could pass"):
        assert_lse_close(np.float32([[1.0, 2.0]]), np.array([[1.0, 2.0]]), 1e7, name="lse")


def test_score_scale_takes_the_longest_key_of_the_own_request():
    q = np.zeros((3, 1, 2))
    q[:, 0, 0] = [1, 2, 3]
    keys = [np.array([[3.0, 4.0], [0.0, 1.0]]), np.empty((0, 2)), np.array([[0.0, 2.0]])]
    assert score_scale(q, keys, -0.5, [0, 2, 2, 3]).tolist() == [[2.5], [5.0], [3.0]]


def test_inputs_without_signal_are_refused():
    require_signal(q=np.array([1.0, 2.0]), one=np.array([3.0]), poisoned=np.array([np.nan, 1.0, 2.0]))
    with pytest.raises(VacuousTestError, match="kv: expected an input with a norm above 0, got 4 finite values"):
        require_signal(q=np.array([1.0, 2.0]), kv=np.zeros(4))
    with pytest.raises(VacuousTestError, match="kv: expected varied values, got 4 times 1"):
        require_signal(kv=np.ones(4, ml_dtypes.bfloat16))
    with pytest.raises(VacuousTestError, match="got 0 finite values"):
        require_signal(kv=np.full(4, np.nan))
