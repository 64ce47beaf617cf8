"""What the host can see to be wrong is refused before anything happens: the class of the error, its text, and what stands afterwards.

After every refusal out and lse hold the bytes they held, and the next good call gives the right answer: a refused `update` leaves the plan
at the step before, a refused `plan` or `verify_mla` leaves nothing behind. Refusals of `run` are in test_errors_run.py.
"""

import importlib
import itertools
import re

import numpy as np
import pytest
from support import machine
from support.small import DIMS, HEADS, LATENT, ROPE, SLOTS, Outputs, Small, bits, good_run, good_verify, place

import cuda_ref.backend
import numba_verify as nv
from numba_verify import backend, planner
from numba_verify.gpu import driver
from numba_verify.kernels.wgmma_config import FEWEST_ROWS

IMPLEMENTATIONS = list(machine.IMPLEMENTATIONS)
both = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def table(argument_names, rows):
    """Parametrize by the rows of a table, each named after the arguments that it changes."""
    return pytest.mark.parametrize(argument_names, rows, ids=[f"{'-'.join(row[0])}_{i}" for i, row in enumerate(rows)])


runs_kernel = pytest.mark.kernel  # the good call after a refusal


def refuses(target, name, error, text, base=None, step=1, **changes):
    """`target` called with `changes` raises `error` whose text matches `text`; nothing is written, and a good call works."""
    module, base = machine.IMPLEMENTATIONS[name], base or {}
    small = Small(**base)
    if target == "plan":
        with pytest.raises(error, match=text):
            module.plan(**small.plan_arguments(**changes))
        good_run(module.plan(**small.plan_arguments()), small)
    elif target == "update":
        plan, other = module.plan(**small.plan_arguments()), Small(step=step, **base)
        before = good_run(plan, small)
        with pytest.raises(error, match=text):
            plan.update(**other.update_arguments(**changes))
        assert bits(good_run(plan, small)) == bits(before), "the refused update changed the step before it"
        plan.update(**other.update_arguments())
        good_run(plan, other)
    else:
        outputs = Outputs(small)
        with pytest.raises(error, match=text):
            module.verify_mla(**(small.verify_arguments(out=outputs.out, lse=outputs.lse) | {k: place(v) for k, v in changes.items()}))
        outputs.check()
        good_verify(module, small)


def misaligned(array):
    """The same numbers 2 bytes off their natural boundary."""
    raw = np.zeros(array.nbytes + 16, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, raw, -raw.ctypes.data % 16 + 2)
    moved[...] = array
    return moved


INDEX_DEFECTS = {
    "list": (lambda a: a.tolist(), TypeError, r"{}: expected a NumPy, torch, CuPy, numba or JAX array .*, got list"),
    "float": (lambda a: a.astype(np.float32), TypeError, r"{}: expected int32 or int64, got float32"),
    "int16": (lambda a: a.astype(np.int16), TypeError, r"{}: dtype (int16|<i2) has no use here; expected one of bfloat16, .*int32, int64"),
    "rank": (lambda a: a[:, None], ValueError, r"{}: expected rank 1, got shape"),
    "strides": (lambda a: np.repeat(a, 2)[::2], ValueError, r"{}: expected a contiguous array, got strides \(2,\) for .*; make it contig"),
    "alignment": (misaligned, ValueError, r"{}\b.*(align|multiple of)"),
}


@runs_kernel
@both
@pytest.mark.parametrize("array", ["qo_indptr", "kv_indptr", "kv_indices", "kv_lens"])
@pytest.mark.parametrize("target, defect", [(t, d) for t in ("plan", "update") for d in INDEX_DEFECTS] + [("verify", "float")])
def test_index_arrays(name, target, array, defect):
    damage, error, text = INDEX_DEFECTS[defect]
    source = Small(step=1 if target == "update" else 0)
    refuses(target, name, error, text.format(array), **{array: damage(getattr(source, array))})


