"""Requests as values, laid out in any order and any form: for tests that say "the same request, called differently, gives the same bits"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_verify import DraftTree

from . import machine
from .problems import DTYPES, bits_of


@dataclass(frozen=True)
class Request:
    """One request: parents of its n draft tokens, their queries [n, H, D], and its KV rows [L + n, D]."""

    parents: tuple[int, ...]
    q: np.ndarray
    keys: np.ndarray

    @property
    def prefix(self) -> int:
        return len(self.keys) - len(self.parents)


def draw(parents: tuple[int, ...], prefix: int, heads: int, dims: int, dtype: str, seed: int) -> Request:
    """A request with normal random numbers."""
    rng, n = np.random.default_rng(seed), len(parents)
    return Request(tuple(parents), rng.standard_normal((n, heads, dims)).astype(DTYPES[dtype]),
                   rng.standard_normal((prefix + n, dims)).astype(DTYPES[dtype]))


@dataclass(frozen=True)
class Layout:
    """How a batch is handed over; none of it may change a deterministic result."""

    page_size: int = 1
    aside: bool = False
    wide: bool = False
    form: str = "tree"  # tree, parents, bits, dense
    scatter: int = 0
    padding: int = 0


def arguments(requests: list[Request], layout: Layout) -> dict[str, Any]:
    """Keyword arguments of verify_mla (but sm_scale and kernel) for the requests in this order."""
    rng = np.random.default_rng(layout.scatter)
    counts = np.array([len(r.parents) for r in requests], np.int64)
    qo = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    heads, dims, dtype = requests[0].q.shape[1], requests[0].q.shape[2], requests[0].q.dtype
    listed = [r.keys[:r.prefix] if layout.aside else r.keys for r in requests]
    tokens = np.array([len(k) for k in listed], np.int64)
    entries = -(-tokens // layout.page_size)
    kv_indptr = np.concatenate([[0], np.cumsum(entries)]).astype(np.int64)
    pages = int(kv_indptr[-1]) + 3
    order = rng.permutation(pages)[:int(kv_indptr[-1])]
    pool = np.full((pages, layout.page_size, dims), np.nan, dtype)
    for r, keys in enumerate(listed):
        place = np.arange(len(keys))
        pool[order[kv_indptr[r]:kv_indptr[r + 1]][place // layout.page_size], place % layout.page_size] = keys
    rows = int(qo[-1]) + layout.padding
    q = np.full((rows, heads, dims), np.nan, dtype)
    q[:int(qo[-1])] = np.concatenate([r.q for r in requests])
    draft = None
    if layout.aside:
        draft = np.full((rows, dims), np.nan, dtype)
        draft[:int(qo[-1])] = np.concatenate([r.keys[r.prefix:] for r in requests])
    index = np.int64 if layout.wide else np.int32
    placed = {"q": q, "kv_cache": pool, "qo_indptr": qo.astype(index), "kv_indptr": kv_indptr.astype(index),
              "kv_indices": order.astype(index), "kv_lens": tokens.astype(index), "draft_kv": draft, "tree": tree_form(requests, layout)}
    return {name: machine.put(value) for name, value in placed.items()} | {"page_size": layout.page_size}


def tree_form(requests: list[Request], layout: Layout) -> Any:
    tree = DraftTree.from_lists([list(r.parents) for r in requests])
    if layout.form == "tree":
        return tree
    if layout.form == "parents":
        return np.asarray(tree.parents)
    masks = [tree.mask(r) for r in range(len(requests))]
    most = max((len(m) for m in masks), default=0)
    if layout.form == "bits":
        return np.concatenate([bits_of(m, max(1, -(-most // 32))) for m in masks])
    dense = np.zeros((len(masks), most, most), bool)
    for r, mask in enumerate(masks):
        dense[r, :len(mask), :len(mask)] = mask
    return dense


def call(implementation: str, kernel: str, requests: list[Request], layout: Layout = Layout(), **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(out, lse) of each request."""
    options = {"sm_scale": requests[0].q.shape[2] ** -0.5, **options}
    given = arguments(requests, layout)
    given.update(options)
    positional = [given.pop(name) for name in ("q", "kv_cache", "qo_indptr", "kv_indptr", "kv_indices")]
    out, lse = machine.IMPLEMENTATIONS[implementation].verify_mla(*positional, kernel=kernel, return_lse=True, **given)
    out, lse = machine.fetch(out), machine.fetch(lse)
    ends = np.cumsum([len(r.parents) for r in requests])
    return [(out[e - len(r.parents):e], lse[e - len(r.parents):e]) for r, e in zip(requests, ends, strict=True)]
