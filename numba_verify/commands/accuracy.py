"""The contract's accuracy, as the commands test it: every row against float64, computed from the numbers and not through the index arrays.

    |out - exact| <= 2 max(|dense - exact|, FLOOR |exact|)      per (draft token, head); dense: the same in float32, rounded to the dtype
    |lse - exact| <= 1e-5 + 1e-5 |exact| + 1.5e-7 sm_scale |q| |k|max

A bound is tested as "not (error <= bound)", so a NaN fails; where NaN or -inf is due it must stand in exactly those rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..reference import attention
from .batches import Values

#: Least error that is allowed, as a part of the row's norm: about the rounding of the result to its dtype.
FLOOR = {"bfloat16": 2.3e-3, "float16": 2.9e-4, "float32": 5e-7}
#: A kernel sums in an order of its own: it may err this much more than the plain computation.
FACTOR = 2.0


class Answer(NamedTuple):
    """float64 out [rows, H, V] and lse [rows, H]; bounds of their errors [rows, H]."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray


class Verdict(NamedTuple):
    """Largest error of a row as a part of its norm, largest error of lse, and what is wrong (empty when within the bounds)."""

    relative: float
    lse_error: float
    fault: str


def solve(values: Values) -> Answer:
    """The exact answer of a batch, request by request."""
    exact, dense, scale = [], [], []
    with np.errstate(invalid="ignore", over="ignore"):
        for q, keys, visible in zip(values.q, values.keys, values.visible, strict=True):
            arguments = (visible, values.latent_dim, values.sm_scale, values.logit_cap)
            exact.append(attention(q.astype(np.float64), keys.astype(np.float64), *arguments))
            low = attention(q.astype(np.float32), keys.astype(np.float32), *arguments)[0]
            dense.append(low.astype(q.dtype).astype(np.float64))
            longest = np.nanmax(np.linalg.norm(keys.astype(np.float64), axis=-1), initial=0.0)
            scale.append(values.sm_scale * longest * np.linalg.norm(q.astype(np.float64), axis=-1))
        out, lse = (np.concatenate([pair[i] for pair in exact]) for i in range(2))
        bound = FACTOR * np.maximum(row_norms(np.concatenate(dense) - out), FLOOR[values.q[0].dtype.name] * row_norms(out))
        return Answer(out, lse, bound, 1e-5 + 1e-5 * np.abs(lse) + 1.5e-7 * np.concatenate(scale))


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Norm of each (draft token, head) vector."""
    return np.linalg.norm(rows, axis=-1)


def judge(answer: Answer, out: np.ndarray, lse: np.ndarray, slack: float = 1.0) -> Verdict:
    """Compare the rows of the draft tokens. `slack` widens the bounds, for results that were rounded more than once."""
    out, lse = out[:len(answer.out)].astype(np.float64), lse[:len(answer.lse)].astype(np.float64)
    finite = np.isfinite(answer.out).all(axis=-1)
    with np.errstate(invalid="ignore"):
        error, norm = row_norms(out - answer.out), row_norms(answer.out)
        # A row that sees nothing is exactly 0: it has no relative error, and a bound of 0.
        relative = np.where(finite & (norm > 0), error / np.where(norm > 0, norm, 1.0), 0.0)
        lse_error = np.where(np.isfinite(answer.lse), np.abs(lse - answer.lse), 0.0)
        fault = (_first(finite & ~(error <= slack * answer.out_bound), "out", error, slack * answer.out_bound)
                 or _first(~finite & ~np.isnan(out).all(axis=-1), "out of a row that sees a NaN", out[..., 0], None)
                 or _first(np.isfinite(answer.lse) & ~(lse_error <= slack * answer.lse_bound), "lse", lse_error, slack * answer.lse_bound)
                 or _first(~np.isfinite(answer.lse) & ~_same(lse, answer.lse), "lse of a row that sees nothing or a NaN", lse, None))
    return Verdict(_worst(relative), _worst(lse_error), fault)


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference of two results' rows, as a part of the norm; infinite for a NaN."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    return _worst(row_norms(one - other) / np.maximum(row_norms(other), np.finfo(np.float64).tiny))


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one == other) | (np.isnan(one) & np.isnan(other))


def _worst(errors: np.ndarray) -> float:
    return float("inf") if np.isnan(errors).any() else float(errors.max(initial=0.0))


def _first(wrong: np.ndarray, what: str, got: np.ndarray, bound: np.ndarray | None) -> str:
    if not wrong.any():
        return ""
    row, head = (int(i) for i in np.argwhere(wrong)[0])
    allowed = "" if bound is None else f", allowed {bound[row, head]:.3g}"
    label = "error" if bound is not None else "got"
    return f"{what}: {wrong.sum()} of {wrong.size} vectors are wrong, first row {row}, head {head}: {label} {got[row, head]:.3g}{allowed}"