BATCH_DEFECTS = [
    ({"qo_indptr": np.zeros(0, np.int32)}, {}, r"qo_indptr: expected at least one entry \(batch \+ 1\), got 0"),
    ({"qo_indptr": np.zeros(0, np.int32), "tree": np.ones((2, 4, 4), bool)}, {}, r"qo_indptr: expected at least one entry"),
    ({"kv_indptr": np.zeros(2, np.int32)}, {}, r"kv_indptr: expected 3 entries like qo_indptr, got 2"),
    ({"kv_lens": np.zeros(3, np.int32)}, {}, r"kv_lens: expected 2 entries, one a request, got 3"),
    ({"kv_lens": None}, {"page_size": 4}, r"kv_lens: needed with page_size=4, since the last page .* partly filled; pass its tokens"),
]


@runs_kernel
@both
@pytest.mark.parametrize("target", ["plan", "update", "verify"])
@pytest.mark.parametrize("changes, base, text", BATCH_DEFECTS, ids=["empty", "empty_dense", "kv_indptr", "kv_lens", "kv_lens_missing"])
def test_lengths_of_index_arrays(name, target, changes, base, text):
    refuses(target, name, ValueError, text, base, **changes)


TREE_DEFECTS = [
    (nv.DraftTree.from_lists([[-1, 0]]), ValueError, r"tree: expected 2 requests like qo_indptr, got a DraftTree of 1"),
    (np.ones((1, 4, 4), bool), ValueError, r"tree: expected a mask \[>= 2, N, N\], got \[1, 4, 4\]"),
    (np.ones((2, 3, 4), bool), ValueError, r"tree: expected a mask \[>= 2, N, N\], got \[2, 3, 4\]"),
    (np.zeros(8, np.int64), TypeError, r"tree: expected a DraftTree, parents int32 \[total_q\], bits .*, got int64 of rank 1"),
    (np.ones((4, 1), bool), TypeError, r"tree: expected a DraftTree, .* got bool of rank 2"),
    (np.zeros((2, 4, 4), np.int32), TypeError, r"tree: expected a DraftTree, .* got int32 of rank 3"),
    (np.zeros((4, 1), np.float32), TypeError, r"tree: expected a DraftTree, .* got float32 of rank 2"),
    ([[-1, 0, 0], [-1]], TypeError, r"tree: expected a NumPy, torch, .* got list"),
    (np.zeros((4, 2), np.uint32)[:, ::2], ValueError, r"tree: expected a contiguous array, got strides"),
    (misaligned(np.zeros((4, 1), np.uint32)), ValueError, r"tree\b.*(align|multiple of)"),
]


@runs_kernel
@both
@pytest.mark.parametrize("target", ["plan", "update", "verify"])
@pytest.mark.parametrize("tree, error, text", TREE_DEFECTS, ids=[
    "batch", "dense_batch", "dense_square", "int64", "bool_2", "int32_3", "float", "list", "strides", "alignment"])
def test_tree(name, target, tree, error, text):
    refuses(target, name, error, text, tree=tree)


TOO_LONG = [
    ({"max_batch": 1}, {}, r"qo_indptr: expected at most 1 requests \(max_batch\), got 2; plan with a larger capacity"),
    ({"max_kv_entries": 8}, {}, r"kv_indices: expected at most 8 entries \(max_kv_entries\), got 9; plan with a larger capacity"),
    ({"max_total_q": 3}, {}, r"tree: expected at most 3 rows \(max_total_q\), got 4; plan with a larger capacity"),
    ({"max_total_q": 3}, {"tree": np.array([-1, 0, 0, -1], np.int32)}, r"tree: expected at most 3 rows \(max_total_q\), got 4"),
    ({"max_total_q": 3}, {"tree": np.zeros((4, 1), np.uint32)}, r"tree: expected at most 3 rows \(max_total_q\), got 4"),
]


@runs_kernel
@both
@pytest.mark.parametrize("capacity, changes, text", TOO_LONG, ids=["batch", "entries", "tree", "parents", "bits"])
def test_capacities(name, capacity, changes, text):
    """`plan` refuses its own arrays, and `update` those of a later step; the step that fits stays."""
    module, small, capacity = machine.IMPLEMENTATIONS[name], Small(), {"max_batch": 2, "max_kv_entries": 9} | capacity
    refuses("plan", name, ValueError, text, **capacity, **changes)
    fitting = {"qo_indptr": np.array([0, 1], np.int32), "kv_indptr": np.array([0, 1], np.int32), "kv_lens": None,
                   "kv_indices": small.kv_indices[:1], "tree": nv.DraftTree.from_lists([[-1]])}
    plan = module.plan(**small.plan_arguments(**fitting, **capacity))

    def run():
        out, lse = plan.run(**small.run_arguments(return_lse=True))
        return bits((machine.fetch(out)[:1], machine.fetch(lse)[:1]))

    before = run()
    with pytest.raises(ValueError, match=text):
        plan.update(**small.update_arguments(**changes))
    assert run() == before


