"""Random problems for `check` and `demo`, laid out as a serving engine does: KV rows scattered over a paged pool, NaN in every other slot.

`draw` makes the numbers, `lay_out` the arrays. The answer follows from the numbers alone, so one set of numbers can be laid out in several
ways (page sizes, tree forms, batch orders) that must all give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import NUMPY_DTYPE
from ..tree import DraftTree

#: Rows of q, out and lse after the last draft token, which nobody may touch.
PADDING_ROWS = 2
#: Pages of the pool that no request owns, at least.
FREE_PAGES = 3
#: What stands in kv_indices after the last request: a kernel that reads on finds no such page.
JUNK_PAGE = 2_000_000_000


class Values(NamedTuple):
    """The numbers of a batch, one entry a request: q [n, H, D], keys [L + n, D] (prefix, then draft tokens), masks bool [n, n]."""

    q: list[np.ndarray]
    keys: list[np.ndarray]
    masks: list[np.ndarray]
    latent_dim: int
    logit_cap: float = 0.0

    @property
    def row_dim(self) -> int:
        return self.q[0].shape[2]

    @property
    def num_heads(self) -> int:
        return self.q[0].shape[1]

    @property
    def sm_scale(self) -> float:
        return self.row_dim ** -0.5

    @property
    def counts(self) -> np.ndarray:
        """Draft tokens of each request."""
        return np.array([len(q) for q in self.q], np.int64)

    @property
    def prefix(self) -> np.ndarray:
        """Cached tokens of each request."""
        return np.array([len(keys) for keys in self.keys], np.int64) - self.counts

    @property
    def total_q(self) -> int:
        return int(self.counts.sum())

    @property
    def visible(self) -> list[np.ndarray]:
        """bool [n, L + n] a request: which key a draft token sees."""
        return [np.concatenate([np.ones((len(mask), int(prefix)), bool), mask], axis=1)
                for mask, prefix in zip(self.masks, self.prefix, strict=True)]

    def take(self, order: Sequence[int]) -> Values:
        """The requests `order`, in that order."""
        return self._replace(q=[self.q[r] for r in order], keys=[self.keys[r] for r in order], masks=[self.masks[r] for r in order])


class Layout(NamedTuple):
    """How a batch lies in memory. `rows`, `entries`: capacities of the arrays, 0 = what this batch needs and some padding.

    tree: "draft_tree", "causal" (None), "parents", "bits", "dense", "full_mask". aside: draft rows in draft_kv and not in the cache.
    """

    page_size: int = 1
    aside: bool = False
    tree: str = "draft_tree"
    index_dtype: str = "int32"
    rows: int = 0
    entries: int = 0


class Batch(NamedTuple):
    """The arguments of one call, on the host, and the numbers they were made from."""

    values: Values
    layout: Layout
    q: np.ndarray
    kv_cache: np.ndarray
    draft_kv: np.ndarray | None
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_lens: np.ndarray
    tree: object


def random_tree(rng: np.random.Generator, nodes: int) -> list[int]:
    """Parents of a random recursive tree whose nodes stand in any order."""
    place = rng.permutation(nodes)
    parents = np.full(nodes, -1)
    for node in range(1, nodes):
        parents[place[node]] = place[int(rng.integers(node))]
    return parents.tolist()


def tree_masks(trees: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """bool [n, n] a request: every draft token sees itself and its ancestors."""
    tree = DraftTree.from_lists([list(parents) for parents in trees])
    return [tree.mask(request) for request in range(len(trees))]


def draw(rng: np.random.Generator, masks: list[np.ndarray], prefix: Sequence[int], heads: int, latent_dim: int, rope_dim: int, dtype: str,
         logit_cap: float = 0.0) -> Values:
    """Normal random numbers, so that no two keys weigh the same."""
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPE[dtype])

    row = latent_dim + rope_dim
    return Values([normal(len(mask), heads, row) for mask in masks],
                  [normal(length + len(mask), row) for mask, length in zip(masks, prefix, strict=True)], masks, latent_dim, logit_cap)


def lay_out(rng: np.random.Generator, values: Values, layout: Layout) -> Batch:
    """The arrays of `values` in the way `layout` says; what no request owns is NaN."""
    counts, prefix = values.counts, values.prefix
    dtype, total = values.q[0].dtype, values.total_q
    rows = layout.rows or total + PADDING_ROWS
    q = np.full((rows, values.num_heads, values.row_dim), np.nan, dtype)
    q[:total] = np.concatenate(values.q)
    draft = None
    if layout.aside:
        draft = np.full((rows, values.row_dim), np.nan, dtype)
        draft[:total] = np.concatenate([keys[length:] for keys, length in zip(values.keys, prefix, strict=True)])
    listed = [keys[:length] if layout.aside else keys for keys, length in zip(values.keys, prefix, strict=True)]
    pool, kv_indptr, pages = _scatter(rng, listed, layout)

    def index(array: np.ndarray) -> np.ndarray:
        return array.astype(layout.index_dtype)

    return Batch(values, layout, q, pool, draft, index(_borders(counts)), index(kv_indptr), index(pages),
                 index(np.array([len(keys) for keys in listed], np.int64)), _tree_argument(values, layout, rows))


def _borders(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])


def _scatter(rng: np.random.Generator, listed: list[np.ndarray], layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pool, kv_indptr, kv_indices): each request's rows in random pages."""
    size = layout.page_size
    kv_indptr = _borders([-(-len(keys) // size) for keys in listed])
    used = int(kv_indptr[-1])
    entries = layout.entries or used + PADDING_ROWS
    order = rng.permutation(entries + FREE_PAGES)[:used]
    pool = np.full((entries + FREE_PAGES, size, listed[0].shape[1]), np.nan, listed[0].dtype)
    for r, keys in enumerate(listed):
        token = np.arange(len(keys))
        pool[order[kv_indptr[r] + token // size], token % size] = keys
    return pool, kv_indptr, np.concatenate([order, np.full(entries - used, JUNK_PAGE)])


def _tree_argument(values: Values, layout: Layout, rows: int) -> object:
    form, masks = layout.tree, values.masks
    if form == "causal":
        return None
    if form == "draft_tree":
        return DraftTree.from_visibility(masks)
    most = int(values.counts.max(initial=0))
    if form == "parents":
        parents = np.full(rows, -1, np.int32)
        parents[:values.total_q] = DraftTree.from_visibility(masks).parents
        return parents
    if form == "dense":
        dense = np.ones((len(masks), most, most), bool)
        for r, mask in enumerate(masks):
            dense[r, :len(mask), :len(mask)] = mask
        return dense
    if form == "full_mask":  # SGLang's: prefix columns are there and never read
        return np.concatenate([np.concatenate([np.zeros((len(mask), int(prefix)), bool), mask], axis=1).ravel()
                               for mask, prefix in zip(masks, values.prefix, strict=True)])
    words = max(1, -(-most // 32))
    bits = np.zeros((rows, 32 * words), bool)
    for begin, mask in zip(_borders(values.counts), masks, strict=False):
        bits[begin:begin + len(mask), :len(mask)] = mask
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
