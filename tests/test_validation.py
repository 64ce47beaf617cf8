"""validate=True: contents of device arrays are checked before any use, and the text names request, position and value.

Without it wrong contents give wrong results, but nothing hangs, and nothing is written outside out, lse and the plan's workspace.
"""

import functools
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import machine
from support.problems import bits_of
from support.small import HEADS, LATENT, ROWS, SLOTS, FencedWorkspace, Outputs, Small, bits, good_run, good_verify, small_for

from numba_verify import planner
from numba_verify.gpu import simulator
from numba_verify.gpu.simulator import SimulatorError

pytestmark = pytest.mark.kernel
both = pytest.mark.parametrize("name", list(machine.IMPLEMENTATIONS))
BIG = 2**31 - 1


def int32(*values):
    return np.array(values, np.int32)


def int64(*values):
    return np.array(values, np.int64)


# what is wrong: (arguments that replace those of the problem, keywords of Small, error, text). Step 0 is meant: qo 0 3 4, kv 0 6 9.
CONTENTS = {
    "qo_first": ({"qo_indptr": int32(1, 3, 4)}, {}, ValueError, r"^qo_indptr: expected 0 at position 0, got 1$"),
    "qo_negative": ({"qo_indptr": int32(-1, 3, 4)}, {}, ValueError, r"^qo_indptr: expected 0 at position 0, got -1$"),
    "qo_falls": ({"qo_indptr": int32(0, 4, 3)}, {}, ValueError,
                 r"^qo_indptr: request 1 ends at 3 \(position 2\), before it begins at 4$"),
    "qo_beyond": ({"qo_indptr": int64(0, 3, 2**40), "tree": Small().parents}, {}, IndexError,
                  r"^qo_indptr: request 1 ends at 1099511627776 \(position 2\), but there are \d+ rows \(max_total_q\)$"),
    "kv_first": ({"kv_indptr": int32(2, 6, 9)}, {}, ValueError, r"^kv_indptr: expected 0 at position 0, got 2$"),
    "kv_falls": ({"kv_indptr": int64(0, 6, 5)}, {}, ValueError, r"^kv_indptr: request 1 ends at 5 \(position 2\), before it begins at 6$"),
    "kv_beyond": ({"kv_indptr": int32(0, 6, 10)}, {}, IndexError,
                  r"^kv_indptr: request 1 ends at 10 \(position 2\), but there are 9 entries of kv_indices$"),
    "list_too_short": ({"kv_indptr": int32(0, 2, 5), "kv_lens": None}, {}, ValueError,
                       r"^kv_indptr: request 0 lists 2 tokens, fewer than its 3 draft tokens, which end the list$"),
    "lens_too_short": ({"kv_lens": int32(6, 0)}, {}, ValueError,
                       r"request 1 (lists|has) 0 tokens, fewer than its 1 draft tokens"),
    "lens_negative": ({"kv_lens": int32(6, -1)}, {}, ValueError, r"^kv_lens: request 1 has -1 tokens, its pages hold 3$"),
    "lens_too_long": ({"kv_lens": int64(2**40, 3)}, {}, ValueError, r"^kv_lens: request 0 has 1099511627776 tokens, its pages hold 6$"),
    "lens_beyond_pages": ({"kv_lens": int32(6, 5)}, {"page_size": 4}, ValueError, r"^kv_lens: request 1 has 5 tokens, its pages hold 4$"),
    "page_negative": ({"kv_indices": int32(0, 1, 2, 3, 4, 5, 6, -7, 8)}, {}, IndexError,
                      r"^kv_indices: request 1 has -7 at position 7; page numbers are not negative$"),
    "tree_borders": ({"qo_indptr": int32(0, 1, 4)}, {}, ValueError,
                     r"^tree: its qo_indptr has 3 at position 1, the argument qo_indptr has 1$"),
    "parent_beyond": ({"tree": int32(-1, 0, 3, -1)}, {}, IndexError,
                      r"request 0, node 2: expected a parent of -1 \(a root\) or 0 .. 2 \(an index within the request\), got 3"),
    "parent_negative": ({"tree": int32(-1, 0, -2, -1)}, {}, IndexError, r"request 0, node 2: expected a parent of -1 .*, got -2"),
    "parent_itself": ({"tree": int32(-1, 0, 0, 0)}, {}, ValueError,
                      r"request 1, node 0: the node is its own parent; give a root the parent -1"),
    "cycle": ({"tree": int32(-1, 2, 1, -1)}, {}, ValueError, r"request 0, node 1: the parents form a cycle, 1 -> 2 -> 1"),
    "parents_short": ({"tree": int32(-1, 0, 0)}, {}, ValueError, r"^tree: expected at least 4 rows \(qo_indptr\[-1\]\), got 3$"),
    "bits_short": ({"tree": np.zeros((3, 1), np.uint32)}, {}, ValueError, r"^tree: expected at least 4 rows \(qo_indptr\[-1\]\), got 3$"),
    "bits_narrow": ({"tree": np.zeros((4, 0), np.uint32)}, {}, ValueError,
                    r"^tree: expected at least 1 words a row for 3 draft tokens, got 0$"),
    "dense_narrow": ({"tree": np.ones((2, 2, 2), bool)}, {}, ValueError,
                     r"^tree: expected a mask \[bs, N, N\] with N >= 3, the most draft tokens of a request, got N = 2$"),
    "full_short": ({"tree": np.ones(20, bool)}, {}, ValueError, r"^tree: a full mask of these lengths has 21 entries, got 20$"),
}