COUNTS = ["num_heads", "page_size", "latent_dim", "rope_dim", "max_batch", "max_total_q", "max_kv_entries"]


@runs_kernel
@both
@pytest.mark.parametrize("count", COUNTS)
def test_counts(name, count):
    """Numbers that are no integers, booleans among them, and integers that are too small."""
    least = 1 if count in COUNTS[:3] else 0
    module, small = machine.IMPLEMENTATIONS[name], Small()
    for value in (True, np.True_, 1.5, "8"):
        with pytest.raises(TypeError, match=rf"{count}: expected an integer, got {type(value).__name__}"):
            module.plan(**small.plan_arguments(**{count: value}))
    for value in (least - 1, -(1 << 40)):
        with pytest.raises(ValueError, match=rf"{count}: expected at least {least}, got {value}"):
            module.plan(**small.plan_arguments(**{count: value}))
    good_run(module.plan(**small.plan_arguments()), small)


@both
@pytest.mark.parametrize("count", ["page_size", "latent_dim", "rope_dim"])
def test_counts_of_verify_mla_and_can_run(name, count):
    module, small = machine.IMPLEMENTATIONS[name], Small()
    for value in (True, np.True_, 1.5, "8"):
        text = rf"{count}: expected an integer, got {type(value).__name__}"
        with pytest.raises(TypeError, match=text):
            module.verify_mla(**small.verify_arguments(**{count: value}))
        with pytest.raises(TypeError, match=text):
            module.can_run(num_heads=8, **{count: value})
    with pytest.raises(ValueError, match=rf"{count}: expected at least \d, got -3|q: expected a last dimension of latent_dim \+ rope_dim"):
        module.verify_mla(**small.verify_arguments(**{count: -3}))
    with pytest.raises(ValueError, match=rf"{count}: expected at least \d, got -3"):
        module.can_run(num_heads=8, **{count: -3})


PLAN_OPTIONS = [
    ({"draft_in_cache": "yes"}, TypeError, r"draft_in_cache: expected True or False, got 'yes'"),
    ({"draft_in_cache": None}, TypeError, r"draft_in_cache: expected True or False, got None"),
    ({"deterministic": 1}, TypeError, r"deterministic: expected True or False, got 1"),
    ({"dtype": "int8"}, TypeError, r"dtype: expected bfloat16, float16 or float32 \(as text, NumPy or torch dtype\), got 'int8'"),
    ({"dtype": np.float64}, TypeError, r"dtype: expected bfloat16, float16 or float32"),
    ({"dtype": object()}, TypeError, r"dtype: expected bfloat16, float16 or float32"),
    ({"kernel": "fast"}, ValueError, r"kernel: expected one of auto, naive, flash, paged, mma, wgmma, reference, got 'fast'"),
    ({"kernel": None}, ValueError, r"kernel: expected one of auto, .*, got None"),
    ({"stream": "default"}, TypeError, r"stream: expected an int handle or a torch, CuPy, numba or cuda.core stream, got str"),
    ({"stream": True}, TypeError, r"stream: expected an int handle .*, got bool"),
]


@runs_kernel
@both
@table("changes, error, text", PLAN_OPTIONS)
def test_options_of_plan(name, changes, error, text):
    refuses("plan", name, error, text, **changes)


