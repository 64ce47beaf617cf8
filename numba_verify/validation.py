"""validate=True: the contents of device arrays, read back and checked before any use. It synchronises, so it is off by default.

Every error names the request, the position and the value. Without it wrong contents give wrong results, but the kernels clamp what they
write to the workspace and never hang.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import NUMPY_DTYPE, ArrayView
from .gpu import driver
from .problem import MAX_DRAFT_TOKENS, IndexArrays, PlanSpec, Tensors
from .tree import DraftTree


class Checked(NamedTuple):
    """What `run` still has to compare: query rows of the step, and the largest page number with where it stands."""

    total_q: int
    max_page: int
    max_page_request: int
    max_page_position: int
    page_size: int


def to_host(array: ArrayView, stream: int) -> np.ndarray:
    """The contents of a contiguous array; waits for `stream`."""
    if array.device is None:
        return array.owner
    host = np.empty(array.shape, NUMPY_DTYPE[array.dtype])
    with driver.context(array.device):
        driver.copy_to_host(host, array.address, stream)
    return host


def check_indices(spec: PlanSpec, indices: IndexArrays, host_tree: DraftTree | None, stream: int) -> Checked:
    """Check one step's index arrays and tree. ValueError, or IndexError for an entry that points outside."""
    qo, kv = to_host(indices.qo_indptr, stream).astype(np.int64), to_host(indices.kv_indptr, stream).astype(np.int64)
    pages = to_host(indices.kv_indices, stream)
    _check_indptr(qo, "qo_indptr", spec.max_total_q, "rows (max_total_q)")
    _check_indptr(kv, "kv_indptr", pages.shape[0], "entries of kv_indices")
    counts, tokens = np.diff(qo), np.diff(kv) * spec.page_size
    for r in np.flatnonzero(counts > MAX_DRAFT_TOKENS)[:1]:
        raise ValueError(f"qo_indptr: request {r} has {counts[r]} draft tokens, at most {MAX_DRAFT_TOKENS} are supported")
    if indices.kv_lens is not None:
        lens = to_host(indices.kv_lens, stream).astype(np.int64)
        for r in np.flatnonzero((lens < 0) | (lens > tokens))[:1]:
            raise ValueError(f"kv_lens: request {r} has {lens[r]} tokens, its pages hold {tokens[r]}")
        tokens = lens
    if spec.draft_in_cache:
        for r in np.flatnonzero(tokens < counts)[:1]:
            raise ValueError(f"kv_indptr: request {r} lists {tokens[r]} tokens, fewer than its {counts[r]} draft tokens, which end the list")
    _check_tree(spec, indices, host_tree, qo, counts, tokens, stream)
    return _check_pages(spec, pages, kv, tokens, int(qo[-1]))


def _check_indptr(indptr: np.ndarray, name: str, limit: int, what: str) -> None:
    if indptr[0] != 0:
        raise ValueError(f"{name}: expected 0 at position 0, got {indptr[0]}")
    for r in np.flatnonzero(np.diff(indptr) < 0)[:1]:
        raise ValueError(f"{name}: request {r} ends at {indptr[r + 1]} (position {r + 1}), before it begins at {indptr[r]}")
    if indptr[-1] > limit:
        raise IndexError(f"{name}: request {len(indptr) - 2} ends at {indptr[-1]} (position {len(indptr) - 1}), but there are {limit} {what}")


def _check_pages(spec: PlanSpec, pages: np.ndarray, kv: np.ndarray, tokens: np.ndarray, total_q: int) -> Checked:
    """Entries that are read must not be negative; the largest is kept for `run`, which knows the pool."""
    used = np.minimum(kv[:-1] + -(-tokens // spec.page_size), kv[1:])
    best = Checked(total_q, -1, 0, 0, spec.page_size)
    for r, (begin, end) in enumerate(zip(kv[:-1], used, strict=True)):
        if begin == end:
            continue
        listed = pages[begin:end]
        low = int(listed.argmin())
        if listed[low] < 0:
            raise IndexError(f"kv_indices: request {r} has {listed[low]} at position {begin + low}; page numbers are not negative")
        high = int(listed.argmax())
        if listed[high] > best.max_page:
            best = Checked(total_q, int(listed[high]), r, int(begin + high), spec.page_size)
    return best


def _check_tree(spec: PlanSpec, indices: IndexArrays, host_tree: DraftTree | None, qo: np.ndarray, counts: np.ndarray, tokens: np.ndarray,
                stream: int) -> None:
    tree, most = indices.tree, int(counts.max(initial=0))
    if host_tree is not None:
        for r in np.flatnonzero(np.asarray(host_tree.qo_indptr) != qo)[:1]:
            raise ValueError(f"tree: its qo_indptr has {host_tree.qo_indptr[r]} at position {r}, the argument qo_indptr has {qo[r]}")
        return
    if tree.kind == "full_mask":
        prefix = tokens - counts if spec.draft_in_cache else tokens
        need = int((counts * (prefix + counts)).sum())
        if tree.length < need:
            raise ValueError(f"tree: a full mask of these lengths has {need} entries, got {tree.length}")
    elif tree.kind == "dense" and tree.stride < most:
        raise ValueError(f"tree: expected a mask [bs, N, N] with N >= {most}, the most draft tokens of a request, got N = {tree.stride}")
    elif tree.kind in ("parents", "bits"):
        if tree.array.shape[0] < qo[-1]:
            raise ValueError(f"tree: expected at least {qo[-1]} rows (qo_indptr[-1]), got {tree.array.shape[0]}")
        if tree.kind == "bits" and tree.stride * 32 < most:
            raise ValueError(f"tree: expected at least {-(-most // 32)} words a row for {most} draft tokens, got {tree.stride}")
        if tree.kind == "parents":
            # DraftTree refuses what is out of range or cyclic, naming request, node and value.
            DraftTree.from_parents(to_host(tree.array, stream)[:qo[-1]], qo.astype(np.int32))


def check_run(checked: Checked, tensors: Tensors) -> None:
    """Check one run against the step: rows for every draft token, pages inside the pool."""
    for array, name in ((tensors.q, "q"), (tensors.out, "out"), (tensors.lse, "lse"), (tensors.draft_kv, "draft_kv")):
        if array is not None and array.shape[0] < checked.total_q:
            raise ValueError(f"{name}: expected at least {checked.total_q} rows (qo_indptr[-1]), got {array.shape[0]}")
    pages = tensors.pool_rows // checked.page_size
    if checked.max_page >= pages:
        raise IndexError(f"kv_indices: request {checked.max_page_request} has {checked.max_page} at position {checked.max_page_position}, "
                         f"but kv_cache has {pages} pages")
