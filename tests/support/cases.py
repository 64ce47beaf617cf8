"""The grid of correctness cases, each with the defect it is here for.

Why this grid and no product: the kernels branch on dtype, row layout, heads per tile, KV tile borders, page borders, mask form, index
width and where draft rows lie, each in one place of its own, so every value of each appears and pairs appear where two of them meet in one
expression (page size x width, mask form x draft place). Sizes stay small: the simulator computes about a million multiply-adds a second.
Bigger shapes, where only size is new, say so (`Case.size`): many rows run in the host build of cuda_ref, which is fast, and their mask bits in
test_schedule; long prefixes run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from numba_verify import published

from .problems import Case


def chain(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


def published_tree(name: str) -> tuple[int, ...]:
    return tuple(int(node) for node in published.load(name).parents)


def random_tree(n: int, seed: int, shuffled: bool = False) -> tuple[int, ...]:
    """A random recursive tree of n nodes; `shuffled`: children may come before their parents."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
    if not shuffled:
        return tuple(parents[:n])
    place = rng.permutation(n)
    moved = [0] * n
    for i, parent in enumerate(parents):
        moved[place[i]] = -1 if parent < 0 else int(place[parent])
    return tuple(moved)


SMALL = ((-1, 0, 0, 1), (-1, 0))
RAGGED = ((-1, 0, 0, 1), (), (-1,), (-1, 0, 1, 1, 0, 2, 5))

