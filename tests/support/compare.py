"""The comparator of the test suite: what "equal enough" means, and a refusal to compare when the comparison could not fail.

Three rules stand behind every function here.

* A bound is tested as ``not (error <= bound)``: a NaN then fails. Where NaN or Inf is expected, it must stand in exactly those places.
* Attention output shrinks like 1 / sqrt(keys), so a fixed tolerance soon exceeds the signal. A tolerance of 5 % of the expected RMS or
  more, an input of zeros, or an input of one repeated value raises VacuousTestError: such a test proves nothing.
* Errors of an output are measured over a whole (row, head) vector, as the contract states them, and not entry by entry.
"""

import numpy as np

# Largest tolerance, as a part of the RMS of what is expected, at which a wrong result is still sure to be seen.
VACUOUS = 0.05

# Floor of the error of a row, as a part of its norm. bf16 and fp16: the RMS of rounding the exact result, unit roundoff / sqrt(3)
# (2^-8 and 2^-11), rounded up. fp32: eight unit roundoffs (2^-24), since summation, not the final rounding, decides there.
ROW_FLOOR = {"bfloat16": 2.3e-3, "float16": 2.9e-4, "float32": 5e-7}

# The kernel may err twice as much as the plain dense computation in the same precision: it sums in another order.
ROW_FACTOR = 2.0

# Rows (token, head) of a request that one block of a tensor-core kernel handles: a defect of one tile shows as one full bar.
TILE_ROWS = 64


class VacuousTestError(AssertionError):
    """The comparison was refused: with this tolerance or these inputs it could not have failed."""


def require_signal(**inputs):
    """Refuses inputs that hide errors: an empty array, all zeros, or one value repeated (softmax weights then do not matter)."""
    for name, values in inputs.items():
        values = np.asarray(values).astype(np.float64)
        finite = values[np.isfinite(values)]
        if finite.size == 0 or np.linalg.norm(finite) == 0:
            raise VacuousTestError(f"{name}: expected an input with a norm above 0, got {finite.size} finite values, all zero")
        if finite.size > 1 and finite.min() == finite.max():
            raise VacuousTestError(f"{name}: expected varied values, got {finite.size} times {finite[0]:g}")