@runs_kernel
@both
@table("changes, error, text", [c for c in PLAN_OPTIONS if not {"draft_in_cache", "dtype"} & c[0].keys()] + [
    ({"q": np.zeros((4, DIMS), np.float32)}, ValueError, r"q: expected shape \[rows, heads, latent_dim \+ rope_dim\], got \[4, 64\]"),
    ({"q": np.zeros((4, 0, DIMS), np.float32)}, ValueError, r"num_heads: expected at least 1, got 0|q: expected .* heads"),
    ({"q": np.zeros((4, HEADS, DIMS), np.int32)}, TypeError, r"q: .*float32.*int32|q: .*int32.*float32"),
    ({"q": [[[1.0]]]}, TypeError, r"q: expected a NumPy, torch, .* got list"),
    ({"rope_dim": 64}, ValueError, r"q: expected a last dimension of latent_dim \+ rope_dim = 96, got 64"),
    ({"latent_dim": 96}, ValueError, r"q: expected a last dimension of latent_dim \+ rope_dim = 96, got 64"),
    ({"kv_cache": np.zeros((SLOTS, DIMS), np.float16)}, TypeError, r"kv_cache: expected float32 .*, got float16"),
    ({"sm_scale": float("nan")}, ValueError, r"sm_scale: expected a finite number, got nan"),
    ({"logit_cap": -1}, ValueError, r"logit_cap: expected 0 \(off\) or a positive number, got -1"),
])
def test_options_of_verify_mla(name, changes, error, text):
    """The checks of `plan` and `run` stand behind `verify_mla` too, and errors name an argument that it has."""
    refuses("verify", name, error, text, **changes)


@runs_kernel
@both
def test_stream_of_update(name):
    refuses("update", name, TypeError, r"stream: expected an int handle or a torch, CuPy, numba or cuda.core stream, got str", stream="0")


@both
def test_unknown_and_missing_keywords(name):
    module, small = machine.IMPLEMENTATIONS[name], Small()
    plan = module.plan(**small.plan_arguments())
    calls = [(module.plan, small.plan_arguments(), "num_heads"), (module.verify_mla, small.verify_arguments(), "sm_scale"),
             (plan.update, small.update_arguments(), "kv_indices"), (plan.run, small.run_arguments(), "sm_scale"),
             (module.can_run, {"num_heads": 8}, "num_heads"), (module.warmup, {"num_heads": 8}, "num_heads")]
    for function, arguments, required in calls:
        for unknown in ("block_tables", "softmax_scale", "causal"):
            with pytest.raises(TypeError, match=rf"unexpected keyword argument '{unknown}'"):
                function(**arguments, **{unknown: 1})
        arguments.pop(required)
        with pytest.raises(TypeError, match=rf"missing 1 required .*'{required}'"):
            function(**arguments)


UNSUPPORTED = [
    ({"kernel": "mma"}, r"^{}: dtype float32: kernel='mma' takes bfloat16 and float16; kernel='paged' would run$"),
    ({"kernel": "wgmma"}, r"^{}: .*'wgmma'.*; .*paged.* would run"),
    ({"latent_dim": 48}, r"^{}: latent_dim(=| is )48[:;] the kernels take multiples of 32 from 32 to 512"),
    ({"latent_dim": 1024}, r"^{}: latent_dim(=| is )1024[:;] the kernels take multiples of 32 from 32 to 512"),
    ({"rope_dim": 16}, r"^{}: rope_dim(=| is )16[:;] the kernels take multiples of 32 from 0 to 128"),
    ({"rope_dim": 160}, r"^{}: rope_dim(=| is )160[:;] the kernels take multiples of 32 from 0 to 128"),
]


@runs_kernel
@both
@table("changes, text", UNSUPPORTED)
def test_unsupported(name, changes, text):
    """`plan`, `verify_mla` and `can_run` agree, and name a limit and what would run."""
    text, module, small = text.format(name), machine.IMPLEMENTATIONS[name], Small()
    refuses("plan", name, nv.UnsupportedError, text, **changes)
    latent, rope = changes.get("latent_dim", LATENT), changes.get("rope_dim", ROPE)
    wide = {"q": np.zeros((4, HEADS, latent + rope), np.float32), "kv_cache": np.zeros((SLOTS, latent + rope), np.float32)}
    refuses("verify", name, nv.UnsupportedError, text, **(wide | changes))
    where = 0 if machine.HAS_GPU else None
    given = {"latent_dim": LATENT, "rope_dim": ROPE, "dtype": "float32", "kernel": "naive"}
    answer = module.can_run(num_heads=HEADS, device=where, **(given | changes))
    assert not answer and bool(answer) is False
    assert f"{name}: {answer.reason}" == str(pytest.raises(nv.UnsupportedError, module.plan, **small.plan_arguments(**changes)).value)
    assert re.search(text.replace(f"^{name}: ", "^"), answer.reason)


