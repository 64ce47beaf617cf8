"""What only `mma` can get wrong: rows of several draft tokens in one tile, warps that take steps in turn, a ring that is used again and again.

The grid of cases.py runs with `mma` as well, as far as its rows allow. These cases are about

    tiles    16, 32 or 64 rows (draft token x head): part of a token, one, several; a last tile that is partly filled
    steps    16 or 32 keys: masked ones (draft tokens or the end of the list are in it) and others, by 1, 2 or 4 groups of score warps in turn
    peaks    handed from group to group, and moved only when a row outgrows them
    poison   a hidden draft row that is not finite is zeroed where it lies, for all rows of the tile
    bits     of 16 or 32 keys at once, from two neighbouring visibility words

A step of the simulator takes some 30 ms, so a case should have no more than 30.
"""

from __future__ import annotations

from dataclasses import replace

from .cases import RAGGED, SMALL, chain, published_tree, random_tree
from .problems import Case

INFINITY = float("inf")
#: Rows 0 .. 4; token 2, a leaf, sees tokens 0 and 2 alone.
SIBLINGS = (-1, 0, 0, 1, 3)
#: The smallest row layout; three heads, so that tokens end anywhere in a tile. What tests of races and mutations start from.
MMA = Case("mma", "two steps, a tail, two trees", ((-1, 0), SIBLINGS), (40, 17), heads=3)

TILES = [
    Case("rows_1", "one row: fifteen of the tile are padding", (chain(1),), (20,), heads=1),
    Case("rows_16", "exactly a tile of 16, of two tokens", (chain(2), chain(2)), (40, 3), heads=8),
    Case("rows_21", "seven tokens of three heads: token borders anywhere in a tile, its end too", (chain(7), (-1, 0, 0)), (40, 9), heads=3),
    Case("rows_63", "nine heads: no token starts where a tile does", ((-1, 0, 1, 1, 0, 2, 5), ()), (30, 7), heads=9),
    Case("rows_64", "exactly two tiles of 32", (random_tree(4, 1),), (20,), heads=16),
    Case("rows_128", "64 heads: tiles begin inside a token", ((-1, 0),), (20,), heads=64),
    Case("rows_384", "128 heads: a token is several tiles", ((-1, 0, 0),), (3,), heads=128),
    Case("tokens_17", "one head: a tile is all tokens, the next has one", (random_tree(17, 2, shuffled=True), chain(33)), (5, 18), heads=1,
         tree_form="parents"),
    Case("medusa_tree", "Medusa's published tree of 64 nodes", (published_tree("medusa-vicuna-7b-stage2"),), (19,), heads=1),
    Case("eagle_heads", "EAGLE's published tree, three heads", (published_tree("eagle-mc-sim-7b-63"),), (19,), heads=3),
    Case("sequoia_tree", "Sequoia's published tree of 512 nodes", (published_tree("sequoia-a100-cnn-68m-13b-stochastic-s512"),), (40,), heads=4,
         size="many_rows"),
    Case("sequoia_full_row", "the same at 512/64: 128 tiles of 64 rows", (published_tree("sequoia-a100-cnn-68m-13b-stochastic-s512"),), (700,),
         heads=16, latent_dim=512, size="gpu"),
    Case("nodes_1024_full_row", "1024 nodes, the most promised, 512/64", (random_tree(1024, 8), chain(2)), (300, 3000), heads=8, latent_dim=512,
         size="gpu"),
    Case("heads_128_long", "128 heads, long enough to be cut", ((-1, 0), (-1,)), (9000, 50), heads=128, latent_dim=512, size="gpu"),
    Case("full_row_heads", "512/64: a tile of two tokens", ((-1, 0, 0),), (20,), latent_dim=512, heads=9),
    Case("no_rope_heads", "512/0", ((-1, 0, 0),), (20,), latent_dim=512, rope_dim=0, heads=9, dtype="float16"),
    Case("narrow_no_rope", "128/0: a row of two segments", SMALL, (20, 37), rope_dim=0, heads=3),
    Case("wide_rope", "256/128", SMALL, (20, 37), latent_dim=256, rope_dim=128, heads=3),
]