CORRECTNESS = [
    Case("two_trees", "the plainest problem: two trees, prefixes across tile borders", SMALL, (20, 37)),
    Case("no_tree", "tree=None is the causal chain", (chain(5), chain(1)), (17, 3), tree_form="none"),
    Case("ragged", "requests with no draft tokens and with no prefix anywhere in the batch", RAGGED, (5, 33, 0, 16), seed=1),
    Case("empty_ends", "empty requests at both ends, and two in a row", ((), (-1, 0), (), (), (-1,), ()), (9, 4, 0, 7, 18, 3)),
    Case("siblings", "siblings must not see each other, nor children their aunts", ((-1, 0, 0, 1, 2),), (6,), tree_form="parents"),
    Case("children_first", "nodes in any order: a parent may have the larger index", (random_tree(12, 3, shuffled=True),), (8,),
         tree_form="parents", heads=4),
    Case("forest", "several roots in one request", ((-1, -1, 0, 1, -1, 3),), (11,), tree_form="parents", heads=2),
    Case("eagle", "EAGLE's published tree of 26 nodes", (published_tree("eagle-mc-sim-7b-63"),), (19,), heads=2),
    Case("medusa", "Medusa's published tree of 64 nodes: exactly two mask words", (published_tree("medusa-vicuna-7b-stage2"),), (3,), heads=1,
         size="many_rows"),
    Case("words", "33 and 32 nodes: a mask word's border", (random_tree(33, 5), random_tree(32, 6)), (2, 0), heads=1,
         size="many_rows", tree_form="bits"),
    Case("sequoia_64", "Sequoia's 64-node tree beside a chain", (published_tree("sequoia-a100-c4-68m-13b-greedy"), chain(3)), (2, 18), heads=1,
         size="many_rows"),
    Case("sequoia_512", "Sequoia's 512-node tree: 16 mask words", (published_tree("sequoia-a100-cnn-68m-13b-stochastic-s512"),), (40,),
         heads=1, size="many_rows"),
    Case("nodes_1024", "1024 nodes, the most promised: all 32 words", (random_tree(1024, 8), chain(2)), (5, 30), heads=1, size="many_rows"),
    Case("random_mask", "given bits are obeyed as they are, the diagonal included", SMALL, (3, 0), visibility="random", tree_form="bits"),
    Case("random_dense", "the same as a dense bool mask", RAGGED, (5, 3, 0, 16), visibility="random", tree_form="dense", seed=2),
    Case("random_full", "the same as SGLang's flat mask, whose prefix columns are False and never read", RAGGED, (5, 33, 0, 16),
         visibility="random", tree_form="full_mask", seed=3),
    Case("full_bytes", "flat mask as uint8, draft rows aside", SMALL, (5, 18), visibility="random", tree_form="full_mask_uint8",
         draft_in_cache=False),
    Case("bits_signed", "int32 bits (TensorRT-LLM), draft rows aside", SMALL, (21, 2), tree_form="bits_int32", draft_in_cache=False),
    Case("blind", "rows that see nothing: out 0, lse -inf", ((-1, 0, 1), (-1, 0)), (0, 4), visibility="blind", tree_form="bits"),
    Case("blind_aside", "the same with draft rows aside and a dense mask", ((-1, 0, 1), ()), (0, 0), visibility="blind", tree_form="dense",
         draft_in_cache=False),
    Case("aside", "draft rows from draft_kv", RAGGED, (20, 7, 0, 31), draft_in_cache=False, seed=4),
    Case("aside_parents", "draft rows from draft_kv, parents on the device, pages", RAGGED, (20, 7, 0, 31), draft_in_cache=False, page_size=4,
         tree_form="parents"),
    Case("pages_16", "pages of 16, the last one partly filled", SMALL, (29, 14), page_size=16),
    Case("pages_64", "pages of 64, all index arrays 64 bit", SMALL, (60, 70), page_size=64,
         wide=("qo_indptr", "kv_indptr", "kv_indices", "kv_lens"), heads=4),
    Case("pages_5", "a page size that is no power of two, draft rows aside", SMALL, (12, 9), page_size=5, draft_in_cache=False),
    Case("wide_indices", "only kv_indices is 64 bit, as in SGLang", SMALL, (20, 7), wide=("kv_indices",)),
    Case("wide_indptr", "only the indptrs are 64 bit", SMALL, (20, 7), wide=("qo_indptr", "kv_indptr"), seed=1),
    Case("one_head", "a head tile with one head in it", SMALL, (20, 7), heads=1),
    Case("three_heads", "fewer heads than a tile", SMALL, (20, 7), heads=3, dtype="float16"),
    Case("nine_heads", "one head more than a small tile", SMALL, (20, 7), heads=9),
    Case("twenty_heads", "a second tile partly filled", ((-1, 0),), (18,), heads=20),
    Case("sixty_three_heads", "a head count that no tile divides", ((-1,),), (17,), heads=63),
    Case("heads_126", "126 heads", SMALL, (100, 50), heads=126, size="many_rows"),
    Case("heads_128", "DeepSeek's 128 heads, full row", SMALL, (300, 50), heads=128, latent_dim=512, size="gpu"),
    Case("full_row", "512/64, the tuned case", ((-1, 0, 0),), (20,), latent_dim=512, heads=8),
    Case("full_row_fp16", "512/64 in float16", ((-1, 0),), (18,), latent_dim=512, heads=2, dtype="float16"),
    Case("full_row_fp32", "512/64 in float32", ((-1, 0),), (18,), latent_dim=512, heads=2, dtype="float32"),
    Case("no_rope", "512/0", ((-1, 0),), (18,), latent_dim=512, rope_dim=0, heads=4),
    Case("latent_256", "256/64: one column a thread", SMALL, (18, 5), latent_dim=256),
    Case("latent_384", "384/32: the second column of half the threads", ((-1, 0),), (18,), latent_dim=384, rope_dim=32, heads=4),
    Case("latent_32", "32/0: the least row", SMALL, (18, 5), latent_dim=32, rope_dim=0, dtype="float32"),
    Case("fp16", "float16", SMALL, (20, 37), dtype="float16"),
    Case("fp32", "float32", SMALL, (20, 37), dtype="float32"),
    Case("gaps", "strided rows of q, pool, draft_kv and out", SMALL, (20, 7), row_gap=32, draft_in_cache=False),
    Case("gaps_pages", "strided rows inside pages", SMALL, (20, 7), row_gap=16, page_size=4),
    Case("cap", "logit_cap", SMALL, (20, 37), logit_cap=3.0, magnitude=2.0),
    Case("cap_fp32", "logit_cap in float32, where a coarse tanh would show", SMALL, (20, 7), logit_cap=30.0, dtype="float32"),
    Case("scale_zero", "sm_scale 0 is legal: the mean of what is visible", SMALL, (20, 7), sm_scale=0.0),
    Case("scale_negative", "any float is a scale", SMALL, (20, 7), sm_scale=-0.05),
    Case("peaked", "peaked softmax: one key takes nearly all", SMALL, (20, 37), magnitude=4.0, sm_scale=0.5),
    Case("far_below", "all scores near -1e5", SMALL, (20, 37), shift=-1e5, dtype="float32"),
    Case("far_above", "all scores near +1e4: nothing overflows", SMALL, (20, 37), shift=1e4),
    Case("equal_scores", "all scores equal and large", SMALL, (20, 37), sm_scale=1.0, shift=-4096.0, magnitude=1e-3),
    Case("nan_seen", "a row that sees a NaN is NaN in out and lse", SMALL, (20, 7), nan_at=(0, 11)),
    Case("nan_draft", "a NaN draft row spoils those that see it and nobody else", ((-1, 0, 0, 1, 2),), (18,), nan_at=(0, 20), heads=4),
    Case("nan_draft_aside", "the same from draft_kv", ((-1, 0, 0, 1, 2),), (18,), nan_at=(0, 20), heads=4, draft_in_cache=False),
    Case("no_requests", "bs = 0", (), ()),
    Case("no_rows", "requests, but no draft tokens at all", ((), ()), (5, 0)),
    Case("split", "long enough to be split over CTAs, beside a short one", (chain(1), (-1, 0)), (400, 9), heads=2),
    Case("split_evenly", "a CTA that ends one cut tile and begins another", (chain(1), chain(1), (-1, 0, 0)), (460, 150, 5), heads=2, latent_dim=32,
         rope_dim=32),
    Case("split_aside", "split, draft rows aside, pages of 16", (chain(1), (-1, 0, 0)), (390, 0), heads=2, page_size=16, draft_in_cache=False),
    Case("split_deterministic", "cut by the request alone", (chain(1), (-1, 0)), (2300, 9), heads=1, latent_dim=32, rope_dim=32,
         deterministic=True),
    Case("split_nan", "a NaN in one piece of a cut tile", (chain(1),), (420,), heads=2, latent_dim=32, rope_dim=32, nan_at=(0, 17)),
    Case("split_far_below", "pieces of equal scores near -1e5: weights from their lse alone would be coarse", (chain(1), (-1, 0)), (420, 9), heads=2,
         latent_dim=32, rope_dim=32, dtype="float32", shift=-1e5, magnitude=1e-3),
    Case("split_far_below_fp16", "the same in float16, with scores it can hold", (chain(1),), (420,), heads=2, latent_dim=32, rope_dim=32,
         dtype="float16", shift=-6e4, magnitude=1e-3, sm_scale=1.0),
    Case("split_full_row", "a cut row of four strips", (chain(1),), (400,), heads=2, latent_dim=512, rope_dim=32),
    Case("many_pieces", "more pieces than combine merges by whole rows", (chain(2),), (20_000,), heads=1, latent_dim=256, rope_dim=0,
         deterministic=True, size="many_rows"),
    Case("most_pieces", "as many pieces as a request may have", (chain(1), (-1, 0)), (127 * 1024, 9), heads=1, latent_dim=160, rope_dim=0,
         dtype="float32", deterministic=True, size="many_rows"),
    Case("long_fp32", "16,000 keys in float32: one long sum would show", (chain(2), chain(1)), (16_000, 4), heads=4, latent_dim=512, dtype="float32",
         size="gpu"),
    Case("straggler", "ThunderMLA's uneven lengths", (chain(4),) * 4, (4641, 45118, 1730, 1696), heads=16, latent_dim=512,
         size="gpu"),
    Case("long", "100,000 keys: sums stay accurate", (chain(2), chain(1)), (100_000, 4), heads=8, latent_dim=512, size="gpu"),
]

#: The same problems again with bits that may depend on the request alone.
DETERMINISTIC = [replace(case, name=f"{case.name}_deterministic", deterministic=True)
                 for case in CORRECTNESS if case.name in ("ragged", "aside", "pages_16", "nine_heads", "blind", "nan_draft", "split_far_below")]
ALL = CORRECTNESS + DETERMINISTIC