#: Rows that the kernels on tensor cores do not take, and why; dtype first, then latent_dim, then rope_dim.
NOT_TENSOR = [
    (512, 64, "float32", r"dtype float32: kernel='{}' takes bfloat16 and float16"),
    (32, 32, "bfloat16", r"latent_dim=32: kernel='{}' takes 128, 256 and 512"),
    (384, 64, "float16", r"latent_dim=384: kernel='{}' takes 128, 256 and 512"),
    (512, 32, "bfloat16", r"rope_dim=32: kernel='{}' takes 0, 64 and 128"),
    (128, 96, "float16", r"rope_dim=96: kernel='{}' takes 0, 64 and 128"),
]


@pytest.fixture
def large_gpu(monkeypatch):
    """An H200 for those who only ask what it can run; cuda_ref's answers come from the host build."""
    if not machine.HAS_GPU:
        info = driver.DeviceInfo(0, "Toy H200", (9, 0), 132, 232_448, 233_472, 1 << 20)
        monkeypatch.setattr(driver, "device_info", lambda ordinal: info)
        monkeypatch.setattr(driver, "unavailable", lambda: "")
        monkeypatch.setattr(cuda_ref.backend, "library_of", lambda device, host=cuda_ref.backend.library_of: host(None))


@runs_kernel
@both
@pytest.mark.parametrize("kernel", machine.TENSOR)
@pytest.mark.parametrize("latent, rope, dtype, text", NOT_TENSOR)
def test_rows_that_tensor_cores_do_not_take(name, latent, rope, dtype, text, kernel, large_gpu):
    """`plan` refuses them and says what would run, and "auto" takes that."""
    text = text.format(kernel)
    text, module, small = f"^{name}: {text}; kernel='paged' would run$", machine.IMPLEMENTATIONS[name], Small(dtype=dtype, latent=latent, rope=rope)
    with pytest.raises(nv.UnsupportedError, match=text):
        module.plan(**small.plan_arguments(kernel=kernel))
    rows = {"num_heads": HEADS, "latent_dim": latent, "rope_dim": rope, "dtype": dtype, "device": 0}
    assert module.can_run(**rows).kernel == "paged" and not module.can_run(**rows, kernel=kernel)
    good_run(module.plan(**small.plan_arguments(kernel="paged")), small)


@both
def test_rows_that_tensor_cores_take(name, large_gpu):
    """And which "auto" gives them: as the test suite thinks, so that no case is left out in silence."""
    for latent, rope, dtype in itertools.product((32, 96, 128, 256, 384, 512), (0, 32, 64, 96, 128), ("bfloat16", "float16", "float32")):
        rows = {"num_heads": HEADS, "latent_dim": latent, "rope_dim": rope, "dtype": dtype, "device": 0}
        for kernel in machine.TENSOR:
            taken, answer = machine.takes(name, kernel, latent, rope, dtype), machine.IMPLEMENTATIONS[name].can_run(**rows, kernel=kernel)
            assert bool(answer) is taken, (rows, answer)
        taken = machine.takes(name, "mma", latent, rope, dtype)
        assert machine.IMPLEMENTATIONS[name].can_run(**rows).kernel == ("mma" if taken else "paged"), rows


@both
def test_what_auto_takes_on_hopper(name, large_gpu):
    """wgmma for requests whose rows fill its tile; for few rows, and on other GPUs, mma."""
    if machine.HAS_GPU and driver.device_info(0).arch != backend.WGMMA_ARCH:
        pytest.skip("needs a Hopper GPU, or none")
    implementation = nv.planner.Implementation(name, backend.AVAILABLE, importlib.import_module(f"{name}.backend").support, None, "reference")
    for rows, expected in ((None, "wgmma"), (16, "mma"), (FEWEST_ROWS - 1, "mma"), (FEWEST_ROWS, "wgmma"), (8192, "wgmma")):
        assert planner.choose_kernel(implementation, "auto", 64, 512, 64, "bfloat16", 1, 0, rows).kernel == expected, rows
        assert planner.choose_kernel(implementation, "mma", 64, 512, 64, "bfloat16", 1, 0, rows).kernel == "mma", rows
    assert planner.choose_kernel(implementation, "auto", 8, 512, 64, "bfloat16", 1, 0).kernel == "mma"
    assert planner.choose_kernel(implementation, "auto", 64, 96, 32, "bfloat16", 1, 0, 64).kernel == "paged"


