"""Cases as data, and the arrays of a case.

A `Case` says what is special about a problem; `build` draws the numbers from its seed. The KV rows of each request are drawn first and
scattered into a pool afterwards, so the oracle reads them from where they were drawn and never through the index arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from numba_verify import DraftTree

from .poison import GuardedArrays

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Case:
    """One problem. The reason says which defect it is here for."""

    name: str
    reason: str
    trees: tuple[tuple[int, ...], ...]  # parents of each request's draft tokens; () = a request with none
    prefix: tuple[int, ...]  # cached tokens of each request
    heads: int = 8
    latent_dim: int = 128
    rope_dim: int = 64
    dtype: str = "bfloat16"
    page_size: int = 1
    draft_in_cache: bool = True
    tree_form: str = "draft_tree"  # draft_tree, none, parents, bits, bits_int32, dense, full_mask, full_mask_uint8
    wide: tuple[str, ...] = ()  # index arrays given as int64: any of qo_indptr, kv_indptr, kv_indices, kv_lens
    sm_scale: float | None = None  # None: 1 / sqrt(D)
    logit_cap: float = 0.0
    magnitude: float = 1.0  # standard deviation of q and kv
    shift: float = 0.0  # added to every score by construction, see build
    rises: tuple[tuple[int, float], ...] = ()  # (key, rise): scores of the keys from that one on are higher by so much, see build
    rise_rows: tuple[int, int] | None = None  # only of these query rows (draft token x head, over all requests), from .. to
    visibility: str = "tree"  # tree; blind: no draft token sees any; random: any mask at all, the diagonal included
    deterministic: bool = False
    padding_rows: int = 3  # rows of q, out, lse after the last draft token
    row_gap: int = 0  # spare bytes behind each row of q, kv, draft_kv and out
    nan_at: tuple[int, int] | None = None  # (request, key): that KV row is `bad`, and visible to some rows
    nan_dims: tuple[int, int] | None = None  # only these dims of it, from .. to
    nan_q: tuple[int, int] | None = None  # (query row, head): that query is NaN
    bad: float = float("nan")  # what stands at nan_at, in slots that no request owns, and in padding rows
    seed: int = 0
    size: str = "small"  # small; many_rows: minutes for flash and paged in the simulator; gpu: minutes in the host build as well

    def __str__(self) -> str:
        return self.name


@dataclass
class Problem:
    """The arrays of a case, host side, every one guarded."""

    case: Case
    guarded: GuardedArrays
    q: np.ndarray
    kv_cache: np.ndarray
    draft_kv: np.ndarray | None
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_lens: np.ndarray | None
    tree: object
    sm_scale: float
    keys: list[np.ndarray]  # [L + n, D] a request, as drawn
    visible: list[np.ndarray]  # bool [n, L + n] a request
    index_arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def total_q(self) -> int:
        return int(self.qo_indptr[-1])


def bits_of(mask: np.ndarray, words: int) -> np.ndarray:
    """bool [n, n] -> uint32 [n, words], bit j % 32 of word j // 32."""
    padded = np.zeros((len(mask), 32 * words), bool)
    padded[:, :mask.shape[1]] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def draft_masks(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    """bool [n, n] a request: row i sees column j."""
    masks = []
    for parents in case.trees:
        n = len(parents)
        mask = np.zeros((n, n), bool)
        if case.visibility == "random":
            mask = rng.random((n, n)) < 0.5
        elif case.visibility == "tree" and case.tree_form == "none":
            mask = np.tril(np.ones((n, n), bool))
        elif case.visibility == "tree":
            for i in range(n):
                node = i
                while node >= 0:
                    mask[i, node] = True
                    node = parents[node]
        masks.append(mask)
    return masks


def build(case: Case) -> Problem:
    """Draw the numbers of `case` and lay them out, unowned memory poisoned."""
    rng = np.random.default_rng(case.seed)
    dtype, dims = DTYPES[case.dtype], case.latent_dim + case.rope_dim
    counts = np.array([len(parents) for parents in case.trees], np.int64)
    prefix = np.array(case.prefix, np.int64)
    qo = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = int(qo[-1]) + case.padding_rows
    sm_scale = case.sm_scale if case.sm_scale is not None else dims ** -0.5

    def draw(*shape: int) -> np.ndarray:
        return (case.magnitude * rng.standard_normal(shape)).astype(dtype)

    q = draw(rows, case.heads, dims)
    keys = [draw(int(p + n), dims) for p, n in zip(prefix, counts, strict=True)]
    if case.shift:
        # one rope dimension carries a constant: every score gets the same summand `shift`, whatever the rest
        q[..., -1], step = dtype.type(1), dtype.type(case.shift / sm_scale)
        for k in keys:
            k[:, -1] = step
    if case.rises:
        # the same with another rope dimension, from a key on
        q[..., -2] = dtype.type(1)
        if case.rise_rows:
            flat = np.arange(q.shape[0] * q.shape[1]).reshape(q.shape[:2])
            q[..., -2] = (flat >= case.rise_rows[0]) & (flat < case.rise_rows[1])
        for k in keys:
            k[:, -2] = sum(rise * (np.arange(len(k)) >= first) for first, rise in case.rises) / sm_scale
    q[int(qo[-1]):] = case.bad
    if case.nan_at:
        keys[case.nan_at[0]][case.nan_at[1]][slice(*case.nan_dims) if case.nan_dims else slice(None)] = case.bad
    if case.nan_q:
        q[case.nan_q] = np.nan
    masks = draft_masks(case, rng)
    visible = [np.concatenate([np.ones((int(n), int(p)), bool), m], axis=1) for n, p, m in zip(counts, prefix, masks, strict=True)]

    guarded = GuardedArrays()
    listed = [k if case.draft_in_cache else k[:int(p)] for k, p in zip(keys, prefix, strict=True)]
    tokens = np.array([len(k) for k in listed], np.int64)
    pool, kv_indptr, kv_indices = _scatter(case, listed, tokens, guarded, rng)
    draft_kv = None
    if not case.draft_in_cache:
        draft = np.full((rows, dims), case.bad, dtype)
        for r, k in enumerate(keys):
            draft[qo[r]:qo[r + 1]] = k[int(prefix[r]):]
        draft_kv = guarded.input("draft_kv", draft, row_gap=case.row_gap)
    lens = tokens if case.page_size > 1 or case.seed % 2 else None  # optional at page size 1: both ways are tried

    def index(name: str, values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else guarded.input(name, values.astype(np.int64 if name in case.wide else np.int32))

    return Problem(case, guarded, guarded.input("q", q, row_gap=case.row_gap), pool, draft_kv, index("qo_indptr", qo),
                   index("kv_indptr", kv_indptr), index("kv_indices", kv_indices), index("kv_lens", lens),
                   _tree_argument(case, guarded, masks, counts, prefix, rows, rng), sm_scale, keys, visible)


def _scatter(case: Case, listed: list[np.ndarray], tokens: np.ndarray, guarded: GuardedArrays, rng: np.random.Generator):
    """Put each request's rows into random pages; every other slot is `case.bad`. Entries after the last request are junk."""
    page_size, dims = case.page_size, case.latent_dim + case.rope_dim
    entries = -(-tokens // page_size)
    kv_indptr = np.concatenate([[0], np.cumsum(entries)])
    pages = int(kv_indptr[-1]) + 5
    order = rng.permutation(pages)[:int(kv_indptr[-1])]
    slots = [order[kv_indptr[r]:kv_indptr[r + 1]][np.arange(t) // page_size] * page_size + np.arange(t) % page_size
             for r, t in enumerate(tokens)]
    shape = (pages, dims) if page_size == 1 else (pages, page_size, dims)
    values = np.concatenate(listed) if listed else np.zeros((0, dims), DTYPES[case.dtype])
    flat = np.concatenate(slots).astype(np.int64) if slots else np.zeros(0, np.int64)
    if not np.isnan(case.bad):  # NaN stands everywhere else already, in bit patterns that no kernel writes
        whole = np.full((pages * page_size, dims), case.bad, DTYPES[case.dtype])
        whole[flat] = values
        values, flat = whole, np.arange(len(whole))
    pool = guarded.pool("kv_cache", shape, values, flat, row_gap=case.row_gap)
    junk = np.full(4, 2_000_000_000, np.int64)  # a kernel that reads on would fault or find nothing it may use
    return pool, kv_indptr, np.concatenate([order, junk])


def _tree_argument(case: Case, guarded: GuardedArrays, masks: list[np.ndarray], counts: np.ndarray, prefix: np.ndarray, rows: int,
                   rng: np.random.Generator) -> object:
    form, most = case.tree_form, int(counts.max(initial=0))
    if form == "none":
        return None
    if form == "draft_tree":
        return DraftTree.from_lists([list(parents) for parents in case.trees])
    if form == "parents":
        flat = np.full(rows, 1_000_000, np.int32)  # padding rows: junk
        flat[:int(counts.sum())] = [node for parents in case.trees for node in parents]
        return guarded.input("tree", flat)
    if form in ("bits", "bits_int32"):
        words = max(1, -(-most // 32)) + 1  # one word more than needed, and bits after n set: both are to be ignored
        bits = np.full((rows, words), 0xFFFFFFFF, np.uint32)
        at = 0
        for mask in masks:
            n = len(mask)
            junk = np.zeros((n, 32 * words), bool)
            junk[:, n:] = True
            bits[at:at + n] = bits_of(mask, words) | bits_of(junk, words)
            at += n
        return guarded.input("tree", bits.view(np.int32) if form == "bits_int32" else bits)
    if form == "dense":
        dense = rng.random((len(masks), most + 2, most + 2)) < 0.5  # outside the top left corner: junk
        for r, mask in enumerate(masks):
            dense[r, :len(mask), :len(mask)] = mask
        return guarded.input("tree", dense)
    parts = []
    for mask, p in zip(masks, prefix, strict=True):
        full = np.zeros((len(mask), int(p) + len(mask)), bool)  # prefix columns are never read: leave them False
        full[:, int(p):] = mask
        parts.append(full.ravel())
    flat = np.concatenate(parts) if parts else np.zeros(0, bool)
    return guarded.input("tree", flat.view(np.uint8) if form == "full_mask_uint8" else flat)
