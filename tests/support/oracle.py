"""What a problem's answer is: dense masked softmax over the rows as they were drawn, in float64 and in the input's precision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numba_verify.reference import attention

from .compare import assert_lse_close, assert_rows_close, require_signal, score_scale
from .problems import DTYPES, Problem


class Answer(NamedTuple):
    """out [total_q, H, V] and lse [total_q, H] in float64; dense: out of the same computation in float32, rounded to the input's dtype, once
    for each of several orders of summation over the dims.

    The order is nobody's to prescribe, and with scores near 1e5 one order may be lucky where another is not, so a row's error of "the dense
    computation" is the largest over a few.
    """

    out: np.ndarray
    lse: np.ndarray
    dense: list[np.ndarray]
    score_scale: np.ndarray


ORDERS = 4


def dense_in_order(q: np.ndarray, keys: np.ndarray, order: int, visible: np.ndarray, latent_dim: int, *scalars: float) -> np.ndarray:
    """out [n, H, V] in float32 with the dims of the dot product in the order of draw number `order` (0: as they stand).

    The values that are summed up are the latent dims as they stand: they are appended, and the query is zero there.
    """
    dims = q.shape[-1]
    shuffled = np.arange(dims) if order == 0 else np.random.default_rng(order).permutation(dims)
    values = keys[:, :latent_dim].astype(np.float32)
    wide_keys = np.concatenate([values, keys[:, shuffled].astype(np.float32)], axis=1)
    wide_q = np.concatenate([np.zeros((*q.shape[:2], latent_dim), np.float32), q[..., shuffled].astype(np.float32)], axis=-1)
    return attention(wide_q, wide_keys, visible, latent_dim, *scalars)[0]


def solve(problem: Problem) -> Answer:
    """Compute the answer request by request."""
    case, qo = problem.case, problem.qo_indptr
    out = np.zeros((problem.total_q, case.heads, case.latent_dim))
    lse, dense = np.zeros(out.shape[:2]), [np.zeros(out.shape) for _ in range(ORDERS)]
    with np.errstate(invalid="ignore", over="ignore"):
        for r, (keys, visible) in enumerate(zip(problem.keys, problem.visible, strict=True)):
            q = problem.q[qo[r]:qo[r + 1]]
            arguments = (visible, case.latent_dim, problem.sm_scale, case.logit_cap)
            out[qo[r]:qo[r + 1]], lse[qo[r]:qo[r + 1]] = attention(q.astype(np.float64), keys.astype(np.float64), *arguments)
            for i, filled in enumerate(dense):
                low = dense_in_order(q, keys, i, *arguments)
                filled[qo[r]:qo[r + 1]] = low.astype(DTYPES[case.dtype]).astype(np.float64)
    scale = score_scale(problem.q[:problem.total_q], problem.keys, problem.sm_scale, qo)
    return Answer(out, lse, dense, scale)


def check(problem: Problem, answer: Answer, out: np.ndarray, lse: np.ndarray | None, name: str) -> None:
    """Contract promise 7 for the rows of the draft tokens."""
    total, qo = problem.total_q, [int(x) for x in problem.qo_indptr]
    if total:
        require_signal(q=problem.q)
    finite = np.isfinite(answer.out).all(axis=-1, keepdims=True)
    dense = [np.where(finite, each, 0.0) for each in answer.dense]
    assert_rows_close(out[:total], answer.out, dense, problem.case.dtype, f"{name} out", qo_indptr=qo)
    if lse is not None:
        assert_lse_close(lse[:total], answer.lse, answer.score_scale, name=f"{name} lse")