STEPS = [
    Case("one_step", "a piece of one step, with its beginning, its mask and its end", ((-1, 0, 0),), (2,), heads=3),
    Case("one_step_each", "pieces of one step, so that each group waits for another piece's", (chain(1),) * 9, (3, 1, 0, 9, 2, 12, 5, 7, 4), heads=2),
    Case("borders", "prefixes at the borders of a step", ((-1, 0, 0),) * 7, (15, 16, 17, 31, 32, 33, 48), heads=3),
    Case("whole_steps", "the list ends where a step does", (chain(4), chain(16)), (28, 48), heads=2),
    Case("rounds", "more steps than the ring has blocks, and than there are groups", ((-1, 0, 0),), (200,), heads=3),
    Case("cut", "cut over CTAs, beside a short one", ((-1, 0, 0), (-1, 0)), (600, 9), heads=3),
    Case("cut_aside", "the same, draft rows aside, pages of 16", ((-1, 0, 0), (-1, 0)), (590, 5), heads=3, page_size=16, draft_in_cache=False),
    Case("cut_tiles", "a CTA that ends one cut tile and begins another", (chain(1), chain(1), (-1, 0, 0)), (540, 280, 5), heads=16),
    Case("cut_fixed", "cut by the request alone", ((-1, 0), (-1, 0, 0)), (1060, 20), heads=3, rope_dim=0, deterministic=True),
    Case("ragged_heads", "requests with no draft tokens and with no prefix, three heads", RAGGED, (5, 33, 0, 16), seed=1, heads=3),
    Case("pages_64_aside", "pages of 64, draft rows aside, 64-bit indices", RAGGED, (70, 33, 0, 64), page_size=64, draft_in_cache=False, heads=3,
         wide=("qo_indptr", "kv_indptr", "kv_indices", "kv_lens")),
]

BITS = [
    Case("chain_40", "40 draft tokens: the second visibility word, met at any bit", (chain(40),), (21,), heads=1),
    Case("chain_70", "70 draft tokens: the third word, in whole steps", (chain(70),), (32,), heads=1, tree_form="none"),
    Case("tree_70", "70 draft tokens in any order, no prefix", (random_tree(70, 4, shuffled=True),), (0,), heads=1, tree_form="parents"),
    Case("random_40", "any mask over two words, the diagonal included", (chain(40), chain(3)), (7, 50), heads=1, visibility="random",
         tree_form="bits"),
    Case("random_70", "any mask over three words, given dense", (chain(70),), (3,), heads=1, visibility="random", tree_form="dense"),
    Case("random_heads", "any mask, three heads, flat and aside", RAGGED, (5, 33, 0, 16), visibility="random", tree_form="full_mask", seed=3,
         heads=3, draft_in_cache=False),
    Case("blind_heads", "rows that see nothing, beside rows of a request with a prefix", ((-1, 0, 1), (-1, 0)), (0, 4), visibility="blind",
         tree_form="bits", heads=9),
    Case("blind_steps", "nobody sees any of several steps", (chain(40),), (0,), visibility="blind", tree_form="bits", heads=1),
]

PEAKS = [
    Case("rise_first_group", "scores rise by more than 2^8 in the first group's second step", ((-1, 0, 0),), (190,), heads=3, rises=((128, 9.0),)),
    Case("rise_second_group", "in the second step, another group's", ((-1, 0, 0),), (90,), heads=3, rises=((32, 9.0),)),
    Case("rise_again", "in the middle of three steps, of different groups", ((-1, 0, 0),), (190,), heads=3,
         rises=((40, 8.0), (70, 7.0), (150, 9.0))),
    Case("rise_at_the_end", "the last step, of another group than the first, outgrows all before", (chain(5),), (94,), heads=3, rises=((97, 12.0),)),
    Case("hump", "one step, of one group, rises above all others: the next groups measure from its peak", ((-1, 0, 0),), (350,), heads=3,
         rises=((160, 9.0), (192, -9.0))),
    Case("hump_of_16", "the same in steps of 16 keys and float16, with a negative scale", ((-1, 0, 0),), (350,), heads=3, dtype="float16",
         sm_scale=-0.07, rises=((160, 9.0), (176, -9.0))),
    Case("climb", "up by a factor of 16, less or more, in each step: weights do, or peaks move", ((-1, 0, 0),), (350,), heads=3,
         rises=tuple((32 * i, 2.5 + 0.1 * i) for i in range(4, 10))),
    Case("rise_a_little", "by a little again and again: the peak moves late", ((-1, 0, 0),), (190,), heads=3,
         rises=tuple((16 * i, 2.0) for i in range(1, 12))),
    Case("rise_fp16", "weights up to 2^7.8, for which no peak moves, are well inside float16", ((-1, 0, 0),), (350,), heads=3, dtype="float16",
         rises=((163, 5.4), (164, -5.4), (291, 5.4), (292, -5.4))),
    Case("rise_of_some", "in the rows of one warp of a group of two, the others' steps stay plain ones", (SIBLINGS,), (130,), heads=6,
         rises=((64, 9.0),), rise_rows=(0, 16)),
    Case("rise_of_others", "the same, the other warp's, in another group's step", (SIBLINGS,), (130,), heads=6, rises=((80, 9.0),),
         rise_rows=(16, 30)),
    Case("rise_of_half", "the same with 64 rows and steps of 32 keys", (chain(9),), (290,), heads=6, rises=((128, 9.0),), rise_rows=(0, 32)),
    Case("fall", "the first key is the peak of all", ((-1, 0, 0),), (90,), heads=3, rises=((1, -9.0), (50, -9.0))),
    Case("rise_and_cut", "pieces with peaks far apart", ((-1, 0, 0),), (600,), heads=3, rises=((300, 9.0), (550, 6.0))),
    Case("far_below_heads", "all scores near -1e5", SMALL, (20, 37), shift=-1e5, heads=3),
    Case("far_below_cut", "all scores near -1e5, in pieces", SMALL, (600, 37), shift=-1e5, heads=3),
    Case("far_below_fp16", "as far as float16 can hold them", SMALL, (20, 37), shift=-6e4, magnitude=1e-3, sm_scale=1.0, dtype="float16"),
    Case("equal_cut", "all scores equal and large, in pieces", ((-1, 0),), (600,), sm_scale=1.0, shift=-4096.0, magnitude=1e-3, heads=3),
    Case("scale_zero_cut", "sm_scale 0: the mean, in pieces", ((-1, 0),), (600,), sm_scale=0.0, heads=3),
    Case("negative_rise", "a negative scale", ((-1, 0, 0),), (90,), heads=3, sm_scale=-0.07, rises=((32, 9.0),)),
    Case("cap_rise", "logit_cap flattens what would outgrow the peak", ((-1, 0, 0),), (90,), heads=3, logit_cap=4.0, magnitude=2.0,
         rises=((32, 9.0),)),
]

