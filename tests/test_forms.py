"""Every form in which arguments may come: layouts of the pool, strided views, trees, index widths, libraries, outputs given or not.

What only differs in form gives the same bits. Kernels: naive, and paged and mma with deterministic=True, whose bits are promised to depend
on nothing but the request.
"""

import gc
import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest
from support import machine
from support.problems import bits_of
from support.small import (
    HEADS,
    LATENT,
    PLAN_NAMES,
    ROWS,
    FencedWorkspace,
    Outputs,
    Small,
    bits,
    good_run,
    good_verify,
    place,
    place_all,
    small_for,
)

from numba_verify import planner
from numba_verify.arrays import NUMPY_DTYPE
from numba_verify.gpu import driver

pytestmark = pytest.mark.kernel
both = pytest.mark.parametrize("name", list(machine.IMPLEMENTATIONS))
KERNELS = {"naive": {}, "paged": {"deterministic": True}, "mma": {"deterministic": True}, "wgmma": {"deterministic": True}}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
#: Arrays of the host are simulated even on a GPU machine, but the C library may have no host build there.
host_implementations = pytest.mark.parametrize("name", ["numba_verify"] if machine.HAS_GPU else list(machine.IMPLEMENTATIONS))


def result(name, kernel, small, **changes):
    """Bits of out and lse of the draft tokens, checked to be right."""
    return bits(good_verify(machine.IMPLEMENTATIONS[name], small, kernel=kernel, **KERNELS[kernel], **changes))


