"""What `Plan.run` refuses: shapes, dtypes, strides, alignment, draft rows missing or superfluous, scalars, too few rows for the tree.

After every refusal out and lse hold the bytes they held, and the next good run of the same plan is right.
"""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support import machine
from support.small import DIMS, HEADS, KERNEL, LATENT, ROPE, ROWS, SLOTS, Outputs, Small, bits, good_run, good_verify, place

from numba_verify import DraftTree

pytestmark = pytest.mark.kernel
both = pytest.mark.parametrize("name", list(machine.IMPLEMENTATIONS))


class Refusals:
    """One plan, to be called wrongly again and again."""

    def __init__(self, name, **base):
        self.small = Small(**base)
        self.plan = machine.IMPLEMENTATIONS[name].plan(**self.small.plan_arguments())
        self.before = bits(good_run(self.plan, self.small))

    def __call__(self, error, text, **changes):
        outputs = Outputs(self.small)
        with pytest.raises(error, match=text):
            self.plan.run(**self.small.run_arguments(**({"out": outputs.out, "lse": outputs.lse} | changes)))
        outputs.check()
        assert bits(good_run(self.plan, self.small)) == self.before


def values(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def off_by_one_element(shape, dtype=np.float32):
    """An array whose first element is not on a 16 B boundary, while all its strides are multiples of 16 B."""
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 32, np.uint8)
    return np.ndarray(shape, dtype, raw, -raw.ctypes.data % 16 + np.dtype(dtype).itemsize)


# name of the array: its good shape, the shapes to be refused, and how the refusal describes what it expected
SHAPES = {
    "q": ((ROWS, HEADS, DIMS), [(ROWS, DIMS), (ROWS, HEADS + 1, DIMS), (ROWS, HEADS, DIMS - 1), (1, ROWS, HEADS, DIMS)],
          r"\[rows, 2, 64\]"),
    "kv_cache": ((SLOTS, DIMS), [(SLOTS * DIMS,), (SLOTS, 2, DIMS), (SLOTS, DIMS + 1), (SLOTS, 1, 2, DIMS), (SLOTS, 1, 1, 1, DIMS)],
                 r"\[slots, D\] or \[slots, 1, D\] with D = 64 for page_size=1"),
    "draft_kv": ((ROWS, DIMS), [(ROWS,), (ROWS, LATENT), (ROWS, 1, DIMS)], r"\[rows, 64\]"),
    "out": ((ROWS, HEADS, LATENT), [(ROWS, LATENT), (ROWS, HEADS + 1, LATENT), (ROWS, HEADS, DIMS)], r"\[rows, 2, 32\]"),
    "lse": ((ROWS, HEADS), [(ROWS,), (ROWS, HEADS + 1), (ROWS, HEADS, 1)], r"\[rows, 2\]"),
}
ARRAYS = list(SHAPES)


def base_of(array):
    return {"aside": array == "draft_kv"}


@both
@pytest.mark.parametrize("array", ARRAYS)
def test_shapes(name, array):
    refuses = Refusals(name, **base_of(array))
    _, wrong, expected = SHAPES[array]
    for shape in wrong:
        came = r"\[" + ", ".join(map(str, shape)) + r"\]"
        refuses(ValueError, rf"^{array}: expected (shape )?{expected}, got {came}", **{array: values(*shape)})


@both
def test_paged_shapes(name):
    refuses = Refusals(name, page_size=4)
    expected = r"kv_cache: expected \[pages, 4, D\] or \[pages, 4, 1, D\] with D = 64 for page_size=4, got "
    for shape in ((SLOTS, DIMS), (6, 8, DIMS), (6, 4, 2, DIMS), (6, 4, LATENT), (6, 1, 4, DIMS)):
        refuses(ValueError, expected, kv_cache=values(*shape))