def wrong(case):
    changes, base, error, text = CONTENTS[case]
    return changes, base | {"options": {"validate": True, "max_total_q": ROWS}}, error, text


@both
@pytest.mark.parametrize("case", CONTENTS)
def test_plan_and_verify_mla(name, case):
    module, (changes, base, error, text) = machine.IMPLEMENTATIONS[name], wrong(case)
    small = Small(**base)
    with pytest.raises(error, match=text):
        module.plan(**small.plan_arguments(**changes))
    outputs = Outputs(small)
    with pytest.raises(error, match=text):
        module.verify_mla(**small.verify_arguments(validate=True, out=outputs.out, lse=outputs.lse, **changes))
    outputs.check()
    good_run(module.plan(**small.plan_arguments()), small)
    good_verify(module, small, validate=True)


@both
@pytest.mark.parametrize("case", CONTENTS)
def test_update(name, case):
    """A refused update leaves the plan at the step before, bit for bit, and the next one works."""
    module, (changes, base, error, text) = machine.IMPLEMENTATIONS[name], wrong(case)
    other, small = Small(step=1, **base), Small(**base)
    plan = module.plan(**other.plan_arguments())
    before = good_run(plan, other)
    with pytest.raises(error, match=text):
        plan.update(**small.update_arguments(**changes))
    assert bits(good_run(plan, other)) == bits(before)
    plan.update(**small.update_arguments())
    good_run(plan, small)


@both
@pytest.mark.parametrize("tree", [None, "full_mask"])
def test_lengths_that_plan_reads_back(name, tree):
    """Without max_total_q a chain or a flat mask is sized by qo_indptr[-1]: a wrong one is named, not multiplied out and allocated."""
    module, small = machine.IMPLEMENTATIONS[name], Small()
    tree = np.ones(21, bool) if tree else None
    for last in (-4, BIG, 3 * 1024):
        with pytest.raises((ValueError, IndexError), match=rf"^qo_indptr: .*{last}"):
            module.plan(**small.plan_arguments(qo_indptr=int32(0, 3, last), tree=tree, validate=True))
    module.plan(**small.plan_arguments(tree=tree, validate=True))


@both
def test_too_many_draft_tokens(name):
    """1024 draft tokens a request are what is promised."""
    module, small = machine.IMPLEMENTATIONS[name], Small()
    many = {"qo_indptr": int32(0, 1025), "kv_indptr": int32(0, 1025), "kv_indices": np.zeros(1025, np.int32), "kv_lens": None, "tree": None}
    with pytest.raises(ValueError, match=r"^qo_indptr: request 0 has 1025 draft tokens, at most 1024 are supported$"):
        module.plan(**small.plan_arguments(**many, max_total_q=1025, validate=True))


@both
@pytest.mark.parametrize("page_size", [1, 4])
def test_pool_bounds(name, page_size):
    """`run` knows the pool: entries that are read must lie inside, entries past kv_lens and kv_indptr[-1] may hold anything."""
    module, small = machine.IMPLEMENTATIONS[name], Small(page_size=page_size, options={"validate": True})
    pages, position = SLOTS // page_size, int(small.kv_indptr[1])
    indices = np.append(small.kv_indices, int32(BIG))
    plan = module.plan(**small.plan_arguments(kv_indices=indices))
    good_run(plan, small)
    indices[position] = pages
    plan.update(**small.update_arguments(kv_indices=indices))
    outputs = Outputs(small)
    with pytest.raises(IndexError, match=rf"^kv_indices: request 1 has {pages} at position {position}, but kv_cache has {pages} pages$"):
        plan.run(**small.run_arguments(out=outputs.out, lse=outputs.lse))
    outputs.check()
    plan.update(**small.update_arguments())
    good_run(plan, small)


