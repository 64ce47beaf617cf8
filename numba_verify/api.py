"""The public calls. `make_api` builds them for any implementation, so `cuda_ref` has the same signatures and the same documentation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import arrays, backend
from .errors import UnsupportedError
from .gpu import driver
from .planner import Implementation, Plan, PlanArguments, Support, choose_kernel, fastest_kernels, make_plan, verify_once
from .problem import MAX_DRAFT_TOKENS, check_count, check_kernel_name, rows_of_a_request


class Api(NamedTuple):
    """The four public functions of one implementation."""

    verify_mla: Callable
    plan: Callable
    can_run: Callable
    warmup: Callable


def make_api(implementation: Implementation, warm: Callable[..., list[str]]) -> Api:
    """The public functions over `implementation`. `warm(device, kernel, ...)` compiles and returns the names of what it made ready."""

    def verify_mla(q: Any, kv_cache: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, *, tree: Any = None, sm_scale: float,
                   kv_lens: Any = None, draft_kv: Any = None, logit_cap: float = 0.0, latent_dim: int = 512, rope_dim: int | None = None,
                   page_size: int = 1, kernel: str = "auto", deterministic: bool = False, validate: bool | None = None, out: Any = None,
                   lse: Any = None, return_lse: bool = False, stream: Any = None) -> Any:
        """Tree-verify attention with MLA, absorbed form, in one call.

        For draft token i and head h of a request with L cached prefix tokens and n draft tokens:

            score[j] = sm_scale * q[i, h] . kv[j]           over latent_dim + rope_dim; with logit_cap c > 0: c * tanh(score / c)
            out      = softmax(score) @ kv[:, :latent_dim]  over the whole prefix and the draft tokens visible to i
            lse      = ln sum_j exp(score[j])               natural logarithm

        q: [>= total_q, H, D], D = latent_dim + rope_dim, bfloat16 (ml_dtypes on NumPy), float16 or float32; total_q = qo_indptr[-1].
        kv_cache: [slots, D], [slots, 1, D], [pages, page_size, D] or [pages, page_size, 1, D], dtype of q.
        qo_indptr, kv_indptr: [bs + 1], int32 or int64: query rows, and entries of kv_indices, of each request.
        kv_indices: [>= kv_indptr[-1]], int32 or int64: page numbers (slots when page_size is 1), any order.
        tree: DraftTree; parents int32 [total_q]; bits uint32 or int32 [total_q, words]; bool [bs, N, N]; flat bool / uint8 full mask with
            row stride L + n; None = causal chain.
        kv_lens: [bs], int32 or int64: tokens of each request, draft tokens included when they lie in the cache; needed when page_size > 1.
        draft_kv: [>= total_q, D]: the draft tokens' KV rows; without it the last n tokens of each list are the draft tokens.
        out, lse: written in place when given; [rows, H, latent_dim] in q's dtype and [rows, H] float32.

        Returns out, or (out, lse) with return_lse=True or when lse is given; rows at and after total_q are left alone. A row that sees
        nothing gets out 0 and lse -inf. A plan is kept per thread, stream and shape (sizes rounded up to powers of two), so later calls
        allocate nothing else; a CUDA graph that recorded such a call keeps its plan for the life of the process.
        Raises ValueError, TypeError, IndexError (validate=True), UnsupportedError. Algorithm: online softmax (Milakov and Gimelshein 2018)
        in tiles (FlashAttention, Dao et al. 2022) with split KV merged by lse (Flash-Decoding, Dao et al. 2023).
        """
        return verify_once(implementation, q, kv_cache, qo_indptr, kv_indptr, kv_indices, tree=tree, sm_scale=sm_scale, kv_lens=kv_lens,
                           draft_kv=draft_kv, logit_cap=logit_cap, latent_dim=latent_dim, rope_dim=rope_dim, page_size=page_size,
                           kernel=kernel, deterministic=deterministic, validate=validate, out=out, lse=lse, return_lse=return_lse,
                           stream=stream)

    def plan(qo_indptr: Any, kv_indptr: Any, kv_indices: Any, *, tree: Any = None, num_heads: int, latent_dim: int = 512, rope_dim: int = 64,
             dtype: Any = "bfloat16", page_size: int = 1, kv_lens: Any = None, draft_in_cache: bool = True, kernel: str = "auto",
             deterministic: bool = False, validate: bool | None = None, max_batch: int | None = None, max_total_q: int | None = None,
             max_kv_entries: int | None = None, stream: Any = None) -> Plan:
        """Lay out one verify step; `Plan.run` it once a layer, `Plan.update` it for the next step.

        Arrays as in `verify_mla`. num_heads: query heads on this GPU. draft_in_cache: the last n tokens of each list are the draft tokens
        (True), or `run` gets them as draft_kv (False). deterministic: a request's bits depend on nothing but that request.
        max_batch, max_total_q, max_kv_entries: capacities for later updates; by default what these arrays hold. Without max_total_q a chain
        or a flat full mask costs one read of qo_indptr back to the host, the only synchronisation here (but for validate=True).
        Raises ValueError, TypeError, IndexError (validate=True), UnsupportedError.
        """
        given = PlanArguments(num_heads, latent_dim, rope_dim, dtype, page_size, draft_in_cache, kernel, deterministic, max_batch,
                              max_total_q, max_kv_entries)
        return make_plan(implementation, qo_indptr, kv_indptr, kv_indices, tree, kv_lens, validate, stream, given)

    def can_run(*, kernel: str = "auto", num_heads: int, latent_dim: int = 512, rope_dim: int = 64, dtype: Any = "bfloat16",
                page_size: int = 1, device: int | None = 0) -> Support:
        """Whether `kernel` runs such a problem on GPU `device` (None: on NumPy arrays). Truthy or falsy, `.reason` says why not."""
        heads, page_size = check_count(num_heads, "num_heads", 1), check_count(page_size, "page_size", 1)
        latent, rope = check_count(latent_dim, "latent_dim", 1), check_count(rope_dim, "rope_dim", 0)
        check_kernel_name(kernel)
        dtype = arrays.dtype_name(dtype)
        if device is not None and driver.unavailable():
            name = kernel if kernel != "auto" else fastest_kernels(implementation, heads)[0]
            return Support(name, f"no GPU can be used ({driver.unavailable()}); device=None asks for NumPy arrays")
        return choose_kernel(implementation, kernel, heads, latent, rope, dtype, page_size, device)

    def warmup(*, kernel: str = "auto", num_heads: int, latent_dim: int = 512, rope_dim: int = 64, dtype: Any = "bfloat16",
               page_size: int = 1, deterministic: bool = False, device: int = 0) -> dict[str, float]:
        """Compile (or load from the disk cache) everything a plan of this shape will launch on GPU `device`.

        Returns {"seconds": wall time, name of each kernel: seconds}. NoDeviceError with no GPU, UnsupportedError when it cannot run.
        """
        driver.require_device("warmup")
        driver.device_info(device)  # NoDeviceError when there is no such GPU
        chosen = can_run(kernel=kernel, num_heads=num_heads, latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype, page_size=page_size,
                         device=device)
        if not chosen:
            raise UnsupportedError(f"{implementation.name}: {chosen.reason}")
        times: dict[str, float] = {}
        begin = time.perf_counter()
        # What "auto" takes depends on the number of draft tokens.
        few, many = (rows_of_a_request(tokens, 1, num_heads, deterministic) for tokens in (1, MAX_DRAFT_TOKENS))
        kernels = [choose_kernel(implementation, kernel, num_heads, latent_dim, rope_dim, arrays.dtype_name(dtype), page_size, device, rows).kernel
                   for rows in (few, many)]
        for each in dict.fromkeys(kernels):
            for name, make in warm(device, each, num_heads, latent_dim, rope_dim, arrays.dtype_name(dtype), deterministic):
                if name not in times:
                    start = time.perf_counter()
                    make()
                    times[name] = time.perf_counter() - start
        return {"seconds": time.perf_counter() - begin, **times}

    for function in (verify_mla, plan, can_run, warmup):
        function.__module__, function.__qualname__ = implementation.name, function.__name__
    return Api(verify_mla, plan, can_run, warmup)


NUMBA = Implementation("numba_verify", backend.AVAILABLE, backend.support, backend.make_executor, "reference")
verify_mla, plan, can_run, warmup = make_api(NUMBA, backend.warm)