@both
@pytest.mark.parametrize("array", ARRAYS)
def test_dtypes(name, array):
    refuses = Refusals(name, **base_of(array))
    shape = SHAPES[array][0]
    refuses(TypeError, rf"^{array}: expected float32.*, got float16", **{array: values(*shape, dtype=np.float16)})
    refuses(TypeError, rf"^{array}: expected a NumPy, torch, CuPy, numba or JAX array .*, got list", **{array: [[0.0]]})
    refuses(TypeError, rf"^{array}: dtype (float64|<f8) has no use here; expected one of bfloat16,",
            **{array: values(*shape, dtype=np.float64)})


@both
@pytest.mark.parametrize("array", ["q", "kv_cache", "draft_kv", "out"])
def test_strides(name, array):
    refuses = Refusals(name, **base_of(array))
    shape = SHAPES[array][0]
    wide = shape[:-1] + (2 * shape[-1],)
    refuses(ValueError, rf"^{array}: expected a contiguous last dimension, got strides .* elements for shape",
            **{array: values(*wide)[..., ::2]})
    gap = values(*shape[:-1], shape[-1] + 1)[..., :-1]  # one element between rows
    refuses(ValueError, rf"^{array}: expected strides in multiples of 16 B and not negative, got {gap.strides[0]} B \(strides ",
            **{array: gap})
    refuses(ValueError, rf"^{array}: expected strides in multiples of 16 B and not negative, got -\d+ B", **{array: values(*shape)[::-1]})


@both
def test_rows_of_out_that_overlap(name):
    """Two rows in one place: whoever writes last would win."""
    refuses, out = Refusals(name), values(*SHAPES["out"][0])
    overlapping = as_strided(out, strides=(0, *out.strides[1:]))
    refuses(ValueError, r"^out: expected strides that are not 0, got \(0, .*\) for shape .*: its rows overlap", out=overlapping)
    assert not out.any()


@both
@pytest.mark.parametrize("array", ["q", "kv_cache", "draft_kv", "out"])
def test_alignment(name, array):
    refuses = Refusals(name, **base_of(array))
    refuses(ValueError, rf"^{array}: expected 16 B alignment, got address 0x[0-9a-f]+4; a slice that starts off a 16 B boundary",
            **{array: off_by_one_element(SHAPES[array][0])})


@both
def test_lse_layout(name):
    refuses = Refusals(name)
    refuses(ValueError, r"^lse: expected a contiguous array, got strides \(4, 1\) for shape \(6, 2\); make it contiguous",
            lse=values(ROWS, 2 * HEADS)[:, :HEADS])
    refuses(ValueError, r"^lse\b.*(align|multiple of)", lse=np.ndarray((ROWS, HEADS), np.float32, np.zeros(256, np.uint8), 2))


@both
@pytest.mark.skipif(machine.HAS_GPU, reason="device arrays of the test suite know no read-only flag")
@pytest.mark.parametrize("array", ["out", "lse"])
def test_read_only_outputs(name, array):
    refuses = Refusals(name)
    frozen = values(*SHAPES[array][0])
    frozen.flags.writeable = False
    refuses(ValueError, rf"^{array}: .*(writable|writeable|read-only)", **{array: frozen})
    assert not frozen.any()


@both
def test_strides_of_dimensions_of_size_one_are_ignored(name):
    """A row, a head, a page of size 1: its stride is never used, so it may be anything at all (cuDNN's and torch's arrays have such)."""
    module = machine.IMPLEMENTATIONS[name]
    tree, rng = DraftTree.from_lists([[-1]]), np.random.default_rng(3)
    q, row = rng.standard_normal((1, 1, DIMS)).astype(np.float32), rng.standard_normal((1, DIMS)).astype(np.float32)
    index = {"qo_indptr": np.array([0, 1], np.int32), "kv_indptr": np.array([0, 1], np.int32), "kv_indices": np.zeros(1, np.int32)}
    options = {"tree": tree, "sm_scale": 1.0, "latent_dim": LATENT, "kernel": KERNEL, "return_lse": True}
    index = {key: place(a) for key, a in index.items()}
    plain = module.verify_mla(q=place(q), kv_cache=place(row), **index, **options)
    odd_q, odd_pool = as_strided(q, strides=(12, 20, 4)), as_strided(row[:, None, None], strides=(4, 28, 4, 4))
    odd = module.verify_mla(q=place(odd_q), kv_cache=place(odd_pool), **index, **options)
    index["kv_indptr"] = place(np.zeros(2, np.int32))
    aside = module.verify_mla(q=place(as_strided(q, strides=(-4, 0, 4))), kv_cache=place(as_strided(row, strides=(36, 4))),
                              draft_kv=place(as_strided(row, strides=(44, 4))), **index, **options)
    plain, odd, aside = ([machine.fetch(a) for a in result] for result in (plain, odd, aside))
    np.testing.assert_allclose(plain[0][0, 0], row[0, :LATENT], rtol=1e-6)
    assert bits(plain) == bits(odd) == bits(aside)


