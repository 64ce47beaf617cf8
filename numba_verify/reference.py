"""The reference: dense masked softmax in float64, straight from the definition. No tiles, no online softmax, no splits.

It is what `kernel="auto"` means for NumPy arrays and what every kernel is checked against; being the shortest text that is right is its
whole purpose, so it shares no code with the kernels and reads the index arrays in its own way.
"""

from __future__ import annotations

import numpy as np

from .problem import IndexArrays, PlanSpec, Tensors


def visible_drafts(indices: IndexArrays, request: int, begin: int, count: int, prefix: int, mask_begin: int) -> np.ndarray:
    """bool [count, count]: draft token i of `request` (row) sees draft token j (column)."""
    tree, array = indices.tree, None if indices.tree.array is None else indices.tree.array.owner
    if tree.kind == "causal":
        return np.tril(np.ones((count, count), bool))
    if tree.kind == "dense":
        return array[request, :count, :count] != 0
    if tree.kind == "full_mask":
        rows = array[mask_begin:mask_begin + count * (prefix + count)].reshape(count, prefix + count)
        return rows[:, prefix:] != 0
    if tree.kind == "bits":
        words = np.ascontiguousarray(array[begin:begin + count]).view(np.uint32)
        return (words[:, np.arange(count) // 32] >> (np.arange(count) % 32).astype(np.uint32) & 1).astype(bool)
    seen = np.eye(count, dtype=bool)
    for row, node in enumerate(array[begin:begin + count].tolist()):
        for _ in range(count):  # a cycle cannot hold us: validate=True is what reports it
            if not 0 <= node < count:
                break
            seen[row, node] = True
            node = array[begin + node]
    return seen


def attention(q: np.ndarray, kv: np.ndarray, visible: np.ndarray, latent_dim: int, sm_scale: float,
              logit_cap: float) -> tuple[np.ndarray, np.ndarray]:
    """One request. q [n, H, D], kv [keys, D], visible bool [n, keys] -> out [n, H, latent_dim], lse [n, H] (natural log), all in q's dtype."""
    out = np.zeros((*q.shape[:2], latent_dim), q.dtype)
    lse = np.full(q.shape[:2], -np.inf, q.dtype)
    for i in range(len(q)):
        keys = kv[visible[i]]
        if len(keys) == 0:
            continue
        score = q.dtype.type(sm_scale) * (q[i] @ keys.T)
        if logit_cap > 0:
            score = q.dtype.type(logit_cap) * np.tanh(score / q.dtype.type(logit_cap))
        peak = score.max(axis=1, keepdims=True)
        weight = np.exp(score - peak)
        total = weight.sum(axis=1, keepdims=True)
        out[i] = (weight / total) @ keys[:, :latent_dim]
        lse[i] = (peak + np.log(total))[:, 0]
    return out, lse


def run(spec: PlanSpec, indices: IndexArrays, tensors: Tensors) -> None:
    """Fill `out` and `lse` of NumPy `tensors` in float64, rounded once at the end."""
    qo, kv_indptr = indices.qo_indptr.owner, indices.kv_indptr.owner
    pages, lens = indices.kv_indices.owner, None if indices.kv_lens is None else indices.kv_lens.owner
    pool = tensors.kv_cache.owner.reshape(-1, spec.page_size, spec.row_dim)
    mask_begin = 0
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf in the inputs are the caller's to give
        for r in range(indices.batch):
            begin, count = int(qo[r]), int(qo[r + 1] - qo[r])
            listed = pages[kv_indptr[r]:kv_indptr[r + 1]]
            tokens = len(listed) * spec.page_size if lens is None else int(lens[r])
            token = np.arange(tokens)
            kv = pool[listed[token // spec.page_size], token % spec.page_size].astype(np.float64)
            prefix = tokens - count if spec.draft_in_cache else tokens
            if tensors.draft_kv is not None:
                kv = np.concatenate([kv, tensors.draft_kv.owner[begin:begin + count].astype(np.float64)])
            drafts = visible_drafts(indices, r, begin, count, prefix, mask_begin)
            mask_begin += count * (prefix + count)
            visible = np.concatenate([np.ones((count, prefix), bool), drafts], axis=1)
            out, lse = attention(tensors.q.owner[begin:begin + count].astype(np.float64), kv, visible, spec.latent_dim,
                                 tensors.sm_scale, tensors.logit_cap)
            tensors.out.owner[begin:begin + count] = out.astype(tensors.out.owner.dtype)
            if tensors.lse is not None:
                tensors.lse.owner[begin:begin + count] = lse