def test_verify_mla_chooses_by_what_it_is_given(monkeypatch):
    """And not by the capacity of the plan that it keeps, which is a power of two: the kernel would change with the batch."""
    asked, choose = [], planner.choose_kernel
    monkeypatch.setattr(planner, "choose_kernel", lambda *arguments: asked.append(arguments[-1]) or choose(*arguments))
    for batch in (4, 5, 7):
        chains, tokens = 3 * np.arange(batch + 1), np.arange(3 * batch)
        q, kv_cache = np.zeros((3 * batch, 16, DIMS), np.float32), np.zeros((3 * batch, DIMS), np.float32)
        nv.verify_mla(q, kv_cache, chains, chains, tokens, latent_dim=LATENT, rope_dim=ROPE, sm_scale=1.0)
    assert asked == [48] * 3
    nv.verify_mla(q, kv_cache, chains, chains, tokens, latent_dim=LATENT, rope_dim=ROPE, sm_scale=1.0, deterministic=True)
    assert asked[-1] == 64


@both
def test_every_kernel_is_tested(name):
    assert sorted(machine.KERNELS) == sorted(importlib.import_module(f"{name}.backend").AVAILABLE)


@both
def test_can_run(name):
    """Truthy for what runs; wrong arguments are errors and no "no", with a GPU and without."""
    module = machine.IMPLEMENTATIONS[name]
    for where in (None, 0) if machine.HAS_GPU else (None,):
        for kernel in machine.KERNELS:
            answer = module.can_run(kernel=kernel, num_heads=126, dtype="float16", device=where)
            assert answer and answer.reason == "" and answer.kernel == kernel and f"kernel={kernel!r}" in repr(answer)
        assert module.can_run(num_heads=128, device=where).kernel in nv.problem.KERNELS
    for where in (None, 0):
        with pytest.raises(ValueError, match=r"kernel: expected one of auto, .*, got 'fast'"):
            module.can_run(kernel="fast", num_heads=8, device=where)
        with pytest.raises(TypeError, match=r"dtype: expected bfloat16, float16 or float32"):
            module.can_run(num_heads=8, dtype="int8", device=where)
        with pytest.raises(ValueError, match=r"num_heads: expected at least 1, got 0"):
            module.can_run(num_heads=0, device=where)
        assert not module.can_run(kernel="naive", num_heads=8, latent_dim=40, device=where)


@both
@pytest.mark.skipif(machine.HAS_GPU, reason="asks what is said where there is no GPU")
def test_no_gpu(name):
    module = machine.IMPLEMENTATIONS[name]
    answer = module.can_run(num_heads=8)
    assert not answer and re.search(r"^no GPU can be used \(.+\); device=None asks for NumPy arrays$", answer.reason)
    assert answer.kernel in nv.problem.KERNELS and not module.can_run(kernel="flash", num_heads=8)
    with pytest.raises(nv.NoDeviceError, match=r"^warmup needs a GPU: .+"):
        module.warmup(num_heads=8)


def test_shared_memory_limit(monkeypatch):
    """The numbers of a device that is too small, before anything is compiled; seen through the eyes of `support`, so no GPU is needed."""
    small_gpu = driver.DeviceInfo(0, "Toy GPU", (8, 9), 10, 50_000, 51_200, 1 << 20)
    monkeypatch.setattr(driver, "device_info", lambda ordinal: small_gpu)
    monkeypatch.setattr(driver, "unavailable", lambda: "")
    reason = backend.support("paged", 64, 512, 64, "bfloat16", 1, 0)
    assert reason == ("head_tile=16, kv_tile=16 needs 74,880 B of shared memory, Toy GPU has 50,000 B; "
                      "kernel='naive' needs none and would run")
    assert "would run: head_tile=8, kv_tile=16" in backend.support("flash", 64, 256, 64, "bfloat16", 1, 0) \
        or backend.support("flash", 64, 256, 64, "bfloat16", 1, 0) == ""
    assert backend.support("naive", 64, 512, 64, "bfloat16", 1, 0) == ""
    assert backend.support("mma", 64, 512, 64, "bfloat16", 1, 0) == (
        "kernel='mma' needs 95,680 B of shared memory at least, Toy GPU has 50,000 B; kernel='paged' would run")
    assert planner.choose_kernel(nv.api.NUMBA, "auto", 64, 512, 64, "bfloat16", 1, 0).kernel == "naive"


