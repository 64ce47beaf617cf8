"""The C interface of cuda_ref, through ctypes and NumPy, in the host build: every status code, then numbers against float64.

Nothing of numba_verify's front end takes part: what is tested is what a C caller gets.
"""

import ctypes
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from cuda_ref import binding, build
from cuda_ref.binding import Status

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Error of a row relative to its norm: twice what contract.md, promise 7, calls the error of a dense computation (fp32: 4 of them).
TOLERANCE = {"bfloat16": 2 * 2.3e-3, "float16": 2 * 2.9e-4, "float32": 4 * 5e-7}
KERNELS = ("naive", "flash", "paged")
TENSOR = ("mma", "wgmma")  # on tensor cores
TENSOR_ROWS = ((512, 64), (512, 0), (256, 64), (128, 64))
H16_K16, H8_K32 = 2, 3  # nvr_tile_config


@pytest.fixture(scope="module")
def library():
    return binding.load(build.build_host())


@dataclasses.dataclass(frozen=True)
class Case:
    """One small problem; the default is a ragged batch with an empty request and a request without a prefix."""

    drafts: tuple = (3, 0, 5, 1)
    prefix: tuple = (21, 7, 0, 40)
    heads: int = 3
    latent: int = 128
    rope: int = 64
    dtype: str = "float32"
    page_size: int = 1
    aside: bool = False
    tree: str = "parents"
    widths: tuple = (4, 4, 4, 4)  # qo_indptr, kv_indptr, kv_indices, kv_lens
    tile: int = 0
    deterministic: bool = False
    logit_cap: float = 0.0
    seed: int = 0


def aligned(shape, dtype, fill):
    """An array at a 16-byte boundary, filled."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 16, np.uint8)
    start = -raw.ctypes.data % 16
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def random_parents(rng, count):
    return np.array([-1 if i == 0 or rng.random() < 0.2 else rng.integers(0, i) for i in range(count)], np.int32)


def ancestors(parents):
    """bool [n, n]: row i sees itself and its ancestors."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        node = i
        while node >= 0:
            seen[i, node] = True
            node = parents[node]
    return seen


