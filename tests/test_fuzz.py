"""Random problems against the float64 oracle: trees and forests in any order, empty requests, every form of the arguments.

Hypothesis draws what a problem is; NumPy draws its numbers from the seed (numbers drawn one by one repeat too much). All examples run in
one process, with guards around every array, so damage that an example does shows in it and not in its victim.
"""

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from support import machine, oracle
from support.problems import Case, build

MMA = [(name, kernel) for kernel in machine.TENSOR for name in machine.IMPLEMENTATIONS if kernel == "mma" or machine.HAS_WGMMA]
OTHERS = [("numba_verify", "naive"), ("numba_verify", "paged"), ("cuda_ref", "naive"), ("cuda_ref", "flash"), ("cuda_ref", "paged")]
#: (latent_dim, rope_dim), simplest first, so that Hypothesis shrinks towards small rows. On a GPU each costs a compile of its own.
DIMS = [(32, 0), (64, 32), (128, 64), (256, 32)]
MMA_DIMS = [(512, 64)] if machine.HAS_GPU else [(128, 64), (256, 64), (512, 0)]


@st.composite
def trees(draw, most=6):
    """Parents of one request: none, one node, a chain, a tree or a forest, with the nodes in any order."""
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    place = draw(st.permutations(range(n)))
    moved = [-1] * n
    for i, parent in enumerate(parents):
        moved[place[i]] = -1 if parent < 0 else place[parent]
    return tuple(moved)


@st.composite
def cases(draw, dims, dtypes, most_nodes, heads):
    forest = draw(st.lists(trees(most_nodes), max_size=3))
    # one length in three is 0, and some lie across the border of a key tile (16 or 32 keys)
    prefix = tuple(draw(st.one_of(st.just(0), st.integers(1, 8), st.integers(14, 34))) for _ in forest)
    latent, rope = draw(st.sampled_from(dims))
    visibility = draw(st.sampled_from(["tree", "tree", "random", "blind"]))
    forms = ["bits", "bits_int32", "dense", "full_mask", "full_mask_uint8"]
    form = draw(st.sampled_from(["draft_tree", "parents", "none", *forms] if visibility == "tree" else forms))
    wide = tuple(draw(st.lists(st.sampled_from(["qo_indptr", "kv_indptr", "kv_indices", "kv_lens"]), unique=True)))
    return Case("fuzz", "found by Hypothesis", tuple(forest), prefix, heads=draw(st.sampled_from(heads)),
                latent_dim=latent, rope_dim=rope,
                dtype=draw(st.sampled_from(dtypes)), page_size=draw(st.sampled_from([1, 1, 2, 5, 16])),
                draft_in_cache=draw(st.booleans()), tree_form=form, wide=wide, sm_scale=draw(st.sampled_from([None, 0.0, -0.1, 0.5])),
                logit_cap=draw(st.sampled_from([0.0, 0.0, 2.0])), visibility=visibility, deterministic=draw(st.booleans()),
                padding_rows=draw(st.integers(0, 3)), row_gap=draw(st.sampled_from([0, 0, 16])), seed=draw(st.integers(0, 2**16)))


def run_case(case, places):
    """The kernels `places` on `case`, guards and numbers checked."""
    problem = build(case)
    results = {place: machine.Call(*place, problem)() for place in places}  # before the oracle: freed memory could hold the right answer
    answer = oracle.solve(problem)
    for (name, kernel), (out, lse) in results.items():
        oracle.check(problem, answer, out, lse, f"{name} {kernel}")


@pytest.mark.kernel
@given(cases(DIMS, ["float32", "bfloat16", "float16"], 6, [1, 2, 3, 8, 9]))
def test_fuzz(case):
    note(f'repro: PYTHONPATH=.:tests python -c "from test_fuzz import *; run_case({case!r}, OTHERS)"')
    run_case(case, OTHERS)


@pytest.mark.kernel
@given(cases(MMA_DIMS, ["bfloat16", "float16"], 12, [1, 3, 8, 9, 20]))
def test_fuzz_mma(case):
    """Tiles of 16, 32 and 64 rows, with the borders of tokens anywhere in them."""
    note(f'repro: PYTHONPATH=.:tests python -c "from test_fuzz import *; run_case({case!r}, MMA)"')
    run_case(case, MMA)


@st.composite
def rising(draw):
    """Scores that jump up and down along the prefix, in all query rows or some: peaks move in some warps, while others' steps stay plain ones."""
    forest = tuple(draw(st.lists(st.sampled_from([(-1, 0, 1, 2, 3), (-1, 0, 0), (-1,)]), min_size=1, max_size=2)))
    prefix = tuple(draw(st.one_of(st.integers(0, 60), st.integers(100, 330))) for _ in forest)
    heads, key = draw(st.sampled_from([12, 9, 3])), st.integers(0, max(prefix) + 5)
    ups = draw(st.lists(st.tuples(key, st.sampled_from([9.0, 1.5, 2.7, 4.0, 5.5, 40.0])), min_size=1, max_size=4))
    downs = [(at + draw(st.sampled_from([1, 16, 32, 48])), -up) for at, up in ups if draw(st.booleans())]
    row = st.integers(0, sum(map(len, forest)) * heads)
    # Those of one score warp, of another, some, or all.
    rows = draw(st.one_of(st.just((0, 16)), st.just((16, 64)), st.tuples(row, row).map(lambda pair: (min(pair), max(pair))), st.none()))
    return Case("fuzz_rising", "found by Hypothesis", forest, prefix, heads=heads, rises=(*ups, *downs), rise_rows=rows,
                dtype=draw(st.sampled_from(["bfloat16", "float16"])), logit_cap=draw(st.sampled_from([0.0, 0.0, 0.0, 3.0])),
                deterministic=draw(st.booleans()), seed=draw(st.integers(0, 2**16)))


@pytest.mark.kernel
@settings(max_examples=3 * settings().max_examples)
@given(rising())
def test_fuzz_peaks(case):
    note(f'repro: PYTHONPATH=.:tests python -c "from test_fuzz import *; run_case({case!r}, MMA)"')
    run_case(case, MMA)