@both
@pytest.mark.parametrize("array", ["q", "out", "lse", "draft_kv"])
def test_rows(name, array):
    """With a tree of the device, only validate=True knows how many rows there must be."""
    module, small = machine.IMPLEMENTATIONS[name], Small(aside=array == "draft_kv", options={"validate": True})
    plan, outputs = module.plan(**small.plan_arguments(tree=small.parents)), Outputs(small)
    given = {"out": outputs.out, "lse": outputs.lse}
    short = {"q": small.q, "draft_kv": small.draft_kv, "out": np.zeros((ROWS, HEADS, LATENT), np.float32),
             "lse": np.zeros((ROWS, HEADS), np.float32)}
    with pytest.raises(ValueError, match=rf"^{array}: expected at least 4 rows \(qo_indptr\[-1\]\), got 3$"):
        plan.run(**small.run_arguments(**(given | {array: short[array][:3]})))
    outputs.check()
    good_run(plan, small)


@both
@pytest.mark.parametrize("value, on", [("1", True), ("true", True), ("YES", True), (" on ", True), ("0", False), ("", False),
                                       ("False", False), ("no", False), (" off ", False), (None, False)])
def test_environment(name, value, on, monkeypatch):
    """NUMBA_VERIFY_VALIDATE is the default of `validate`, asked at every call; the keyword wins."""
    if value is None:
        monkeypatch.delenv("NUMBA_VERIFY_VALIDATE", raising=False)
    else:
        monkeypatch.setenv("NUMBA_VERIFY_VALIDATE", value)
    module, small = machine.IMPLEMENTATIONS[name], Small()

    def refused(**options):
        try:
            module.plan(**small.plan_arguments(kv_indptr=int32(0, 6, 5), **options))
        except ValueError as error:
            return "kv_indptr: request 1 ends at 5" in str(error)
        return False

    assert refused() is on
    assert refused(validate=True) and not refused(validate=False)
    outputs = Outputs(small)
    if on:
        with pytest.raises(ValueError, match="^kv_indptr: request 1 ends at 5"):
            module.verify_mla(**small.verify_arguments(kv_indptr=int32(0, 6, 5), out=outputs.out, lse=outputs.lse))
        outputs.check()


@contextmanager
def time_limit(seconds):
    """A hang of the simulator fails its test. (On a GPU and in the host build the session's own limit has to do.)"""
    def stop(*_):
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def words(width=1):
    return bits_of(np.ones((ROWS, ROWS), bool), width)


# Contents that validate=True refuses, given without it. All memory that a clamped kernel may read is there, so a GPU survives them as well.
MALFORMED = {
    "qo_negative_first": {"qo_indptr": int32(-5, 3, 4)},
    "qo_positive_first": {"qo_indptr": int32(2, 3, 4)},
    "qo_falls": {"qo_indptr": int32(0, 4, 2)},
    "qo_huge": {"qo_indptr": int32(0, 3, BIG)},
    "qo_huge_wide": {"qo_indptr": int64(0, 2**62, -(2**62))},
    "qo_all_negative": {"qo_indptr": int32(-3, -2, -1)},
    "kv_huge": {"kv_indptr": int64(0, 2**40, 2**62)},
    "kv_lens_huge": {"kv_lens": int32(BIG, BIG)},
    "kv_lens_negative": {"kv_lens": int64(-(2**62), -1)},
    "list_too_short": {"kv_indptr": int32(0, 1, 2), "kv_lens": None},
    "cycle": {"tree": int32(1, 2, 0, 0, 0, 0)},
    "parents_outside": {"tree": int32(BIG, -7, 3, 1, 6, -BIG)},
}
# kv_indptr[-1] is less than what a request before it claims.
LISTS_THAT_OVERRUN = {"kv_falls": {"kv_indptr": int32(0, 9, 2)}, "kv_negative": {"kv_indptr": int32(-5, 6, -3)}}
FORMS = {"parents": int32(-1, 0, 0, -1, 0, 1), "bits": words(), "dense": np.ones((2, ROWS, ROWS), bool), "full_mask": np.ones(60, np.uint8),
         "causal": None}