POISON = [
    Case("nan_hidden", "a NaN draft row, seen by itself alone, in a tile with rows that do not see it", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20)),
    Case("nan_hidden_word", "in the second visibility word, not in the first step", (chain(40),), (21,), heads=1, nan_at=(0, 58)),
    Case("nan_hidden_aside", "the same from draft_kv", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20), draft_in_cache=False),
    Case("nan_cut", "a NaN in one piece, hidden from most rows", (chain(5),), (595,), heads=3, nan_at=(0, 598)),
    Case("nan_prefix", "everybody sees a NaN of the prefix", (SIBLINGS, (-1,)), (18, 40), heads=9, nan_at=(0, 3)),
    Case("nan_latent", "one NaN in the latent part", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20), nan_dims=(77, 78)),
    Case("nan_rope", "one NaN in the rope part: the values are finite", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20), nan_dims=(150, 151)),
    Case("nan_query", "one query is NaN: no other row may notice", (SIBLINGS, (-1, 0)), (40, 37), heads=3, nan_q=(2, 1)),
    Case("nan_query_blind", "one query is NaN, and sees nothing", ((-1, 0, 1), (-1, 0)), (0, 4), visibility="blind", tree_form="bits", heads=3,
         nan_q=(1, 1)),
    Case("nan_query_cut", "one query is NaN, in pieces", ((-1, 0),), (600,), heads=3, nan_q=(0, 2)),
    Case("inf_hidden", "an infinite draft row", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20), bad=INFINITY),
    Case("inf_rope", "one infinity in the rope part", (SIBLINGS,), (18,), heads=9, nan_at=(0, 20), nan_dims=(150, 151), bad=INFINITY),
    Case("inf_around", "infinities in slots that nobody owns, in the tail of a last page, in padding rows", RAGGED, (5, 33, 0, 16), page_size=16,
         heads=3, bad=INFINITY),
    Case("inf_around_aside", "the same, draft rows aside, pages of 5", RAGGED, (5, 33, 0, 16), page_size=5, heads=3, bad=-INFINITY,
         draft_in_cache=False),
]

#: The same numbers in float16, whose infinities and largest weights are others.
FLOAT16 = [replace(case, name=f"{case.name}_float16", dtype="float16") for case in TILES + PEAKS + POISON
           if case.name in ("rows_63", "rise_again", "nan_hidden", "inf_hidden", "inf_around")]
ALL = TILES + STEPS + BITS + PEAKS + POISON + FLOAT16
#: For `wgmma` alone: no tile of `mma` with such rows fits the smallest GPU, whose shared memory the simulator gives it.
WIDE = [
    Case("widest_rows", "512/128, over several steps: no room for weights beside the ring", ((-1, 0),), (250,), latent_dim=512, rope_dim=128,
         heads=3),
    Case("widest_rows_rise", "the same, and not all steps are plain", (SIBLINGS,), (250,), latent_dim=512, rope_dim=128, rises=((150, 9.0),)),
]