@both
def test_draft_rows(name):
    Refusals(name)(ValueError, r"^draft_kv: the plan was made with draft_in_cache=True, so the KV list ends with the draft tokens; "
                               r"plan with draft_in_cache=False to pass draft_kv", draft_kv=values(ROWS, DIMS))
    Refusals(name, aside=True)(ValueError, r"^draft_kv: the plan was made with draft_in_cache=False and needs it; "
                                           r"pass draft_kv or plan with draft_in_cache=True", draft_kv=None)


@both
@pytest.mark.parametrize("scalar", ["sm_scale", "logit_cap"])
def test_scalars(name, scalar):
    refuses = Refusals(name)
    for value in ("0.1", None, True, 1j, [0.1]):
        refuses(TypeError, rf"^{scalar}: expected a number, got {type(value).__name__}", **{scalar: value})
    for value in (float("nan"), float("inf"), -float("inf"), np.float32("nan")):
        refuses(ValueError, rf"^{scalar}: expected a finite number, got {float(value)}", **{scalar: value})


@both
@pytest.mark.parametrize("scalar", ["sm_scale", "logit_cap"])
def test_numpy_booleans_are_no_numbers(name, scalar):
    refuses = Refusals(name)
    refuses(TypeError, rf"^{scalar}: expected a number, got {type(np.True_).__name__}", **{scalar: np.True_})


@both
@pytest.mark.parametrize("scalar", ["sm_scale", "logit_cap"])
@pytest.mark.parametrize("value", [1e39, 10**400], ids=["1e39", "10**400"])
def test_scalars_beyond_float32(name, scalar, value):
    """Finite for Python, infinite in the float32 that kernels get: every result would be NaN, and nobody would say why."""
    refuses = Refusals(name)
    refuses(ValueError, rf"^{scalar}: expected a finite number", **{scalar: value})


@both
def test_logit_cap_is_not_negative(name):
    refuses = Refusals(name)
    refuses(ValueError, r"^logit_cap: expected 0 \(off\) or a positive number, got -0.5", logit_cap=-0.5)


@both
@pytest.mark.parametrize("array", ["q", "out", "lse"])
def test_rows_for_the_planned_tree(name, array):
    """A DraftTree is known to the host, so rows that are missing are seen before a kernel runs; padding is not asked for."""
    refuses = Refusals(name)
    shape = SHAPES[array][0]
    refuses(ValueError, rf"^{array}: expected at least 4 rows, one a node of the planned tree, got 3", **{array: values(3, *shape[1:])})
    small = Small()
    plan = machine.IMPLEMENTATIONS[name].plan(**small.plan_arguments())
    out, lse = plan.run(**small.run_arguments(q=small.q[:4], return_lse=True))
    small.check(machine.fetch(out), machine.fetch(lse))


@both
def test_rows_follow_an_update(name):
    """The rows of the tree now planned count, not those of the one before; after an update from parents only the device knows them."""
    module, small = machine.IMPLEMENTATIONS[name], Small()
    plan = module.plan(**small.plan_arguments())
    one = {"qo_indptr": np.array([0, 1], np.int32), "kv_indptr": np.array([0, 2], np.int32), "kv_lens": None}
    plan.update(**small.update_arguments(**one, tree=DraftTree.from_lists([[-1]])))
    plan.run(**small.run_arguments(q=small.q[:1]))
    plan.update(**small.update_arguments(tree=small.parents))
    plan.run(**small.run_arguments(q=small.q[:1]))
    good_run(plan, small)