def test_gpu_too_old(monkeypatch):
    monkeypatch.setattr(driver, "device_info", lambda ordinal: driver.DeviceInfo(0, "Toy GPU", (7, 5), 10, 65_536, 65_536, 1 << 20))
    for kernel in backend.AVAILABLE:
        assert backend.support(kernel, 8, 512, 64, "float16", 1, 0) == (
            "Toy GPU has compute capability 7.5, the kernels need 8.0 or later; NumPy arrays run anywhere")


def test_more_heads_than_a_grid_holds():
    most = backend.MAX_HEADS
    assert backend.support("naive", most, 512, 64, "bfloat16", 1, None) == ""
    assert backend.support("naive", most + 1, 512, 64, "bfloat16", 1, None) == "num_heads=262,141: the kernels take at most 262,140 heads"


def test_legacy_stream_while_another_records(monkeypatch):
    """The driver's answer, given in its place: no GPU is needed to read the text."""
    def call(name, *arguments):
        raise driver.DriverError(f"{name}: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (operation would make the legacy stream depend on a capturing stream)")

    monkeypatch.setattr(driver, "call", call)
    with pytest.raises(ValueError, match=r"^stream: the legacy default stream cannot be used while another stream records a CUDA graph; pass the"):
        driver.is_capturing(0)


@pytest.mark.gpu
@both
def test_gpu_answers(name):
    module = machine.IMPLEMENTATIONS[name]
    with pytest.raises(nv.UnsupportedError, match=r"kernel='reference' runs on NumPy arrays only; copy the arrays to the host, or use"):
        module.plan(**Small().plan_arguments(kernel="reference"))
    with pytest.raises(nv.UnsupportedError, match=r"latent_dim.*40.* the kernels take multiples of 32"):
        module.warmup(num_heads=8, latent_dim=40)
    for kernel in ("auto", *machine.KERNELS):
        answer = module.can_run(kernel=kernel, num_heads=8, device=99)
        assert not answer and re.search(r"cuda:99 does not exist; this machine has \d+ GPU", answer.reason)
    with pytest.raises(nv.NoDeviceError, match=r"cuda:99 does not exist; this machine has \d+ GPU"):
        module.warmup(num_heads=8, device=99)


@pytest.mark.gpu
@pytest.mark.kernel
@both
@pytest.mark.parametrize("array", ["kv_indptr", "kv_indices", "kv_lens", "tree"])
def test_devices_that_differ(name, array):
    """One host array among device arrays, whichever it is."""
    module, small = machine.IMPLEMENTATIONS[name], Small()
    host = small.parents if array == "tree" else getattr(small, array)
    text = rf"{array}: expected on cuda:0 like the index arrays of the plan, got the host; move one of them"
    with pytest.raises(ValueError, match=text):
        module.plan(**(small.plan_arguments() | {array: host}))
    plan = module.plan(**small.plan_arguments())
    with pytest.raises(ValueError, match=text):
        plan.update(**(small.update_arguments() | {array: host}))
    good_run(plan, small)


@pytest.mark.gpu
@both
def test_plan_reads_lengths_in_the_order_of_its_stream(name, monkeypatch):
    """A chain without max_total_q reads qo_indptr back: on the stream that was given, where its writer is, and not on the current one."""
    seen = []
    read = planner.validation.to_host
    monkeypatch.setattr(planner.validation, "to_host", lambda array, stream: seen.append(stream) or read(array, stream))
    with driver.context(0):
        stream = int(driver.call("cuStreamCreate", 1))
    machine.IMPLEMENTATIONS[name].plan(**Small().plan_arguments(tree=None, stream=stream))
    assert set(seen) == {stream}
