"""What one call is: shapes, dtypes, strides and capacities, checked once and frozen.

Every check that the host can make lives here, so that both implementations refuse the same things with the same words and a kernel
never sees an argument it would have to doubt. Texts say what was expected, what came, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .arrays import ITEMSIZE, ArrayView, is_contiguous, view
from .kernels.config import MAX_DRAFT_TOKENS as MAX_DRAFT_TOKENS

KERNELS = ("naive", "flash", "paged", "mma", "wgmma", "reference")
VALUE_DTYPES = ("bfloat16", "float16", "float32")
INDEX_DTYPES = ("int32", "int64")
#: Enqueues one `update` or `run` on a stream (a handle) with the addresses of its arrays, 0 for one that is not there.
Enqueue = Callable[[int, Sequence[int]], None]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def rows_of_a_request(total_q: int, batch: int, num_heads: int, deterministic: bool) -> int:
    """Query rows (draft tokens x heads) of a request, on average.

    With `deterministic` what is chosen by them must not depend on the batch: then as many as the largest tile has.
    """
    return 64 if deterministic else -(-total_q // max(batch, 1)) * num_heads


@dataclass(frozen=True)
class PlanSpec:
    """What a plan is made for; nothing in it changes afterwards. `device` is a CUDA ordinal, or None for NumPy arrays."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    dtype: str
    page_size: int
    draft_in_cache: bool
    kernel: str
    deterministic: bool
    max_batch: int
    max_total_q: int
    max_kv_entries: int
    device: int | None

    @property
    def row_dim(self) -> int:
        """Elements of a KV row and of a query: latent, then rope."""
        return self.latent_dim + self.rope_dim

    @property
    def rows_of_a_request(self) -> int:
        """Query rows that a request is expected to have."""
        return rows_of_a_request(self.max_total_q, self.max_batch, self.num_heads, self.deterministic)

    @property
    def max_kv_tokens(self) -> int:
        """Cached tokens that `max_kv_entries` pages can list."""
        return self.max_kv_entries * self.page_size

    @property
    def visibility_words(self) -> int:
        """uint32 words of one row's visibility bits."""
        return max(1, -(-min(self.max_total_q, MAX_DRAFT_TOKENS) // 32))


class TreeInput(NamedTuple):
    """A tree in one of the forms of the contract. `stride`: "bits" words from row to row; "dense" N; else 0. `length`: its elements."""

    kind: str  # "causal", "parents", "bits", "dense", "full_mask"
    array: ArrayView | None
    stride: int
    length: int


class IndexArrays(NamedTuple):
    """One step's index arrays, checked: contiguous, int32 or int64 each on its own."""

    batch: int
    qo_indptr: ArrayView
    kv_indptr: ArrayView
    kv_indices: ArrayView
    kv_lens: ArrayView | None
    tree: TreeInput

    @property
    def arrays(self) -> tuple[ArrayView | None, ...]:
        """In the order in which an executor takes their addresses."""
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_lens, self.tree.array


class Tensors(NamedTuple):
    """The arguments of one `run`, checked. Strides count elements; the last dimension of each array has stride 1.

    `num_rows`: rows that q, out and lse all have; a kernel touches none beyond. `pool_rows`: pages * page_size.
    """

    q: ArrayView
    kv_cache: ArrayView
    draft_kv: ArrayView | None
    out: ArrayView
    lse: ArrayView | None
    num_rows: int
    pool_rows: int
    q_row_stride: int
    q_head_stride: int
    kv_page_stride: int
    kv_token_stride: int
    draft_row_stride: int
    out_row_stride: int
    out_head_stride: int
    sm_scale: float
    logit_cap: float

    @property
    def arrays(self) -> tuple[ArrayView | None, ...]:
        """In the order in which an executor takes their addresses."""
        return self.q, self.kv_cache, self.draft_kv, self.out, self.lse


def check_count(value: Any, name: str, minimum: int) -> int:
    """`value` as an int of at least `minimum`; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    value = value.__index__()
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    return value


def check_scalar(value: Any, name: str) -> float:
    """`value` as a float that is finite in float32, in which kernels compute; TypeError or ValueError otherwise."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name}: expected a finite number, got {number}" + ("" if not math.isfinite(number) else ", beyond float32"))
    return number


def check_kernel_name(kernel: Any) -> str:
    """`kernel` if the contract knows it; ValueError otherwise."""
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of auto, {', '.join(KERNELS)}, got {kernel!r}")
    return kernel


def check_index_array(array: Any, name: str, device: int | None | str = "any") -> ArrayView:
    """A contiguous rank-1 int32 or int64 array on `device`."""
    got = view(array, name)
    if got.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {got.dtype}")
    if len(got.shape) != 1:
        raise ValueError(f"{name}: expected rank 1, got shape {got.shape}")
    check_contiguous(got, name)
    if device != "any":
        check_device(got, name, device)
    return got


def check_contiguous(array: ArrayView, name: str) -> None:
    """A whole array without gaps, on a boundary of its own elements."""
    if not is_contiguous(array):
        raise ValueError(f"{name}: expected a contiguous array, got strides {array.strides} for shape {array.shape}; make it contiguous")
    if array.address % ITEMSIZE[array.dtype]:
        raise ValueError(f"{name}: expected an alignment of {ITEMSIZE[array.dtype]} B for {array.dtype}, got address {array.address:#x}; copy it")


def check_writable(array: ArrayView, name: str) -> None:
    """An array that results go to: writable, and with a place of its own for every row and head."""
    if not array.writable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if extent > 1 and stride == 0:
            raise ValueError(f"{name}: expected strides that are not 0, got {array.strides} for shape {list(array.shape)}: its rows overlap")


def check_device(array: ArrayView, name: str, device: int | None) -> None:
    if array.device != device:
        raise ValueError(f"{name}: expected on {device_text(device)} like the index arrays of the plan, got {device_text(array.device)}; "
                         "move one of them")


def device_text(device: int | None) -> str:
    return "the host" if device is None else f"cuda:{device}"


def check_rows(array: Any, name: str, spec: PlanSpec, inner: tuple[int, ...]) -> ArrayView:
    """An array [rows, *inner] in the plan's dtype and on its device, strides as promise 5 of the contract has them."""
    got = view(array, name)
    if len(got.shape) != 1 + len(inner) or got.shape[1:] != inner:
        raise ValueError(f"{name}: expected shape [rows, {', '.join(map(str, inner))}], got {list(got.shape)}")
    check_values(got, name, spec)
    return got


def check_values(array: ArrayView, name: str, spec: PlanSpec) -> None:
    """dtype, device, strides and alignment of an array that kernels read or write 16 bytes at a time."""
    if array.dtype != spec.dtype:
        raise TypeError(f"{name}: expected {spec.dtype} as the plan was made for, got {array.dtype}; convert it or plan with dtype={array.dtype!r}")
    check_device(array, name, spec.device)
    if 0 in array.shape:
        return
    itemsize = ITEMSIZE[array.dtype]
    if array.shape[-1] != 1 and array.strides[-1] != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {array.strides} elements for shape {list(array.shape)}")
    for extent, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
        if extent != 1 and (stride < 0 or stride * itemsize % 16):
            raise ValueError(f"{name}: expected strides in multiples of 16 B and not negative, got {stride * itemsize} B "
                             f"(strides {array.strides} elements for shape {list(array.shape)})")
    if array.address % 16:
        raise ValueError(f"{name}: expected 16 B alignment, got address {array.address:#x}; a slice that starts off a 16 B boundary has to be copied")


def row_stride(array: ArrayView, axis: int) -> int:
    """Stride of `axis` in elements; 0 for a dimension of size 1, whose stride may be anything."""
    return array.strides[axis] if array.shape[axis] != 1 else 0


def check_pool(array: Any, spec: PlanSpec) -> tuple[ArrayView, int, int, int]:
    """`kv_cache` in any of its four forms -> (view, pool rows, page stride, token stride)."""
    got = view(array, "kv_cache")
    shape, strides, page_size = got.shape, got.strides, spec.page_size
    slots_only = len(shape) == 2 and page_size == 1
    paged = (len(shape) == 3 or len(shape) == 4 and shape[2] == 1) and shape[1] == page_size  # page size 1: [slots, 1, D]
    if not (slots_only or paged) or shape[-1] != spec.row_dim:
        want = "[slots, D] or [slots, 1, D]" if page_size == 1 else f"[pages, {page_size}, D] or [pages, {page_size}, 1, D]"
        raise ValueError(f"kv_cache: expected {want} with D = {spec.row_dim} for page_size={page_size}, got {list(shape)}")
    check_values(got, "kv_cache", spec)
    pages, tokens, page_stride = shape[0], page_size, strides[0]
    token_stride = page_stride if tokens == 1 else strides[1]  # one token a page: the page is the slot
    if pages == 1:
        page_stride = tokens * token_stride  # its own stride may be anything; this one needs no correction in the kernels
    return got, pages * tokens, page_stride, token_stride


def check_tensors(spec: PlanSpec, q: ArrayView, kv_cache: Any, draft_kv: Any, out: ArrayView, lse: ArrayView | None,
                  sm_scale: Any, logit_cap: Any) -> Tensors:
    """Everything the host knows about one `run`. `q` has passed `check_rows`, `out` and `lse` come from the caller or from `empty`."""
    pool, pool_rows, page_stride, token_stride = check_pool(kv_cache, spec)
    draft = None
    if spec.draft_in_cache:
        if draft_kv is not None:
            raise ValueError("draft_kv: the plan was made with draft_in_cache=True, so the KV list ends with the draft tokens; "
                             "plan with draft_in_cache=False to pass draft_kv")
    elif draft_kv is None:
        raise ValueError("draft_kv: the plan was made with draft_in_cache=False and needs it; pass draft_kv or plan with draft_in_cache=True")
    else:
        draft = check_rows(draft_kv, "draft_kv", spec, (spec.row_dim,))
    scale = check_scalar(sm_scale, "sm_scale")
    cap = check_scalar(logit_cap, "logit_cap")
    if cap < 0:
        raise ValueError(f"logit_cap: expected 0 (off) or a positive number, got {cap}")
    num_rows = min(q.shape[0], out.shape[0]) if lse is None else min(q.shape[0], out.shape[0], lse.shape[0])
    return Tensors(q, pool, draft, out, lse, num_rows, pool_rows, row_stride(q, 0), row_stride(q, 1), page_stride, token_stride,
                   0 if draft is None else row_stride(draft, 0), row_stride(out, 0), row_stride(out, 1), scale, cap)


def check_lse(array: Any, spec: PlanSpec) -> ArrayView:
    """`lse`: contiguous float32 [rows, H]."""
    got = view(array, "lse")
    if len(got.shape) != 2 or got.shape[1] != spec.num_heads:
        raise ValueError(f"lse: expected shape [rows, {spec.num_heads}], got {list(got.shape)}")
    if got.dtype != "float32":
        raise TypeError(f"lse: expected float32, got {got.dtype}")
    check_contiguous(got, "lse")
    check_device(got, "lse", spec.device)
    check_writable(got, "lse")
    return got