def inside(array, *gaps):
    """The same numbers as a strided view of a larger array of NaN; gaps: elements more a dimension, in the last one times 4 bytes."""
    gaps = (*gaps[:-1], gaps[-1] * 4 // array.itemsize)
    whole = np.full([n + gap for n, gap in zip(array.shape, gaps, strict=True)], np.nan, array.dtype)
    part = whole[tuple(slice(n) for n in array.shape)]
    part[...] = array
    return part


@both
@each_kernel
def test_pool_forms(name, kernel):
    """Contract section 2: four shapes, each dense and with gaps between rows, tokens and pages."""
    small = small_for(kernel)
    plain = result(name, kernel, small)
    slots = small.kv_cache[:, 0]
    for pool in (slots, inside(slots, 0, 4), inside(small.kv_cache, 0, 0, 8), inside(small.kv_cache, 0, 2, 0), inside(slots, 3, 0)):
        assert result(name, kernel, small, kv_cache=pool) == plain, (pool.shape, pool.strides)
    for page_size in (2, 4):
        paged = small_for(kernel, page_size=page_size)
        pools = [paged.kv_cache, inside(paged.kv_cache, 0, 1, 0), inside(paged.kv_cache, 0, 3, 4)]
        pools += [pool[:, :, None] for pool in pools] + [inside(paged.kv_cache[:, :, None], 0, 0, 1, 4)]
        pools.append(np.ascontiguousarray(paged.kv_cache.transpose(1, 0, 2)).transpose(1, 0, 2))  # token-major: pages interleaved
        for pool in pools:
            assert result(name, kernel, paged, kv_cache=pool) == plain, (pool.shape, pool.strides)


@both
@each_kernel
def test_strided_queries_and_draft_rows(name, kernel):
    small, aside = small_for(kernel), small_for(kernel, aside=True)
    plain = result(name, kernel, small)
    head_major = np.ascontiguousarray(small.q.transpose(1, 0, 2)).transpose(1, 0, 2)
    for q in (inside(small.q, 0, 0, 4), inside(small.q, 0, 3, 0), inside(small.q, 2, 1, 8), head_major):
        assert result(name, kernel, small, q=q) == plain, q.strides
    for draft in (aside.draft_kv, inside(aside.draft_kv, 0, 4), inside(aside.draft_kv, 5, 0)):
        assert result(name, kernel, aside, draft_kv=draft) == plain, draft.strides


@both
@each_kernel
@pytest.mark.parametrize("layout", ["gaps", "head_major"])
def test_strided_out(name, kernel, layout):
    """Written through its strides: the rows of the draft tokens, not the padding, not the gaps."""
    small, module = small_for(kernel), machine.IMPLEMENTATIONS[name]
    width, dtype = small.latent, small.q.dtype
    whole = np.full((HEADS, ROWS, 2 * width) if layout == "head_major" else (ROWS, HEADS + 1, 2 * width), 7, dtype)
    out = whole.transpose(1, 0, 2)[..., :width] if layout == "head_major" else whole[:, :HEADS, :width]
    placed = place(out)
    before = raw_values(placed, whole)
    module.verify_mla(**(small.verify_arguments(kernel=kernel, **KERNELS[kernel]) | {"out": placed}))
    if machine.HAS_GPU:
        offset = placed.__cuda_array_interface__["data"][0] - placed.buffer.address
        out = np.ndarray(out.shape, out.dtype, placed.bytes_back(), offset, out.strides)
    small.check(out, None)
    assert np.count_nonzero(raw_values(placed, whole) != before) == small.total_q * HEADS * width


def raw_values(placed, whole):
    """All memory around an output as it is now."""
    return placed.bytes_back().view(whole.dtype) if machine.HAS_GPU else whole.reshape(-1).copy()


@both
@each_kernel
def test_tree_forms(name, kernel):
    """A DraftTree, parents, bits of any width and sign, dense masks and flat ones, with junk wherever it may stand."""
    small, rng = small_for(kernel), np.random.default_rng(5)
    plain, masks = result(name, kernel, small), small.masks()
    junk_rows = np.full(ROWS, 12345, np.int32)
    junk_rows[:small.total_q] = small.parents
    bit_rows = np.full((ROWS, 3), 0xFFFFFFFF, np.uint32)
    dense = rng.random((3, 5, 5)) < 0.5
    for r, mask in enumerate(masks):
        n = len(mask)
        bit_rows[small.qo_indptr[r]:small.qo_indptr[r + 1]] = bits_of(np.pad(mask, ((0, 0), (0, 96 - n)), constant_values=True), 3)
        dense[r, :n, :n] = mask
    flat = np.concatenate([np.pad(m, ((0, 0), (p, 0))).ravel() for m, p in zip(masks, small.prefix, strict=True)])
    narrow = np.ascontiguousarray(bits_of(np.concatenate([np.pad(m, ((0, 0), (0, 32 - len(m)))) for m in masks]), 1))
    forms = [small.parents, junk_rows, bit_rows, bit_rows.view(np.int32), narrow, dense, dense.view(np.uint8), dense * np.uint8(200), flat,
             flat.view(np.uint8), np.append(flat, rng.random(9) < 0.5)]
    for tree in forms:
        assert result(name, kernel, small, tree=tree) == plain, (tree.dtype, tree.shape)


@both
@each_kernel
def test_no_tree_is_a_chain(name, kernel):
    small = small_for(kernel, step=1)
    chain = [np.tril(np.ones((n, n), bool)) for n in small.counts]
    narrow = bits_of(np.concatenate([np.pad(m, ((0, 0), (0, 32 - len(m)))) for m in chain]), 1)
    small.masks = lambda: chain
    assert result(name, kernel, small, tree=None) == result(name, kernel, small, tree=narrow)


@both
@each_kernel
def test_index_widths(name, kernel):
    small = small_for(kernel, page_size=4)
    plain = result(name, kernel, small)
    arrays = ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens")
    for wide in [(a,) for a in arrays] + [arrays]:
        assert result(name, kernel, small, **{a: getattr(small, a).astype(np.int64) for a in wide}) == plain, wide


@both
@each_kernel
def test_page_sizes_and_draft_place(name, kernel):
    """Page sizes 1, 4 and 16, draft rows in the cache and aside, kv_lens given or not (page size 1): one result, bit for bit."""
    plain = result(name, kernel, small_for(kernel))
    for page_size in (1, 4, 16):
        for aside in (False, True):
            assert result(name, kernel, small_for(kernel, page_size=page_size, aside=aside)) == plain, (page_size, aside)
    assert result(name, kernel, small_for(kernel), kv_lens=None) == plain
    assert result(name, kernel, small_for(kernel, aside=True), kv_lens=None) == plain


@both
@each_kernel
def test_entries_beyond_the_lists_are_ignored(name, kernel):
    """Junk after kv_indptr[-1], entries of a request beyond its kv_lens, one page listed twice."""
    small = small_for(kernel, page_size=4)
    plain = result(name, kernel, small)
    assert result(name, kernel, small, kv_indices=np.append(small.kv_indices, np.full(5, 2_000_000_000, np.int32))) == plain
    longer = np.insert(small.kv_indices, small.kv_indptr[1], 1_000_000_000)
    assert result(name, kernel, small, kv_indices=longer, kv_indptr=small.kv_indptr + np.array([0, 1, 1], np.int32)) == plain
    shared = small_for(kernel)
    shared.keys[1] = np.concatenate([shared.keys[0][:2], shared.keys[1][2:]])
    indices = shared.kv_indices.copy()
    indices[shared.kv_indptr[1]:shared.kv_indptr[1] + 2] = indices[:2]
    result(name, kernel, shared, kv_indices=indices)


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_given_or_not(name, dtype):
    module, small = machine.IMPLEMENTATIONS[name], Small(dtype=dtype)
    plan = module.plan(**small.plan_arguments())
    for call, arguments in ((plan.run, small.run_arguments), (module.verify_mla, small.verify_arguments)):
        outputs = Outputs(small, small.total_q)
        assert call(**arguments(out=outputs.out)) is outputs.out
        plain = outputs.check()[0][:small.total_q].tobytes()
        out, lse = call(**arguments(out=outputs.out, lse=outputs.lse))
        assert out is outputs.out and lse is outputs.lse
        both_given = bits([a[:small.total_q] for a in outputs.check()])
        assert both_given[0] == plain
        outputs = Outputs(small, small.total_q)
        out, lse = call(**arguments(lse=outputs.lse))
        assert lse is outputs.lse and bits([new(out, dtype), outputs.check()[1][:small.total_q]]) == both_given
        assert new(call(**arguments()), dtype).tobytes() == plain
        out, lse = call(**arguments(return_lse=True))
        assert bits([new(out, dtype), new(lse, "float32")]) == both_given


def new(array, dtype):
    """Rows of the draft tokens of a new output, which has as many rows as q."""
    host = machine.fetch(array)
    assert host.shape[:2] == (ROWS, HEADS) and host.dtype.itemsize == NUMPY_DTYPE[dtype].itemsize
    if not machine.HAS_GPU:
        assert type(array) is np.ndarray and array.dtype == NUMPY_DTYPE[dtype]
    return host[:4]


@both
@each_kernel
def test_update_within_capacities(name, kernel):
    """Other sizes, trees and forms one after the other on one plan give the bits of fresh plans; nothing of a longer step stays behind."""
    module = machine.IMPLEMENTATIONS[name]
    options = {"max_batch": 5, "max_total_q": 9, "max_kv_entries": 31, **KERNELS[kernel]}
    steps = [small_for(kernel, step=step, options=options) for step in (0, 1, 0)]
    fresh = [bits(good_run(module.plan(**small.plan_arguments()), small)) for small in steps]
    plan = module.plan(**steps[0].plan_arguments())
    for small, expected in zip(steps, fresh, strict=True):
        plan.update(**small.update_arguments(tree=small.parents))
        for _ in range(2):
            assert bits(good_run(plan, small)) == expected
        empty = Outputs(small, 0)
        plan.update(**place_all({name: np.zeros(size, np.int32) for name, size in zip(PLAN_NAMES[:3], (1, 1, 0), strict=True)}))
        plan.run(**small.run_arguments(out=empty.out, lse=empty.lse))
        empty.check()
        plan.update(**small.update_arguments())
        assert bits(good_run(plan, small)) == expected


@both
@pytest.mark.parametrize("kernel", machine.KERNELS)
def test_workspace(name, kernel, monkeypatch):
    """workspace_bytes is what is allocated; it is enough, whatever it held before; update and run allocate no more."""
    monkeypatch.setattr(FencedWorkspace, "made", [])
    monkeypatch.setattr(planner, "Workspace", FencedWorkspace)
    for deterministic in (False, True):
        FencedWorkspace.made.clear()
        small = small_for(kernel, options={"deterministic": deterministic, "max_batch": 7, "max_total_q": 40})
        plan = machine.IMPLEMENTATIONS[name].plan(**small.plan_arguments())
        uploads = 4 * 40 * 2 if machine.HAS_GPU else 0  # a host DraftTree's bits: 40 rows of 2 words
        assert plan.workspace_bytes == sum(made.nbytes for made in FencedWorkspace.made) + uploads > uploads
        count = len(FencedWorkspace.made)
        good_run(plan, small)
        plan.update(**small.update_arguments())
        good_run(plan, small)
        assert len(FencedWorkspace.made) == count
        for made in FencedWorkspace.made:
            made.check()


@pytest.mark.gpu
@both
@pytest.mark.parametrize("kernel", machine.SPLITTING)
def test_device_memory_of_a_plan(name, kernel, monkeypatch):
    """On a GPU: every byte that `plan` takes from the driver is in workspace_bytes."""
    small, taken, take = small_for(kernel), [], driver.DeviceBuffer.__init__
    arguments = small.plan_arguments()
    monkeypatch.setattr(driver.DeviceBuffer, "__init__", lambda self, nbytes, ordinal: taken.append(nbytes) or take(self, nbytes, ordinal))
    plan = machine.IMPLEMENTATIONS[name].plan(**arguments)
    assert sum(taken) == plan.workspace_bytes


@host_implementations
@pytest.mark.parametrize("kernel, tree", [
    *itertools.product(("reference", "naive"), ("parents", "bits", "dense", "full_mask", "tree", "none")),
    ("flash", "bits"), ("paged", "parents"), ("mma", "bits")])
def test_plan_keeps_no_array_of_the_caller(name, kernel, tree):
    """Index arrays may be overwritten or dropped right after `plan` and `update`: the plan has its own copies."""
    small, module = small_for(kernel), machine.IMPLEMENTATIONS[name]
    forms = {"parents": small.parents, "tree": small.tree, "none": None, "bits": small.tree.visibility.copy(),
             "dense": np.stack([np.pad(m, ((0, 3 - len(m)), (0, 3 - len(m)))) for m in small.masks()]), "full_mask": np.ones(21, bool)}
    arguments = {key: getattr(small, key).copy() for key in PLAN_NAMES if key != "tree"} | {"tree": forms[tree]}
    own = [a for a in arguments.values() if isinstance(a, np.ndarray)]
    options = {key: value for key, value in small.plan_arguments().items() if key not in PLAN_NAMES}
    run = {"q": small.q, "kv_cache": small.kv_cache, "sm_scale": 0.125}
    plan = module.plan(**arguments, **options)
    before = plan.run(**run)[:4].tobytes()
    kept = [weakref.ref(a) for a in own]
    for array in own:
        array[...] = 1
    assert plan.run(**run)[:4].tobytes() == before
    del arguments, own, array, forms
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert plan.run(**run)[:4].tobytes() == before


class DLPackOnly:
    """An array of a library nobody has heard of: DLPack is all it speaks."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@host_implementations
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dlpack(name, dtype):
    """In and, for given outputs, out. (NumPy exports no bfloat16 by DLPack, so there is none to try here.)"""
    module, small = machine.IMPLEMENTATIONS[name], Small(dtype=dtype)
    arrays = {key: getattr(small, key) for key in PLAN_NAMES[:3] + ("kv_lens", "q", "kv_cache")} | {"tree": small.parents}
    arrays |= {"out": np.full((ROWS, HEADS, LATENT), 7, small.q.dtype), "lse": np.full((ROWS, HEADS), 7, np.float32)}
    wrapped = {key: DLPackOnly(a) for key, a in arrays.items()}
    options = {"sm_scale": 0.125, "latent_dim": LATENT, "kernel": "naive"}
    out, lse = module.verify_mla(**wrapped, **options)
    assert out is wrapped["out"] and lse is wrapped["lse"]
    small.check(arrays["out"], arrays["lse"])
    assert (arrays["out"][small.total_q:] == 7).all() and (arrays["lse"][small.total_q:] == 7).all()
    del wrapped["out"], wrapped["lse"]
    new_out, new_lse = module.verify_mla(**wrapped, **options, return_lse=True)
    assert bits([new_out[:4], new_lse[:4]]) == bits([arrays["out"][:4], arrays["lse"][:4]])


@host_implementations
def test_dlpack_export_that_is_refused(name):
    """NumPy exports no bfloat16: the error names the argument and says what to pass."""
    small = Small(dtype="bfloat16")
    host = {key: getattr(small, key) for key in PLAN_NAMES}
    with pytest.raises(TypeError, match=r"^q: its DLPack export was refused \(.+\); pass a torch, CuPy, numba or JAX array|^q: .*NumPy"):
        machine.IMPLEMENTATIONS[name].verify_mla(**host, q=DLPackOnly(small.q), kv_cache=small.kv_cache, sm_scale=0.125, latent_dim=LATENT)


@host_implementations
@pytest.mark.parametrize("kernel", ["auto", "naive"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_cpu_tensors(name, kernel, dtype):
    """Treated as NumPy arrays: given outputs are written in place, new ones are NumPy's; a tensor that requires grad is read too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module, small = machine.IMPLEMENTATIONS[name], Small(dtype=dtype)

    def tensor(array):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)

    arrays = {key: tensor(getattr(small, key)) for key in ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "q", "kv_cache")}
    arrays["q"].requires_grad_(True)
    arrays["tree"] = torch.from_numpy(small.parents)
    options = {"sm_scale": 0.125, "latent_dim": LATENT, "kernel": kernel}
    out, lse = torch.full((ROWS, HEADS, LATENT), 7, dtype=getattr(torch, dtype)), torch.full((ROWS, HEADS), 7.0)
    returned = module.verify_mla(**arrays, **options, out=out, lse=lse)
    assert returned[0] is out and returned[1] is lse
    small.check(out.float().numpy(), lse.numpy())
    assert (out[small.total_q:] == 7).all() and (lse[small.total_q:] == 7).all()
    new_out, new_lse = module.verify_mla(**arrays, **options, return_lse=True)
    assert type(new_out) is np.ndarray and new_out.dtype == NUMPY_DTYPE[dtype]
    assert bits([new_out[:4].astype(np.float32), new_lse[:4]]) == bits([out[:4].float().numpy(), lse[:4].numpy()])
    plan = module.plan(**{key: arrays[key] for key in PLAN_NAMES}, num_heads=HEADS, latent_dim=LATENT, rope_dim=32,
                       dtype=getattr(torch, dtype), kernel=kernel)
    assert plan.run(arrays["q"], arrays["kv_cache"], sm_scale=0.125)[:4].tobytes() == new_out[:4].tobytes()