class Problem:
    """Arrays of a case. Everything that no request names is NaN, indices after the last entry are junk, and there is one row of padding."""

    PADDING = 2

    def __init__(self, case):
        self.case, rng = case, np.random.default_rng(case.seed)
        self.batch, dtype = len(case.drafts), DTYPES[case.dtype]
        self.width = case.latent + case.rope
        self.listed = [length + (0 if case.aside else n) for length, n in zip(case.prefix, case.drafts, strict=True)]
        entries = [-(-tokens // case.page_size) for tokens in self.listed]
        self.total_q, self.total_entries = sum(case.drafts), sum(entries)
        index = [np.dtype(f"int{8 * width}") for width in case.widths]
        self.qo = np.cumsum([0, *case.drafts]).astype(index[0])
        self.kv = np.cumsum([0, *entries]).astype(index[1])
        pages = self.total_entries + 3
        self.pages = np.full(self.total_entries + 5, 2**30, index[2])
        self.pages[: self.total_entries] = rng.permutation(pages)[: self.total_entries]
        self.lens = np.array(self.listed, index[3])
        rows = self.total_q + self.PADDING
        self.q = aligned((rows, case.heads, self.width), dtype, np.nan)
        self.q[: self.total_q] = rng.standard_normal((self.total_q, case.heads, self.width))
        self.pool = aligned((pages, case.page_size, self.width), dtype, np.nan)
        self.draft = aligned((rows, self.width), dtype, np.nan)
        self.draft[: self.total_q] = rng.standard_normal((self.total_q, self.width))
        for r in range(self.batch):
            for t in range(self.listed[r]):
                self.pool[self.pages[self.kv[r] + t // case.page_size], t % case.page_size] = rng.standard_normal(self.width)
        self.out = aligned((rows, case.heads, case.latent), dtype, 7)
        self.lse = aligned((rows, case.heads), np.float32, 7)
        self.make_tree(rng)

    def make_tree(self, rng):
        """The tree in the case's form, and `seen`: bool [n, n] of each request."""
        drafts = self.case.drafts
        parents = [random_parents(rng, n) for n in drafts]
        self.seen = [np.tri(n, dtype=bool) if self.case.tree == "causal" else ancestors(p) for n, p in zip(drafts, parents, strict=True)]
        if self.case.tree in ("bits", "dense", "full_mask"):  # any bits are obeyed: the last row of each request sees no draft token
            for mask in self.seen:
                mask[-1:] = False
        self.tree_array, self.tree_stride = None, 0
        if self.case.tree == "parents":
            self.tree_array = np.concatenate(parents)
        elif self.case.tree == "bits":
            self.tree_stride = -(-max(drafts) // 32) + 1
            self.tree_array = np.full((self.total_q, self.tree_stride), 0xFFFFFFFF, np.uint32)  # bits at and after n are ignored
            for start, mask in zip(np.cumsum([0, *drafts]), self.seen, strict=False):
                for (i, j), bit in np.ndenumerate(mask):
                    if not bit:
                        self.tree_array[start + i, j // 32] &= np.uint32(0xFFFFFFFF ^ (1 << j % 32))
        elif self.case.tree == "dense":
            self.tree_stride = max(drafts) + 1
            self.tree_array = np.ones((self.batch, self.tree_stride, self.tree_stride), bool)
            for r, mask in enumerate(self.seen):
                self.tree_array[r, : len(mask), : len(mask)] = mask
        elif self.case.tree == "full_mask":  # prefix columns are never read: zeros there must not matter
            rows = [np.hstack([np.zeros((len(m), length), bool), m]).ravel() for m, length in zip(self.seen, self.case.prefix, strict=True)]
            self.tree_array = np.concatenate(rows)

    def config(self, **changes):
        case = self.case
        fields = {"device": 0, "dtype": binding.DTYPES[case.dtype], "num_heads": case.heads, "latent_dim": case.latent, "rope_dim": case.rope,
                      "page_size": case.page_size, "draft_in_cache": not case.aside, "deterministic": case.deterministic, "tile_config": case.tile,
                      "max_batch": self.batch + 1, "max_total_q": self.total_q + 3, "max_kv_entries": len(self.pages)}  # fmt: skip
        return binding.PlanConfig(**{**fields, **changes})

    def indices(self):
        def record(array):
            return binding.IndexArray(data=array.ctypes.data, length=array.size, width=array.itemsize)

        array = self.tree_array
        tree = binding.Tree(kind=binding.TREE_KINDS[self.case.tree], data=None if array is None else array.ctypes.data,
                            length=0 if array is None else array.size, stride=self.tree_stride)  # fmt: skip
        return binding.Indices(batch=self.batch, qo_indptr=record(self.qo), kv_indptr=record(self.kv), kv_indices=record(self.pages),
                               kv_lens=record(self.lens), tree=tree)  # fmt: skip

    def tensors(self, sm_scale=0.125):
        rows, size = len(self.q), self.q.itemsize
        q_strides, kv_strides, out_strides = ([s // size for s in a.strides] for a in (self.q, self.pool, self.out))
        return binding.Tensors(
            q=self.q.ctypes.data, kv_cache=self.pool.ctypes.data, draft_kv=self.draft.ctypes.data if self.case.aside else None,
            out=self.out.ctypes.data, lse=self.lse.ctypes.data, q_rows=rows, kv_pages=len(self.pool), draft_rows=len(self.draft),
            out_rows=rows, q_row_stride=q_strides[0], q_head_stride=q_strides[1], kv_page_stride=kv_strides[0],
            kv_token_stride=kv_strides[1], draft_row_stride=self.width, out_row_stride=out_strides[0], out_head_stride=out_strides[1],
            sm_scale=sm_scale, logit_cap=self.case.logit_cap,
        )  # fmt: skip

    def keys(self, r):
        """[L + n, width] float64."""
        pages = self.pages[self.kv[r] : self.kv[r + 1]].astype(np.int64)
        rows = self.pool[pages].reshape(-1, self.width)[: self.listed[r]]
        if self.case.aside:
            rows = np.concatenate([rows, self.draft[self.qo[r] : self.qo[r + 1]]])
        return rows.astype(np.float64)

    def plan_for(self, kernel):
        """The configuration of a plan for this kernel."""
        return self.config(kernel=binding.KERNELS[kernel])

    def expected(self, sm_scale=0.125):
        """Dense masked softmax in float64: out [total_q, H, latent], lse [total_q, H]."""
        out = np.zeros((self.total_q, self.case.heads, self.case.latent))
        lse = np.full((self.total_q, self.case.heads), -np.inf)
        for r, length in enumerate(self.case.prefix):
            keys = self.keys(r)
            for i in range(self.case.drafts[r]):
                seen = keys[np.concatenate([np.ones(length, bool), self.seen[r][i]])]
                if not len(seen):
                    continue
                row = self.qo[r] + i
                scores = sm_scale * self.q[row].astype(np.float64) @ seen.T
                if self.case.logit_cap:
                    scores = self.case.logit_cap * np.tanh(scores / self.case.logit_cap)
                maximum = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - maximum)
                total = weights.sum(axis=1, keepdims=True)
                out[row], lse[row] = weights / total @ seen[:, : self.case.latent], (maximum + np.log(total))[:, 0]
        return out, lse


def make_workspace(library, config):
    size = ctypes.c_uint64()
    binding.check(library, library.nvr_workspace_bytes(config, size))
    return aligned(size.value, np.uint8, 0xFF)


def suited(case, kernel):
    """The case in rows that the kernel takes: those of tensor cores are 16 bits, and of few widths."""
    if kernel not in TENSOR:
        return case
    latent, rope = (case.latent, case.rope) if (case.latent, case.rope) in TENSOR_ROWS else (128, 64)
    return dataclasses.replace(case, latent=latent, rope=rope, dtype="bfloat16" if case.dtype == "float32" else case.dtype, tile=0)


def run(library, problem, kernel):
    """Update and verify in a poisoned workspace; returns copies of out and lse."""
    config = problem.plan_for(kernel)
    workspace = make_workspace(library, config)
    binding.check(library, library.nvr_plan_update(config, problem.indices(), workspace.ctypes.data, workspace.size, None))
    verify = getattr(library, f"nvr_verify_{kernel}")
    binding.check(library, verify(config, problem.tensors(), workspace.ctypes.data, workspace.size, None))
    return problem.out.copy(), problem.lse.copy()


def assert_close(problem, out, lse):
    want, want_lse = problem.expected()
    total, got = problem.total_q, out.astype(np.float64)
    errors = np.linalg.norm(got[:total] - want, axis=-1)
    limit = TOLERANCE[problem.case.dtype] * np.linalg.norm(want, axis=-1)
    assert (errors <= limit).all(), f"worst row error {np.nanmax(errors / np.maximum(limit, 1e-30)):.3g} of its limit"
    np.testing.assert_allclose(lse[:total], want_lse, rtol=1e-5, atol=2e-5)
    assert (got[total:] == 7).all() and (lse[total:] == 7).all(), "padding rows were written"


CASES = {
    "causal": Case(tree="causal"),
    "parents, draft aside, int64": Case(aside=True, widths=(8, 8, 8, 8)),
    "bits, mixed widths": Case(tree="bits", drafts=(3, 0, 40), prefix=(5, 9, 2), widths=(8, 4, 8, 4)),
    "dense, pages of 4": Case(tree="dense", page_size=4),
    "full mask, pages of 16": Case(tree="full_mask", page_size=16, aside=True),
    "bf16, H 20, 512/64": Case(heads=20, latent=512, dtype="bfloat16", drafts=(2, 1), prefix=(50, 3), page_size=4),
    "fp16, H 9, 512/0": Case(heads=9, latent=512, rope=0, dtype="float16", drafts=(2, 0, 1), prefix=(33, 5, 0)),
    "H 1, 256/64, logit cap": Case(heads=1, latent=256, logit_cap=5.0),
    "odd extents": Case(latent=96, rope=32, drafts=(2,), prefix=(19,)),
    "no rope, one column warp": Case(latent=32, rope=0),
    "16 heads a tile": Case(tile=H16_K16, heads=17),
    "32 keys a tile": Case(tile=H8_K32, prefix=(70, 0, 1, 31)),
    "split": Case(drafts=(1, 2), prefix=(700, 1200)),
    "split evenly": Case(drafts=(1, 1, 7), prefix=(1110, 200, 3), latent=64, rope=0),  # a CTA ends one cut tile and begins another
    "split, deterministic": Case(drafts=(1, 2), prefix=(3000, 1200), deterministic=True, latent=64, rope=0),
    "many tiles a CTA": Case(drafts=(20, 1, 30), prefix=(4, 0, 150), heads=10, latent=32, rope=32),
    "nothing sees anything": Case(tree="bits", drafts=(1, 1), prefix=(0, 0)),
    "no draft tokens": Case(drafts=(0, 0), prefix=(4, 0)),
    "no requests": Case(drafts=(), prefix=(), tree="causal"),
}


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", (*KERNELS, *TENSOR))
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(library, name, kernel):
    problem = Problem(suited(CASES[name], kernel))
    assert_close(problem, *run(library, problem, kernel))


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", (*KERNELS, *TENSOR))
def test_hidden_nan_stays_out_and_seen_nan_shows(library, kernel):
    """A NaN draft row makes exactly the rows that see it NaN."""
    problem = Problem(suited(Case(drafts=(6, 2), prefix=(40, 3)), kernel))
    hidden = 2
    last = problem.listed[0] - 6 + hidden
    problem.pool[problem.pages[last], 0] = np.nan
    out, lse = run(library, problem, kernel)
    sees = np.zeros(problem.total_q, bool)
    sees[:6] = problem.seen[0][:, hidden]
    assert sees.any() and not sees.all()
    assert np.isnan(out[: problem.total_q][sees]).all() and np.isnan(lse[: problem.total_q][sees]).all()
    assert np.isfinite(out[: problem.total_q][~sees]).all() and np.isfinite(lse[: problem.total_q][~sees]).all()


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", (*KERNELS, *TENSOR))
def test_deterministic_bits_depend_on_the_request_alone(library, kernel):
    """The second request, alone: other neighbours, slots, index widths, mask form, draft rows aside."""
    case = suited(Case(drafts=(2, 3, 1), prefix=(900, 2600, 3), deterministic=True, latent=64, rope=0, heads=9), kernel)
    crowd = Problem(case)
    alone = Problem(dataclasses.replace(case, drafts=(3,), prefix=(2600,), aside=True, widths=(8, 8, 8, 8), seed=1))
    keys, first = crowd.keys(1), crowd.qo[1]
    for token in range(2600):
        alone.pool[alone.pages[token], 0] = keys[token]
    alone.draft[:3], alone.q[:3] = keys[2600:], crowd.q[first : first + 3]
    alone.case = dataclasses.replace(alone.case, tree="dense")
    alone.tree_array, alone.tree_stride = crowd.seen[1][None].copy(), 3
    many, one = run(library, crowd, kernel), run(library, alone, kernel)
    for crowded, single in zip(many, one, strict=True):
        assert crowded[first : first + 3].tobytes() == single[:3].tobytes()


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", ["paged", *TENSOR])
def test_plans_in_several_threads_do_not_meet(library, kernel):
    """ctypes lets go of the GIL, so four threads really run at once; each has its bits."""
    cases = [suited(Case(seed=seed, drafts=(1, 2, seed), prefix=(300, 90, 10 * seed)), kernel) for seed in range(4)]
    alone = [run(library, Problem(case), kernel) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: [run(library, Problem(case), kernel) for _ in range(3)], cases))
    for (out, lse), results in zip(alone, together, strict=True):
        assert all(out.tobytes() == o.tobytes() and lse.tobytes() == s.tobytes() for o, s in results)


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", (*KERNELS, *TENSOR))
def test_strided_arrays(library, kernel):
    """Gaps between rows, heads, tokens and pages, all NaN."""
    problem = Problem(suited(Case(page_size=4, heads=2, aside=True), kernel))
    dense_q, dense_pool, dense_draft = problem.q, problem.pool, problem.draft
    tensors = problem.tensors()
    rows, pages = len(dense_q), len(dense_pool)
    q, pool = aligned((rows, 3, 256), dense_q.dtype, np.nan), aligned((pages, 5, 208), dense_q.dtype, np.nan)
    draft, out = aligned((rows, 200), dense_q.dtype, np.nan), aligned((rows, 4, 136), dense_q.dtype, 7)
    q[:, :2, :192], pool[:, :4, :192], draft[:, :192] = dense_q, dense_pool, dense_draft
    tensors.q, tensors.kv_cache, tensors.draft_kv, tensors.out = (a.ctypes.data for a in (q, pool, draft, out))
    tensors.q_row_stride, tensors.q_head_stride, tensors.kv_page_stride, tensors.kv_token_stride = 3 * 256, 256, 5 * 208, 208
    tensors.draft_row_stride, tensors.out_row_stride, tensors.out_head_stride = 200, 4 * 136, 136
    config = problem.plan_for(kernel)
    workspace = make_workspace(library, config)
    binding.check(library, library.nvr_plan_update(config, problem.indices(), workspace.ctypes.data, workspace.size, None))
    binding.check(library, getattr(library, f"nvr_verify_{kernel}")(config, tensors, workspace.ctypes.data, workspace.size, None))
    assert_close(problem, out[:, :2, :128], problem.lse)
    assert (out[:, 2:] == 7).all() and (out[:, :, 128:] == 7).all()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype, kernel", [(d, k) for d in DTYPES for k in (*KERNELS, *TENSOR) if k not in TENSOR or d != "float32"])
def test_rounds_to_nearest_even(library, dtype, kernel):
    """q = 0 and two keys of any finite bit patterns: the mean of the two, rounded as NumPy rounds; subnormals and overflow included."""
    problem = Problem(Case(drafts=(1,) * 16, prefix=(1,) * 16, heads=1, latent=512, rope=0, dtype=dtype, tree="causal"))
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2 ** (8 * problem.pool.itemsize), problem.pool.shape, np.uint64).astype(f"u{problem.pool.itemsize}")
    values = bits.view(problem.pool.dtype)
    problem.pool[...] = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(1))
    problem.q[...] = 0
    tensors, config = problem.tensors(), problem.plan_for(kernel)
    workspace = make_workspace(library, config)
    binding.check(library, library.nvr_plan_update(config, problem.indices(), workspace.ctypes.data, workspace.size, None))
    binding.check(library, getattr(library, f"nvr_verify_{kernel}")(config, tensors, workspace.ctypes.data, workspace.size, None))
    pairs = problem.pool[problem.pages[: problem.total_entries].reshape(16, 2), 0].astype(np.float32)
    with np.errstate(over="ignore"):
        mean = (pairs[:, 0] + pairs[:, 1]) * np.float32(0.5)
        np.testing.assert_array_equal(problem.out[:16, 0], mean.astype(problem.out.dtype))


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", ["paged", *TENSOR])
def test_cyclic_parents_and_wild_lengths_stay_inside(library, kernel):
    """Bad device data gives some result and no hang. That nothing outside is touched is the smoke program's to show, under sanitizers."""
    problem = Problem(suited(Case(), kernel))
    problem.tree_array[:3] = [2, 0, 1]
    problem.qo[2], problem.kv[3], problem.lens[0] = -5, 10**6, 10**9
    run(library, problem, kernel)


def edit(**changes):
    """A mutation: sets fields of nested structs, `a__b` = a.b."""

    def apply(structs):
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = structs
            for parent in parents:
                target = target[parent] if isinstance(target, dict) else getattr(target, parent)
            if isinstance(target, dict):
                target[last] = value
            else:
                setattr(target, last, value)

    return apply


def shift(path, by):
    def apply(structs):
        struct, field = path.split("__")
        setattr(structs[struct], field, getattr(structs[struct], field) + by)

    return apply


# (function, what is wrong, status, what the text says)
REFUSALS = [
    ("update", edit(config=None), Status.NULL_POINTER, "config is NULL"),
    ("update", edit(indices=None), Status.NULL_POINTER, "indices is NULL"),
    ("paged", edit(tensors=None), Status.NULL_POINTER, "tensors is NULL"),
    ("flash", edit(workspace=None), Status.NULL_POINTER, "workspace is NULL"),
    ("naive", edit(tensors__q=None), Status.NULL_POINTER, "q is NULL"),
    ("naive", edit(tensors__kv_cache=None), Status.NULL_POINTER, "kv_cache is NULL"),
    ("naive", edit(tensors__draft_kv=None), Status.NULL_POINTER, "draft_kv is NULL"),
    ("naive", edit(tensors__out=None), Status.NULL_POINTER, "out is NULL"),
    ("update", edit(indices__kv_indices__data=None), Status.NULL_POINTER, "kv_indices is NULL"),
    ("update", edit(indices__tree__data=None), Status.NULL_POINTER, "tree.data is NULL"),
    ("update", edit(indices__kv_lens=binding.IndexArray(width=4)), Status.NULL_POINTER, "kv_lens is NULL, but page_size is 4"),
    ("paged", shift("tensors__q", 4), Status.ALIGNMENT, "multiple of 16 bytes"),
    ("paged", shift("tensors__lse", 2), Status.ALIGNMENT, "lse is at"),
    ("paged", edit(tensors__q_row_stride=577), Status.STRIDE, "q_row_stride is 577 elements, expected a multiple of 4 (16 bytes)"),
    ("paged", edit(tensors__q_head_stride=-192), Status.STRIDE, "q_head_stride is -192"),
    ("paged", edit(tensors__kv_page_stride=1), Status.STRIDE, "kv_page_stride"),
    ("paged", edit(tensors__kv_token_stride=1), Status.STRIDE, "kv_token_stride"),
    ("paged", edit(tensors__draft_row_stride=1), Status.STRIDE, "draft_row_stride"),
    ("paged", edit(tensors__out_row_stride=1), Status.STRIDE, "out_row_stride"),
    ("paged", edit(tensors__out_head_stride=1), Status.STRIDE, "out_head_stride"),
    ("update", edit(config__num_heads=0), Status.SIZE, "num_heads is 0, expected 1 .. 262140"),
    ("update", edit(config__page_size=0), Status.SIZE, "page_size is 0"),
    ("update", edit(config__draft_in_cache=2), Status.SIZE, "draft_in_cache is 2"),
    ("update", edit(config__deterministic=-1), Status.SIZE, "deterministic is -1"),
    ("update", edit(config__max_batch=-1), Status.SIZE, "max_batch is -1"),
    ("update", edit(config__max_total_q=2**31), Status.SIZE, "max_total_q is 2147483648"),
    ("update", edit(config__max_kv_entries=2**31), Status.SIZE, "max_kv_entries"),
    ("update", edit(indices__batch=-1), Status.SIZE, "batch is -1"),
    ("update", edit(indices__qo_indptr__length=4), Status.SIZE, "qo_indptr has 4 elements, expected at least 5"),
    ("update", edit(indices__kv_indptr__length=1), Status.SIZE, "kv_indptr has 1"),
    ("update", edit(indices__kv_lens__length=3), Status.SIZE, "kv_lens has 3"),
    ("update", edit(indices__tree__length=-1), Status.SIZE, "tree.length is -1"),
    ("paged", edit(tensors__q_rows=-1), Status.SIZE, "q_rows is -1"),
    ("paged", edit(tensors__kv_pages=-1), Status.SIZE, "kv_pages is -1"),
    ("update", edit(config__dtype=3), Status.DTYPE, "unknown dtype 3"),
    ("update", edit(indices__qo_indptr__width=2), Status.DTYPE, "qo_indptr has width 2"),
    ("update", edit(config__kernel=3), Status.DTYPE, "dtype float32: mma takes bfloat16 and float16; paged would run"),
    ("update", edit(config__kernel=4), Status.DTYPE, "dtype float32: wgmma takes bfloat16 and float16; paged would run"),
    ("update", edit(config__kernel=5), Status.OPTION, "unknown kernel 5"),
    ("update", edit(config__kernel=-1), Status.OPTION, "unknown kernel -1"),
    ("paged", edit(config__kernel=3, config__dtype=0), Status.OPTION, "a plan with kernel = 3 cannot run kernel 2"),
    ("mma", edit(config__kernel=2), Status.OPTION, "a plan with kernel = 2 cannot run kernel 3: mma and wgmma cut work into tiles of their own"),
    ("wgmma", edit(config__kernel=3, config__dtype=0), Status.OPTION, "a plan with kernel = 3 cannot run kernel 4"),
    ("update", edit(config__tile_config=4), Status.OPTION, "unknown tile configuration 4"),
    ("update", edit(config__kernel=3, config__dtype=0, config__tile_config=8), Status.OPTION, "unknown tile configuration 8"),
    ("update", edit(config__kernel=4, config__dtype=0, config__tile_config=-1), Status.OPTION, "unknown tile configuration -1"),
    ("update", edit(config__kernel=4, config__dtype=0, config__tile_config=99), Status.OPTION, "unknown tile configuration 99"),
    ("update", edit(indices__tree__kind=5), Status.OPTION, "unknown tree kind 5"),
    ("paged", edit(config__draft_in_cache=1), Status.OPTION, "draft_kv is given"),
    ("update", edit(config__max_batch=3), Status.CAPACITY, "batch is 4, the plan's max_batch is 3"),
    ("update", edit(config__max_kv_entries=5), Status.CAPACITY, "the plan's max_kv_entries is 5"),
    ("update", shift("size__value", -1), Status.WORKSPACE, "this plan needs"),
    ("paged", edit(size__value=0), Status.WORKSPACE, "the workspace has 0 bytes"),
    ("update", edit(config__latent_dim=48), Status.UNSUPPORTED_DIMS, "latent_dim is 48; the kernels take multiples of 32 from 32 to 512"),
    ("update", edit(config__latent_dim=544), Status.UNSUPPORTED_DIMS, "latent_dim is 544"),
    ("update", edit(config__rope_dim=160), Status.UNSUPPORTED_DIMS, "rope_dim is 160"),
    ("update", edit(config__kernel=3, config__dtype=1, config__latent_dim=256, config__rope_dim=0), Status.UNSUPPORTED_DIMS,
     "latent_dim is 256 and rope_dim 0; mma is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run"),
    ("update", edit(config__kernel=4, config__dtype=1, config__latent_dim=256, config__rope_dim=128), Status.UNSUPPORTED_DIMS,
     "latent_dim is 256 and rope_dim 128; wgmma is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run"),
]


@pytest.mark.parametrize(("function", "mutate", "status", "text"), REFUSALS, ids=[f"{f}: {t[:40]}" for f, _, _, t in REFUSALS])
def test_refuses(library, function, mutate, status, text):
    problem = Problem(Case(page_size=4, aside=True))
    workspace = make_workspace(library, problem.config())
    structs = {"config": problem.config(), "indices": problem.indices(), "tensors": problem.tensors(),
               "workspace": workspace.ctypes.data, "size": ctypes.c_uint64(workspace.size)}  # fmt: skip
    mutate(structs)
    call = library.nvr_plan_update if function == "update" else getattr(library, f"nvr_verify_{function}")
    data = structs["indices" if function == "update" else "tensors"]
    assert call(structs["config"], data, structs["workspace"], structs["size"], None) == status
    assert text in library.nvr_last_error().decode()
    assert (problem.out == 7).all() and (problem.lse == 7).all()


def test_shared_memory_limit_has_numbers(library):
    config = Problem(Case(latent=512, rope=128, tile=H8_K32)).config()
    assert library.nvr_can_run(config, binding.KERNELS["naive"]) == Status.OK
    assert library.nvr_can_run(config, binding.KERNELS["flash"]) == Status.SHARED_MEMORY
    assert "needs 103608 B of shared memory, this device has 101376 B" in library.nvr_last_error().decode()
    assert library.nvr_can_run(config, 5) == Status.OPTION


def test_sizes_need_an_address(library):
    config = Problem(Case()).config()
    assert library.nvr_workspace_bytes(config, None) == Status.NULL_POINTER
    assert library.nvr_shared_bytes(config, 0, None) == Status.NULL_POINTER
    assert library.nvr_shared_bytes(config, 9, ctypes.c_uint64()) == Status.OPTION


def test_every_status_has_a_name(library):
    for status in Status:
        name = "NVR_OK" if status == Status.OK else f"NVR_ERROR_{status.name}"
        assert library.nvr_status_string(status).decode() == name
    for unknown in (-1, len(Status)):
        assert library.nvr_status_string(unknown) == b"unknown status"


def test_another_abi_is_refused(monkeypatch):
    path = build.build_host()
    monkeypatch.setattr(binding, "ABI_VERSION", 999)
    monkeypatch.setattr(binding, "_loaded", {})
    with pytest.raises(RuntimeError, match="has ABI version 3, this binding needs 999"):
        binding.load(path)


@pytest.mark.parametrize(("status", "error"), [(Status.SIZE, ValueError), (Status.LAUNCH, RuntimeError), (Status.BARRIER, RuntimeError)])
def test_status_becomes_an_exception(library, status, error):
    with pytest.raises(error, match=f"NVR_ERROR_{status.name}"):
        binding.check(library, status)