@both
def test_rows_of_draft_kv_for_the_planned_tree(name):
    refuses = Refusals(name, aside=True)
    refuses(ValueError, r"^draft_kv: expected at least 4 rows", draft_kv=values(3, DIMS))


@both
def test_stream(name):
    refuses = Refusals(name)
    for wrong in ("default", 1.5, True, object()):
        refuses(TypeError, rf"^stream: expected an int handle or a torch, CuPy, numba or cuda.core stream, got {type(wrong).__name__}",
                stream=wrong)


@both
def test_dims_of_the_plan_are_those_of_run(name):
    """A plan for other dims does not take these arrays."""
    small = Small()
    plan = machine.IMPLEMENTATIONS[name].plan(**small.plan_arguments(rope_dim=0))
    outputs = Outputs(small)
    with pytest.raises(ValueError, match=rf"^q: expected shape \[rows, {HEADS}, {LATENT}\], got \[{ROWS}, {HEADS}, {LATENT + ROPE}\]"):
        plan.run(**small.run_arguments(out=outputs.out, lse=outputs.lse))
    outputs.check()


@both
def test_verify_mla_refuses_like_run(name):
    """One refusal of each kind through verify_mla: the plan it keeps is as good as before."""
    module, small = machine.IMPLEMENTATIONS[name], Small()
    before = good_verify(module, small)
    for changes, error in (({"kv_cache": values(SLOTS, 2, DIMS)}, ValueError),
                           ({"kv_cache": off_by_one_element((SLOTS, DIMS))}, ValueError),
                           ({"kv_cache": values(SLOTS, DIMS + 1)[:, :-1]}, ValueError), ({"draft_kv": values(ROWS, LATENT)}, ValueError),
                           ({"sm_scale": "1"}, TypeError), ({"q": small.q[:3]}, ValueError)):
        outputs = Outputs(small)
        with pytest.raises(error):
            module.verify_mla(**small.verify_arguments(**({"out": outputs.out, "lse": outputs.lse} | changes)))
        outputs.check()
        assert bits(good_verify(module, small)) == bits(before)


class Exported:
    """An object with the CUDA array interface and nothing behind it: what is refused is refused by the description alone."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"version": 3, "shape": (ROWS, HEADS, DIMS), "typestr": "<f4", "data": (0, False)} | interface


@both
def test_array_interface(name):
    small = Small()
    plan = machine.IMPLEMENTATIONS[name].plan(**small.plan_arguments())
    for interface, error, text in (({"mask": object()}, TypeError, r"^q: masked arrays are not supported; fill the array and pass its"),
                                   ({"typestr": ">f4"}, TypeError, r"^q: dtype >f4 has no use here; expected one of"),
                                   ({"strides": (512, 256, 6)}, ValueError, r"^q: a stride of 6 B is no multiple of its 4 B elements;")):
        outputs = Outputs(small)
        with pytest.raises(error, match=text):
            plan.run(**small.run_arguments(q=Exported(**interface), out=outputs.out, lse=outputs.lse))
        outputs.check()
    packed = np.zeros(ROWS * HEADS * DIMS, [("a", np.float32), ("b", np.uint8)])["a"].reshape(ROWS, HEADS, DIMS)
    with pytest.raises(ValueError, match=r"^q: a stride of \d+ B is no multiple of its 4 B elements; make it contiguous"):
        plan.run(**(small.run_arguments() | {"q": packed}))
    good_run(plan, small)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("array", ARRAYS)
def test_devices_that_differ(name, array):
    module, small = machine.IMPLEMENTATIONS[name], Small(**base_of(array))
    plan, outputs = module.plan(**small.plan_arguments()), Outputs(small)
    given = small.run_arguments(out=outputs.out, lse=outputs.lse) | {array: values(*SHAPES[array][0])}
    with pytest.raises(ValueError, match=rf"^{array}: expected on cuda:0 like the index arrays of the plan, got the host; move one of"):
        plan.run(**given)
    outputs.check()
    good_run(plan, small)