def assert_close(actual, expected, tolerance, *, name, dtype=None, scale=None):
    """Every entry of ``actual`` within ``tolerance`` (absolute; a number or an array that broadcasts) of ``expected``.

    ``dtype`` is what ``actual`` must have when ``expected`` is kept in higher precision; else both have the same. ``scale`` replaces the
    RMS of ``expected`` in the test for vacuous tolerances.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    _match_kind(actual, expected, dtype or expected.dtype.name, name)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = _match_special(actual, expected, name)
    bound = np.broadcast_to(np.asarray(tolerance, np.float64), expected.shape)
    _refuse_vacuous(bound[finite], expected[finite], scale, name)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(actual - expected), 0.0)
    failed = ~(error <= bound) & finite
    if failed.any():
        worst = np.unravel_index(int(np.argmax(np.where(failed, error / np.maximum(bound, 1e-300), -1.0))), error.shape)
        place = tuple(int(index) for index in worst)
        raise AssertionError(
            f"{name}: {failed.sum()} of {failed.size} entries are off. Worst at {place}: expected {expected[worst]:.9g}, "
            f"got {actual[worst]:.9g}, error {error[worst]:.3g}, allowed {bound[worst]:.3g}"
        )


def assert_rows_close(out, reference64, dense_low_precision, dtype, name, *, qo_indptr=None):
    """Contract section 3 item 7 for ``out`` ``[rows, H, V]``: the error norm of each (row, head) vector is at most 2 x
    max(error norm of the dense computation in the input's precision, floor of the precision x norm of the reference vector).

    Args:
        reference64: float64, same shape.
        dense_low_precision: list of arrays of the same shape, the plain masked softmax computed in ``dtype``, in one or more orders of
            summation; the largest error counts. None leaves the floor alone.
        dtype: "bfloat16", "float16" or "float32", which ``out`` must have.
        qo_indptr: request borders, for the histogram of a failure.
    """
    out, reference = np.asarray(out), np.asarray(reference64)
    if reference.dtype != np.float64:
        raise VacuousTestError(f"{name}: expected a float64 reference, got {reference.dtype.name}")
    _match_kind(out, reference, dtype, name)
    actual = out.astype(np.float64)
    rows = _match_special(actual, reference, name).all(axis=-1)
    norm = _norms(reference, rows)
    floor = ROW_FLOOR[dtype] * norm
    dense_error = np.max([_dense_error(dense, reference, rows, name) for dense in dense_low_precision or [reference]], axis=0)
    bound = ROW_FACTOR * np.maximum(dense_error, floor)
    _refuse_vacuous(bound[rows], norm[rows], None, name)
    error = _norms(actual - np.where(rows[..., None], reference, 0.0), rows)
    failed = ~(error <= bound) & rows
    if failed.any():
        raise AssertionError(_row_report(actual, reference, error, bound, failed, name, qo_indptr))


def assert_lse_close(lse, reference64, score_scale, *, name):
    """Contract section 3 item 7 for ``lse`` (float32 ``[rows, H]``): within 1e-5 + 1e-5 |lse| + 1.5e-7 sm_scale |q| |k|max.

    ``score_scale`` is ``sm_scale * |q| * |k|max`` per (row, head), see ``score_scale()``: one float32 rounding of the largest product
    that a score may be made of.
    """
    reference = np.asarray(reference64)
    if reference.dtype != np.float64:
        raise VacuousTestError(f"{name}: expected a float64 reference, got {reference.dtype.name}")
    magnitude = np.where(np.isfinite(reference), np.abs(reference), 0.0)
    with np.errstate(invalid="ignore"):
        scores = np.nan_to_num(np.broadcast_to(np.asarray(score_scale, np.float64), reference.shape), nan=0.0, posinf=0.0)
    # An absolute error of a logarithm is a relative error of the sum below it, so 1 is its natural scale when lse is near 0.
    scale = max(1.0, _rms(reference[np.isfinite(reference)]))
    assert_close(lse, reference, 1e-5 + 1e-5 * magnitude + 1.5e-7 * scores, name=name, dtype="float32", scale=scale)


def score_scale(q, keys, sm_scale, qo_indptr):
    """``sm_scale * |q| * |k|max`` as ``[rows, H]``; ``keys[r]`` are all keys of request r, ``[KV_LEN, D]``, prefix and draft."""
    norms = np.linalg.norm(np.asarray(q).astype(np.float64), axis=-1)
    largest = [np.linalg.norm(np.asarray(k).astype(np.float64), axis=-1).max(initial=0.0) for k in keys]
    return abs(sm_scale) * norms * np.repeat(largest, np.diff(qo_indptr))[:, None]


def _match_kind(actual, expected, dtype, name):
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {expected.shape}, got {actual.shape}")
    if actual.dtype.name != dtype:
        raise AssertionError(f"{name}: expected dtype {dtype}, got {actual.dtype.name}")


def _match_special(actual, expected, name):
    """The places where both are finite; NaN, Inf and -Inf must stand in the same places."""
    for what, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        differs = test(actual) != test(expected)
        if differs.any():
            worst = np.unravel_index(int(np.argmax(differs)), differs.shape)
            place = tuple(int(index) for index in worst)
            raise AssertionError(
                f"{name}: {what} stands in {test(actual).sum()} places, expected in {test(expected).sum()}; "
                f"{differs.sum()} differ, first at {place}: expected {expected[worst]:.9g}, got {actual[worst]:.9g}"
            )
    return np.isfinite(expected)


def _refuse_vacuous(bound, expected, scale, name):
    if not (np.isfinite(bound).all() and (bound >= 0).all()):
        raise VacuousTestError(f"{name}: expected a finite tolerance of 0 or more")
    signal = _rms(expected) if scale is None else scale
    if expected.any() and not _rms(bound) < VACUOUS * signal:
        raise VacuousTestError(
            f"{name}: the tolerance, {_rms(bound):.3g}, is {_rms(bound) / signal:.1%} of what is expected, {signal:.3g} RMS; "
            f"a wrong result could pass (limit {VACUOUS:.0%})"
        )


def _rms(values):
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _norms(vectors, rows):
    """Norm of each vector along the last axis, 0 where ``rows`` says that the vector is not compared."""
    return np.linalg.norm(np.where(rows[..., None], vectors, 0.0), axis=-1)


def _dense_error(dense, reference, rows, name):
    dense = np.asarray(dense).astype(np.float64)
    if dense.shape != reference.shape:
        raise VacuousTestError(f"{name}: expected the dense computation in shape {reference.shape}, got {dense.shape}")
    error = _norms(dense - np.where(rows[..., None], reference, 0.0), rows)
    if not np.isfinite(error).all():
        raise VacuousTestError(f"{name}: the dense computation gives NaN or Inf where the reference is finite")
    return error


def _row_report(actual, reference, error, bound, failed, name, qo_indptr):
    excess = np.where(failed, error / np.maximum(bound, 1e-300), -1.0)
    row, head = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    column = int(np.argmax(np.abs(actual[row, head] - reference[row, head])))
    norm = np.linalg.norm(reference[row, head])
    return "\n".join(
        [
            f"{name}: {failed.sum()} of {failed.size} (row, head) vectors are off.",
            f"Worst: row {row}, head {head}: error {error[row, head]:.3g} of norm {norm:.3g}, allowed {bound[row, head]:.3g}; "
            f"column {column}: expected {reference[row, head, column]:.9g}, got {actual[row, head, column]:.9g}",
            *_histogram(failed, qo_indptr),
        ]
    )


def _histogram(failed, qo_indptr, limit=20):
    """Failing vectors by request and by tile of TILE_ROWS of its (token, head) rows, the fullest ``limit`` bars in their order."""
    borders = [0, len(failed)] if qo_indptr is None else [int(border) for border in qo_indptr]
    bars = []
    for request, (first, last) in enumerate(zip(borders, borders[1:], strict=False)):
        flags = failed[first:last].reshape(-1)
        for start in range(0, len(flags), TILE_ROWS):
            tile = flags[start : start + TILE_ROWS]
            if tile.any():
                bars.append((request, start // TILE_ROWS, int(tile.sum()), len(tile)))
    shown = sorted(sorted(bars, key=lambda bar: -bar[2])[:limit])
    lines = [f"Failing vectors by request and tile of {TILE_ROWS} (token, head) rows:"]
    for request, tile, count, size in shown:
        lines.append(f"  request {request:4d}  tile {tile:4d}  {'#' * max(1, round(20 * count / size)):20s} {count} of {size}")
    if len(bars) > limit:
        lines.append(f"  and {len(bars) - limit} more tiles")
    return lines