def run_malformed(name, kernel, changes, monkeypatch, **options):
    """Plan and run without validation; every write stays inside out, lse and the workspace."""
    monkeypatch.setattr(FencedWorkspace, "made", [])
    monkeypatch.setattr(planner, "Workspace", FencedWorkspace)
    module, small = machine.IMPLEMENTATIONS[name], small_for(kernel, options={"max_total_q": ROWS, "validate": False, **options})
    small.kv_cache[:] = 1.0  # any entry may be read: a NaN would hide a row that was not written
    outputs = Outputs(small, written=None)
    try:
        with time_limit(60):
            plan = module.plan(**small.plan_arguments(**changes))
            plan.run(**small.run_arguments(out=outputs.out, lse=outputs.lse))
    finally:
        outputs.check()
        for fence in FencedWorkspace.made:
            fence.check()
    assert FencedWorkspace.made


@both
@pytest.mark.parametrize("kernel", machine.KERNELS)
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lengths(name, kernel, case, monkeypatch):
    run_malformed(name, kernel, {"tree": FORMS["parents"]} | MALFORMED[case], monkeypatch, deterministic=case in ("qo_falls", "kv_huge"))


def overrun(name):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kernel in machine.KERNELS:
            for changes in LISTS_THAT_OVERRUN.values():
                run_malformed(name, kernel, changes | {"tree": FORMS["parents"]}, monkeypatch)


@both
def test_lists_that_overrun_the_last_border(name):
    """`expand` fills slots up to kv_indptr[-1]; a request that claims more must not go where uninitialised workspace points.

    In a process of its own: where it does, that is a fault (host build, GPU), and the tests after this one would be its victims.
    """
    tests = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]; import test_validation; test_validation.overrun({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"


@both
@pytest.mark.parametrize("form", FORMS)
def test_malformed_lengths_with_each_tree_form(name, form, monkeypatch):
    """The simulator refuses negative indices here, which Python would take from the end."""
    monkeypatch.setattr(simulator, "launch", functools.partial(simulator.launch, check_races=True))
    for case in ("qo_positive_first", "qo_huge", "list_too_short"):
        run_malformed(name, "naive", MALFORMED[case] | {"tree": FORMS[form]}, monkeypatch)


@both
@pytest.mark.parametrize("kernel", machine.KERNELS)
def test_more_draft_tokens_than_promised(name, kernel, monkeypatch):
    """n > 1024 is cut to 1024: the visibility words of a row hold no more. q has fewer rows than that, and none beyond is touched."""
    many = {"qo_indptr": int32(0, 1100), "kv_indptr": int32(0, 9), "kv_lens": None, "tree": np.ones((1100, 35), np.uint32)}
    run_malformed(name, kernel, many, monkeypatch, max_total_q=1100)


@both
@pytest.mark.parametrize("kernel", machine.KERNELS)
def test_fewer_rows_than_the_step_has(name, kernel, monkeypatch):
    """qo_indptr[-1] = 6, but q, out and lse have 3, 2 and 5 rows: the rows that all have are written."""
    monkeypatch.setattr(planner, "Workspace", FencedWorkspace)
    module = machine.IMPLEMENTATIONS[name]
    small = small_for(kernel, options={"max_total_q": ROWS})
    plan = module.plan(**small.plan_arguments(qo_indptr=int32(0, 3, 6), tree=FORMS["parents"]))
    for q, out, lse in ((3, 6, 6), (6, 2, 6), (6, 6, 1)):
        outs, lses = Outputs(small, min(q, out, lse), out), Outputs(small, min(q, out, lse), lse)
        plan.run(**small.run_arguments(q=small.q[:q], out=outs.out, lse=lses.lse))
        written, _ = outs.check()
        assert np.isfinite(written[:min(q, out, lse)].astype(np.float32)).all()
        lses.check()


@pytest.mark.skipif(machine.HAS_GPU, reason="a page outside the pool is a fault there, which ends the process's use of the GPU")
@pytest.mark.parametrize("kernel", machine.KERNELS)
@pytest.mark.parametrize("page", [SLOTS, BIG, -1, -BIG])
def test_pages_outside_the_pool(kernel, page, monkeypatch):
    """The simulator reports the stray read; nothing is written where it must not be."""
    indices = Small().kv_indices.copy()
    indices[2] = page
    with pytest.raises(SimulatorError, match="out of bounds|outside|index"):
        run_malformed("numba_verify", kernel, {"kv_indices": indices}, monkeypatch)


def test_the_fence_itself():
    """A stand-in for the workspace that lost track of a write would prove nothing."""
    fence = FencedWorkspace(64, None)
    fence.host[:] = 0
    fence.check()
    raw = np.ndarray(1, np.uint8, fence._guard.backing, fence._guard.offset - 1)
    raw ^= 1
    with pytest.raises(AssertionError, match="workspace: 1 bytes changed .* 1 B before the array"):
        fence.check()
