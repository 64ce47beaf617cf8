"""DraftTree: parents, depth and visibility against a plain walk to the root, every refusal, and the drawings."""

import copy
import pickle
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from numba_verify import published
from numba_verify.tree import MAX_DRAFT_TOKENS, DraftTree


def naive(parents):
    """Depth and mask of one request by walking every node to its root."""
    size = len(parents)
    mask, depth = np.zeros((size, size), bool), np.zeros(size, np.int32)
    for node in range(size):
        seen = node
        while seen != -1:
            mask[node, seen] = True
            seen = parents[seen]
        depth[node] = mask[node].sum() - 1
    return depth, mask


def assert_matches_walk(tree, lists):
    assert tree.batch_size == len(lists)
    assert tree.num_nodes == sum(map(len, lists))
    assert tree.visibility.shape == (tree.num_nodes, max(1, -(-max(map(len, lists), default=0) // 32)))
    for request, parents in enumerate(lists):
        depth, mask = naive(parents)
        rows = tree.rows(request)
        assert tree.parents[rows].tolist() == parents
        assert tree.depth[rows].tolist() == depth.tolist()
        assert np.array_equal(tree.mask(request), mask)
        bits = tree.visibility[rows]
        for token in range(bits.shape[1] * 32):
            column = (bits[:, token // 32] >> np.uint32(token % 32)) & 1
            expected = mask[:, token] if token < len(parents) else np.zeros(len(parents), bool)
            assert np.array_equal(column.astype(bool), expected), f"request {request}, token {token}"


@st.composite
def trees(draw, max_size=70):
    """One list of parents with its nodes in any order: drawn as a seed, so that sizes shrink and values need no shrinking."""
    size = draw(st.integers(0, max_size))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Bias 0 gives bushy trees, bias 1 gives chains; a few nodes become roots of their own.
    bias = draw(st.sampled_from([0.0, 0.5, 1.0]))
    names = generator.permutation(size)
    parents = np.full(size, -1)
    for node in range(1, size):
        if generator.random() > 0.05:
            above = node - 1 if generator.random() < bias else generator.integers(0, node)
            parents[names[node]] = names[above]
    return parents.tolist()


@given(st.lists(trees(), max_size=5))
def test_any_tree_matches_the_walk_to_the_root(lists):
    assert_matches_walk(DraftTree.from_lists(lists), lists)


@given(st.lists(trees(), max_size=4))
def test_a_tree_survives_the_way_through_its_mask(lists):
    tree = DraftTree.from_lists(lists)
    masks = [tree.mask(request) for request in range(tree.batch_size)]
    assert DraftTree.from_visibility(masks) == tree


@given(trees(max_size=20), st.integers(0, 2**32 - 1))
def test_a_closed_loop_is_always_refused(parents, seed):
    mask = naive(parents)[1]
    inner = [node for node in range(len(parents)) if mask[:, node].sum() > 1]
    assume(inner)
    node = int(np.random.default_rng(seed).choice(inner))
    parents[node] = next(int(below) for below in np.flatnonzero(mask[:, node]) if below != node)
    with pytest.raises(ValueError, match="request 1, node .*: the parents form a cycle"):
        DraftTree.from_lists([[-1], parents])


@pytest.mark.parametrize("name", published.names())
def test_published_trees_match_the_walk(name):
    tree = published.load(name, batch_size=2)
    assert_matches_walk(tree, [tree.parents[tree.rows(0)].tolist()] * 2)
    assert (tree.parents[tree.rows(1)] == -1).sum() == 1


def test_published_trees_have_the_shapes_of_their_papers():
    sizes = {name: published.load(name).num_nodes for name in published.names()}
    assert sizes["medusa-mc-sim-7b-63"] == 64
    assert sizes["eagle-mc-sim-7b-63"] == 26
    assert sizes["sequoia-a100-cnn-68m-13b-stochastic-s512"] == 512
    assert published.load("sequoia-8-chain") == DraftTree.chain([8])
    assert published.load("sequoia-1x128-tree") == DraftTree.chain([129])
    eagle = published.load("eagle-mc-sim-7b-63")
    assert np.bincount(eagle.depth).tolist() == [1, 4, 8, 8, 3, 2]


def test_unknown_published_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of eagle-mc-sim-7b-63, medusa-.*; got 'medusa'"):
        published.load("medusa")


def test_nodes_may_come_before_their_parents():
    tree = DraftTree.from_lists([[2, 0, -1]])
    assert tree.depth.tolist() == [1, 2, 0]
    assert tree.visibility[:, 0].tolist() == [0b101, 0b111, 0b100]


def test_empty_requests_and_empty_batches():
    tree = DraftTree.from_lists([[], [-1], []])
    assert tree.qo_indptr.tolist() == [0, 0, 1, 1]
    assert tree.mask(0).shape == (0, 0)
    for empty in (DraftTree.from_lists([]), DraftTree.chain([]), DraftTree.from_parents([], [0]), DraftTree.from_visibility([])):
        assert (empty.batch_size, empty.num_nodes, empty.visibility.shape) == (0, 0, (0, 1))


def test_chain_sees_what_a_causal_mask_sees():
    tree = DraftTree.chain([3, 0, 40])
    assert tree.parents[:3].tolist() == [-1, 0, 1]
    assert np.array_equal(tree.mask(2), np.tri(40, dtype=bool))
    assert tree == DraftTree.from_lists([[-1, 0, 1], [], list(range(-1, 39))])


def test_the_largest_request_is_allowed():
    tree = DraftTree.chain([MAX_DRAFT_TOKENS])
    assert tree.visibility.shape == (1024, 32)
    assert tree.depth[-1] == 1023
    assert (tree.visibility[-1] == 0xFFFFFFFF).all()


def test_kinds_of_input_do_not_matter():
    lists = [[-1, 0, 0, 1], [-1, 0]]
    tree = DraftTree.from_lists(lists)
    for dtype in (np.int8, np.int32, np.int64):
        assert DraftTree.from_lists([np.array(row, dtype) for row in lists]) == tree
        assert DraftTree.from_parents(np.array([-1, 0, 0, 1, -1, 0], dtype), np.array([0, 4, 6], np.int64)) == tree
    assert DraftTree.from_lists(((-1, 0, 0, 1), (-1, 0))) == tree
    assert DraftTree.from_lists(np.array([[-1, 0], [-1, -1]])) == DraftTree.from_lists([[-1, 0], [-1, -1]])


def test_dtypes_of_the_arrays():
    tree = DraftTree.from_lists([[-1, 0]])
    dtypes = [array.dtype.name for array in (tree.parents, tree.depth, tree.visibility, tree.qo_indptr)]
    assert dtypes == ["int32", "int32", "uint32", "int32"]


def test_the_tree_is_immutable_also_after_a_copy():
    given_parents = np.array([-1, 0], np.int32)
    tree = DraftTree.from_parents(given_parents, [0, 2])
    given_parents[1] = 1
    for one in (tree, copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert one.parents.tolist() == [-1, 0]
        for array in (one.parents, one.depth, one.visibility, one.qo_indptr):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        with pytest.raises(AttributeError):
            one.parents = given_parents


def test_equality_looks_at_parents_and_borders():
    tree = DraftTree.from_lists([[-1, 0], [-1]])
    assert tree == DraftTree.from_lists([[-1, 0], [-1]])
    assert hash(tree) == hash(DraftTree.from_lists([[-1, 0], [-1]]))
    assert tree != DraftTree.from_lists([[-1, 0], [], [-1]])
    assert tree != DraftTree.from_lists([[-1, -1], [-1]])
    assert tree != "tree"


def test_a_large_batch_is_built_without_a_loop_over_nodes():
    lists = [published.load("sequoia-a100-cnn-68m-13b-stochastic-s512").parents] * 64
    DraftTree.from_lists(lists)
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        DraftTree.from_lists(lists)
        spent.append(time.perf_counter() - start)
    # 6 ms on a slow core; a Python loop over the 32,768 nodes and their ancestors takes 100 ms and more.
    assert min(spent) < 0.05


class OnDevice:
    __cuda_array_interface__ = {}


REFUSED = {
    "parent above": (lambda: DraftTree.from_lists([[-1], [-1, 2]]), IndexError, r"request 1, node 1: .* 0 \.\. 1 .*, got 2"),
    "parent below": (lambda: DraftTree.from_lists([[-2]]), IndexError, r"request 0, node 0: expected a parent of -1 \(a root\).*, got -2"),
    "own parent": (lambda: DraftTree.from_lists([[-1, 1]]), ValueError, "request 0, node 1: the node is its own parent; give a root"),
    "cycle": (
        lambda: DraftTree.from_lists([[-1, 0], [-1, 3, 1, 2, 3]]),
        ValueError,
        r"request 1, node 1: the parents form a cycle, 1 -> 3 -> 2 -> 1; every node must reach a root",
    ),
    "long cycle": (
        lambda: DraftTree.from_lists([[*range(1, 40), 0]]),
        ValueError,
        r"request 0, node 0: .* 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> \.\.\.;",
    ),
    "floats": (lambda: DraftTree.from_lists([[-1.0, 0.0]]), TypeError, "request 0: .* expected integers .*, got dtype float64; convert"),
    "float array": (lambda: DraftTree.from_parents(np.zeros(2), [0, 2]), TypeError, "parents: expected integers .* float64"),
    "empty float array": (lambda: DraftTree.from_parents(np.zeros(0), [0]), TypeError, "parents: expected integers .* float64"),
    "bools": (lambda: DraftTree.from_parents(np.zeros(2, bool), [0, 2]), TypeError, "parents: expected integers .* bool"),
    "uint64": (lambda: DraftTree.from_parents(np.zeros(2, np.uint64), [0, 2]), TypeError, "at most 64 signed bits, got dtype uint64"),
    "None inside": (lambda: DraftTree.from_lists([[-1], [None]]), TypeError, "request 1: .* expected integers"),
    "float borders": (lambda: DraftTree.from_parents([-1], [0.0, 1.0]), TypeError, "qo_indptr: expected integers"),
    "rank 2": (lambda: DraftTree.from_parents(np.zeros((2, 2), int), [0, 4]), ValueError, r"parents: expected rank 1, got shape \(2, 2\)"),
    "ragged": (lambda: DraftTree.from_lists([[[-1], [0, 1]]]), ValueError, "request 0: .* nested lists of different lengths"),
    "flat list": (lambda: DraftTree.from_lists([-1, 0, 0]), TypeError, r"such as \[\[-1, 0, 0, 1\], \[-1, 0\]\], got a flat list"),
    "no list": (lambda: DraftTree.from_lists(3), TypeError, "expected a list with one entry per request, .* got int"),
    "device array": (lambda: DraftTree.from_parents(OnDevice(), [0]), TypeError, r"on a GPU; pass it to plan\(tree=\.\.\.\) itself"),
    "too many": (
        lambda: DraftTree.chain([3, MAX_DRAFT_TOKENS + 1]),
        ValueError,
        "request 1: expected at most 1024 draft tokens, got 1025; prune",
    ),
    "negative chain": (lambda: DraftTree.chain([3, -1]), ValueError, "request 1: expected a chain of 0 or more tokens, got -1"),
    "number as chain": (lambda: DraftTree.chain(4), ValueError, r"lengths: expected rank 1, got shape \(\)"),
    "no borders": (lambda: DraftTree.from_parents([], []), ValueError, "qo_indptr: expected .* 0 first, got nothing first"),
    "first border": (lambda: DraftTree.from_parents([-1], [1, 1]), ValueError, "qo_indptr: expected .* 0 first, got 1 first"),
    "falling border": (lambda: DraftTree.from_parents([-1], [0, 2, 1]), ValueError, "request 1 starts at 2 and ends at 1; .* never fall"),
    "padding": (
        lambda: DraftTree.from_parents([-1, 0, 0], [0, 2]),
        ValueError,
        r"expected the number of parents, 3, as last entry, got 2; cut padding off with parents\[:qo_indptr\[-1\]\]",
    ),
    "mask of ints": (
        lambda: DraftTree.from_visibility([np.eye(2, dtype=int)]),
        TypeError,
        "request 0: expected a mask of bool, got dtype int64",
    ),
    "mask not square": (
        lambda: DraftTree.from_visibility([np.ones((2, 3), bool)]),
        ValueError,
        r"request 0: expected a square .* \(2, 3\)",
    ),
    "mask too large": (
        lambda: DraftTree.from_visibility([np.ones((1, 1), bool), np.eye(1025, dtype=bool)]),
        ValueError,
        "request 1: expected at most 1024 draft tokens, got 1025",
    ),
    "mask blind to itself": (
        lambda: DraftTree.from_visibility([np.array([[True, False], [True, False]])]),
        ValueError,
        "request 0, row 1: no tree makes this mask; the row sees the tokens 0, expected token 1 .* Pass a mask that is not a tree to plan",
    ),
    "mask with a gap": (
        lambda: DraftTree.from_visibility([np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)]),
        ValueError,
        "row 2: .* sees the tokens 1, 2, expected token 2 and its ancestors",
    ),
    "mask that sees nothing": (lambda: DraftTree.from_visibility([np.zeros((2, 2), bool)]), ValueError, "row 0: .* sees the tokens none,"),
    "mask that sees all": (lambda: DraftTree.from_visibility([np.ones((2, 2), bool)]), ValueError, "row 0: .* sees the tokens 0, 1,"),
    "request of rows": (lambda: DraftTree.chain([1, 2]).rows(2), IndexError, r"expected a request of 0 \.\. 1 \(batch_size 2\), got 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_place_value_and_remedy(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()


TEXT_OF_FOUR = """\
1 request, 4 draft tokens   ■ sees   □ does not see

request 0: 4 draft tokens, depth 2
           0 1 2 3
0          ■ □ □ □
├─ 1       ■ ■ □ □
│  └─ 3    ■ ■ □ ■
└─ 2       ■ □ ■ □"""


def test_text_of_the_tree_of_four():
    assert str(DraftTree.from_lists([[-1, 0, 0, 1]])) == TEXT_OF_FOUR


def test_text_draws_equal_trees_once_and_caps_the_rest():
    text = str(DraftTree.from_lists([[-1, 0], [], [-1, 0], [-1, 0], [-1, -1]]))
    assert "requests 0, 2 .. 3: 2 draft tokens, depth 1" in text
    assert "request 1: no draft tokens" in text
    assert "request 4: 2 draft tokens, depth 0, 2 roots" in text
    assert str(DraftTree.chain(range(1, 20))).endswith("and 11 more trees")


def test_text_of_a_large_tree_is_cut_and_says_so():
    lines = str(published.load("sequoia-a100-cnn-68m-13b-stochastic-s512")).splitlines()
    assert len(lines) == 3 + 2 + 64 + 1
    assert lines[-1] == "(the first 64 of 512 draft tokens; to_svg(0) draws them all)"
    assert max(map(len, lines)) < 140
    # Node 0 hangs below node 69, which the cut leaves out.
    assert "0 (below 69)" in str(DraftTree.from_lists([[69, *[0] * 68, -1]]))


def test_text_of_a_deep_tree_stays_narrow():
    assert max(map(len, str(DraftTree.chain([64])).splitlines())) < 64 + 64


def test_repr_tells_the_sizes():
    assert repr(DraftTree.chain([2, 5])) == "<DraftTree: batch_size=2, num_nodes=7, largest=5, max_depth=4>"
    assert repr(DraftTree.from_lists([])) == "<DraftTree: batch_size=0, num_nodes=0, largest=0, max_depth=0>"


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", published.names())
def test_svg_is_well_formed_and_has_every_node(name):
    tree = published.load(name)
    root = ET.fromstring(tree.to_svg())
    hints = [circle.find(f"{SVG}title").text for circle in root.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    assert [int(hint.split()[1].rstrip(",")) for hint in hints] == list(range(tree.num_nodes))
    assert f"{tree.num_nodes} draft tokens" in root.find(f"{SVG}title").text
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


def test_svg_bars_cover_the_mask_exactly():
    tree = DraftTree.from_lists([[-1, 0, 0, 1]])
    root = ET.fromstring(tree.to_svg())
    hidden = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "hidden")
    left, top, cell = float(hidden.get("x")), float(hidden.get("y")), float(hidden.get("width")) / 4
    drawn = np.zeros((4, 4), bool)
    for path in root.iter(f"{SVG}path"):
        if path.get("class").startswith("nv-d"):
            for bar in path.get("d").split("z")[:-1]:
                start, tall = bar[1:].split("h")[0], float(bar.split("v")[1].split("h")[0])
                x, y = map(float, start.split())
                row, column = round((y - top) / cell), round((x - left) / cell)
                drawn[row : row + round(tall / cell), column] = True
    assert np.array_equal(drawn, tree.mask())


def test_svg_escapes_its_title_and_styles_only_itself():
    text = DraftTree.from_lists([[-1]]).to_svg(title="a < b & c")
    assert ET.fromstring(text).find(f"{SVG}title").text == "a < b & c"
    rules = ET.fromstring(text).find(f"{SVG}style").text.replace("@media (prefers-color-scheme:dark){", "")
    assert all(rule.strip(" }\n").startswith(".nv-tree ") for rule in rules.split("}") if rule.strip(" }\n"))


def test_svg_of_special_trees():
    for lists in ([[]], [[-1]], [[-1] * 200], [list(range(-1, 1023))]):
        ET.fromstring(DraftTree.from_lists(lists).to_svg())
    with pytest.raises(IndexError, match="expected a request"):
        DraftTree.from_lists([]).to_svg()


def test_pages_hold_one_picture_per_different_tree():
    tree = DraftTree.from_lists([[-1, 0], [-1], [-1, 0]])
    page = tree.to_html(title="Two <trees>")
    assert page.count("<svg") == 2
    assert "<title>Two &lt;trees&gt;</title>" in page
    assert "Requests 0, 2: 2 draft tokens" in page
    assert tree._repr_html_().count("<svg") == 2
    many = DraftTree.chain(range(1, 8))._repr_html_()
    assert many.count("<svg") == 4
    assert "and 3 more trees" in many
