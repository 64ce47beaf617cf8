"""plan() and Plan: every check the host can make, the workspace, and the order of device work.

Shared by both implementations. What differs between them is the `Implementation` record they pass: which kernels there are, why one
cannot run, and how an executor of a spec is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import arrays, validation
from .arrays import ArrayView, view
from .errors import UnsupportedError
from .gpu import driver
from .kernels.wgmma_config import FEWEST_ROWS
from .memory import Workspace
from .problem import (
    MAX_DRAFT_TOKENS,
    VALUE_DTYPES,
    Enqueue,
    IndexArrays,
    PlanSpec,
    TreeInput,
    check_contiguous,
    check_count,
    check_device,
    check_index_array,
    check_kernel_name,
    check_lse,
    check_rows,
    check_tensors,
    check_writable,
    rows_of_a_request,
)
from .tree import DraftTree


class Implementation(NamedTuple):
    """One implementation of the kernels. `fastest`: its kernels in the order "auto" looks through on a GPU.

    support(kernel, num_heads, latent_dim, rope_dim, dtype, page_size, device) -> reason text, empty when it can run.
    make_executor(spec) -> an object with workspace_bytes, bind, prepare_update, prepare_run (numba_verify.backend.Executor).
    """

    name: str
    fastest: tuple[str, ...]
    support: Callable[..., str]
    make_executor: Callable[[PlanSpec], Any]
    host_default: str


class Support:
    """Answer of `can_run`: truthy or falsy, with `reason` (empty when it can run) and `kernel` (what "auto" would take for one draft token a
    request, not `deterministic`)."""

    def __init__(self, kernel: str, reason: str):
        self.kernel, self.reason = kernel, reason

    def __bool__(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        return f"Support(kernel={self.kernel!r}, can_run={bool(self)}{', reason=' + repr(self.reason) if self.reason else ''})"


def fastest_kernels(implementation: Implementation, rows: int) -> tuple[str, ...]:
    """What "auto" looks through on a GPU, for requests of `rows` query rows."""
    return tuple(name for name in implementation.fastest if name != "wgmma" or rows >= FEWEST_ROWS)


def choose_kernel(implementation: Implementation, kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str, page_size: int,
                  device: int | None, rows: int | None = None) -> Support:
    """The kernel that would run, or why the one asked for cannot. rows: that a request is expected to have (`PlanSpec`); None: not known."""
    check_kernel_name(kernel)
    if kernel == "auto" and device is None:
        kernel = implementation.host_default
    names = fastest_kernels(implementation, rows or num_heads) if kernel == "auto" else (kernel,)
    reason = ""
    for name in names:
        reason = implementation.support(name, num_heads, latent_dim, rope_dim, dtype, page_size, device)
        if not reason:
            return Support(name, "")
    return Support(names[0], reason)


def default_validate() -> bool:
    """`NUMBA_VERIFY_VALIDATE`: empty, 0, false, no and off mean no."""
    return os.environ.get("NUMBA_VERIFY_VALIDATE", "").strip().lower() not in ("", "0", "false", "no", "off")


class Repeatable(NamedTuple):
    """A call that passed every check, for the next one like it. It keeps no array of the caller.

    `key`: all that the checks looked at but the addresses, so that an equal key is a check passed. `rows`: the least of q, out, lse, draft_kv;
    `library`: whose current stream counts.
    """

    key: tuple
    rows: int
    library: str
    enqueue: Enqueue


class Plan:
    """One verify step's lengths, page lists and trees, laid out on the device for any number of `run` calls (one a layer).

    Made by `plan`. `update` replaces the step in place; both `update` (with device arrays) and `run` (with `out` given, and `lse` where
    it is wanted) neither allocate nor synchronise, and can be captured in a CUDA graph that may be replayed with other contents.
    The plan keeps copies of everything: the caller's index arrays may be reused once the stream has passed the call.
    """

    def __init__(self, implementation: Implementation, spec: PlanSpec, validate: bool):
        self.spec, self._implementation, self._validate = spec, implementation, validate
        self._executor = implementation.make_executor(spec)
        # DraftTree comes from the host: on a GPU its visibility bits, uint32 [max_total_q, words], are uploaded here.
        self._tree_upload: driver.StagedUpload | None = None
        if spec.device is not None:
            self._tree_upload = driver.StagedUpload(4 * spec.max_total_q * spec.visibility_words, spec.device)
        self._workspace = Workspace(self._executor.workspace_bytes, spec.device)
        self._executor.bind(self._workspace)
        self._checked: validation.Checked | None = None
        self._host_rows = 0  # query rows a host DraftTree promised; 0 when only the device knows
        # Most calls differ from the one before in addresses alone, another layer's. validate=True looks at contents, which no key tells.
        self._recognises = spec.device is not None and not validate
        self._last_update: Repeatable | None = None
        self._last_run: Repeatable | None = None
        # Held while a call enqueues. A launch lets other threads run, and a second one in this plan would write the arguments of its launches
        # into the same storage, or put its attention between that of the first and the merge of its partial results.
        self._lock = threading.Lock()

    @property
    def kernel(self) -> str:
        """Name of the kernel that runs."""
        return self.spec.kernel

    @property
    def tile(self) -> str:
        """Name of the tile configuration it runs with; "" for a kernel without one."""
        return str(getattr(self._executor, "tile", ""))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch the plan owns, room for a host `DraftTree` included; `run` and `update` allocate nothing beyond."""
        return self._workspace.nbytes + (self._tree_upload.buffer.nbytes if self._tree_upload is not None else 0)

    def __repr__(self) -> str:
        return f"<{self._implementation.name} plan: {self.spec}, workspace_bytes={self.workspace_bytes:,}>"

    def update(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, *, tree: Any = None, kv_lens: Any = None, stream: Any = None) -> None:
        """Take another step's index arrays and tree, within the capacities; device work only.

        Shapes and dtypes as in `plan`. Raises ValueError / TypeError for what the host can see, also when a host `DraftTree` comes under
        stream capture (its upload would be recorded with today's contents); with validate=True IndexError / ValueError for bad contents.
        """
        spec, last = self.spec, self._last_update
        host_tree = tree if isinstance(tree, DraftTree) else None
        key = None
        if self._recognises and host_tree is None:
            layouts = arrays.layouts_of((qo_indptr, kv_indptr, kv_indices, kv_lens, tree))
            if layouts is not None:
                addresses, key = layouts
                if last is not None and last.key == key:
                    self._enqueue(last, stream, addresses)
                    self._host_rows = 0
                    return
        qo = check_index_array(qo_indptr, "qo_indptr", spec.device)
        handle = _stream_of(stream, qo.library, qo.device)
        if (host_tree is not None or self._validate) and is_capturing(handle, spec.device):
            raise ValueError("update: a host DraftTree cannot be captured in a CUDA graph; pass device parents, bits or a mask instead"
                             if host_tree is not None else
                             "update: validate=True synchronises and cannot be captured; plan with validate=False")
        indices = self._check_step(qo, kv_indptr, kv_indices, tree, kv_lens)
        with _on(spec.device), self._lock:
            if host_tree is not None:
                indices = indices._replace(tree=self._upload(host_tree, handle))
            if self._validate:
                self._checked = validation.check_indices(spec, indices, host_tree, handle)
            enqueue = self._executor.prepare_update(indices)
            enqueue(handle, _addresses(indices.arrays))
        if key is not None:
            self._last_update = Repeatable(key, 0, qo.library, enqueue)
        self._host_rows = host_tree.num_nodes if host_tree is not None else 0

    def _check_step(self, qo: ArrayView, kv_indptr: Any, kv_indices: Any, tree: Any, kv_lens: Any) -> IndexArrays:
        spec = self.spec
        kv_ptr = check_index_array(kv_indptr, "kv_indptr", spec.device)
        pages = check_index_array(kv_indices, "kv_indices", spec.device)
        lens = None if kv_lens is None else check_index_array(kv_lens, "kv_lens", spec.device)
        batch = check_batch(qo, kv_ptr, lens, spec.page_size)
        for got, most, name, what in ((batch, spec.max_batch, "qo_indptr", "requests (max_batch)"),
                                      (pages.shape[0], spec.max_kv_entries, "kv_indices", "entries (max_kv_entries)")):
            if got > most:
                raise ValueError(f"{name}: expected at most {most} {what}, got {got}; plan with a larger capacity")
        return IndexArrays(batch, qo, kv_ptr, pages, lens, check_tree(tree, spec, batch))

    def _upload(self, tree: DraftTree, stream: int) -> TreeInput:
        words = tree.visibility.shape[1]
        bits = np.ascontiguousarray(tree.visibility)
        address = bits.ctypes.data
        if self._tree_upload is not None:
            address = self._tree_upload.buffer.address
            self._tree_upload.copy(bits, stream)
        array = ArrayView(address, bits.shape, arrays.contiguous_strides(bits.shape), "uint32", self.spec.device, "numpy", bits)
        return TreeInput("bits", array, words, bits.size)

    def run(self, q: Any, kv_cache: Any, *, sm_scale: float, draft_kv: Any = None, logit_cap: float = 0.0, out: Any = None, lse: Any = None,
            return_lse: bool = False, stream: Any = None) -> Any:
        """One layer's attention over the planned step.

        q [>= total_q, H, D], kv_cache in any form of the contract, draft_kv [>= total_q, D] when planned with draft_in_cache=False,
        all in the plan's dtype; out [rows, H, latent_dim] in that dtype and lse [rows, H] float32 are written in place when given.
        Returns out, or (out, lse) with return_lse=True or when lse was given. Rows at and after qo_indptr[-1] are left alone.
        ValueError / TypeError for anything the host can see to be wrong; nothing is written then.
        """
        spec, last, key = self.spec, self._last_run, None
        # Numbers of any other type are left to the checks: True == 1.0, and an array may change and stay equal to itself.
        if self._recognises and out is not None and (lse is not None or not return_lse) and type(sm_scale) is type(logit_cap) is float:
            layouts = arrays.layouts_of((q, kv_cache, draft_kv, out, lse))
            if layouts is not None:
                addresses, key = layouts[0], (layouts[1], sm_scale, logit_cap)
                if last is not None and last.key == key and last.rows >= self._host_rows:
                    self._enqueue(last, stream, addresses)
                    return (out, lse) if lse is not None else out
        queries = check_rows(q, "q", spec, (spec.num_heads, spec.row_dim))
        handle = _stream_of(stream, queries.library, queries.device)
        given_out = out is not None
        if given_out:
            out_view = check_rows(out, "out", spec, (spec.num_heads, spec.latent_dim))
            check_writable(out_view, "out")
        lse_view = check_lse(lse, spec) if lse is not None else None
        if not given_out:
            # a stand-in with the right layout, so that the remaining checks come before anything is allocated
            shape = (queries.shape[0], spec.num_heads, spec.latent_dim)
            out_view = queries._replace(shape=shape, strides=arrays.contiguous_strides(shape))
        tensors = check_tensors(spec, queries, kv_cache, draft_kv, out_view, lse_view, sm_scale, logit_cap)
        rows_of = [(got.shape[0], name) for got, name in ((queries, "q"), (out_view, "out"), (lse_view, "lse"), (tensors.draft_kv, "draft_kv"))
                   if got is not None]
        for rows, name in rows_of:
            if rows < self._host_rows:
                raise ValueError(f"{name}: expected at least {self._host_rows} rows, one a node of the planned tree, got {rows}")
        with _on(spec.device):
            if self._validate:
                if is_capturing(handle, spec.device):
                    raise ValueError("run: validate=True synchronises and cannot be captured; plan with validate=False")
                validation.check_run(self._checked, tensors)
            if not given_out:
                out = arrays.empty(out_view.shape, spec.dtype, queries, handle)
                tensors = tensors._replace(out=view(out, "out"))
            if lse is None and return_lse:
                lse = arrays.empty((queries.shape[0], spec.num_heads), "float32", queries, handle)
                tensors = tensors._replace(lse=view(lse, "lse"))
            enqueue = self._executor.prepare_run(tensors)
            with self._lock:
                enqueue(handle, _addresses(tensors.arrays))
        if key is not None:
            self._last_run = Repeatable(key, min(rows_of)[0], queries.library, enqueue)
        return (out, lse) if lse is not None else out

    def _enqueue(self, call: Repeatable, stream: Any, addresses: list[int]) -> None:
        """The device work of a call that was recognised."""
        handle = _stream_of(stream, call.library, self.spec.device)
        with driver.context(self.spec.device), self._lock:
            call.enqueue(handle, addresses)


def _addresses(views: tuple[ArrayView | None, ...]) -> list[int]:
    return [0 if array is None else array.address for array in views]


class _NoContext:
    """Stands in for a CUDA context where there is none."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _on(device: int | None):
    return _NoContext() if device is None else driver.context(device)


def _stream_of(stream: Any, library: str, device: int | None) -> int:
    handle = None if stream is None else arrays.stream_handle(stream)
    if device is None:
        return 0
    return arrays.current_stream(library, device) if handle is None else handle


def is_capturing(stream: int, device: int | None) -> bool:
    """True while `stream` of GPU `device` records a CUDA graph; never for the host."""
    if device is None:
        return False
    with driver.context(device):
        return driver.is_capturing(stream)


def check_batch(qo: ArrayView, kv_ptr: ArrayView, lens: ArrayView | None, page_size: int) -> int:
    """Requests of a step, from arrays whose lengths must agree."""
    batch = qo.shape[0] - 1
    if batch < 0:
        raise ValueError("qo_indptr: expected at least one entry (batch + 1), got 0")
    if kv_ptr.shape[0] != batch + 1:
        raise ValueError(f"kv_indptr: expected {batch + 1} entries like qo_indptr, got {kv_ptr.shape[0]}")
    if lens is not None and lens.shape[0] != batch:
        raise ValueError(f"kv_lens: expected {batch} entries, one a request, got {lens.shape[0]}")
    if lens is None and page_size > 1:
        raise ValueError(f"kv_lens: needed with page_size={page_size}, since the last page of a request may be partly filled; pass its tokens")
    return batch


def check_tree(tree: Any, spec: PlanSpec, batch: int) -> TreeInput:
    """Any form of the `tree` argument -> TreeInput. For a DraftTree the array is filled in after its upload."""
    if tree is None:
        return TreeInput("causal", None, 0, 0)
    if isinstance(tree, DraftTree):
        if tree.batch_size != batch:
            raise ValueError(f"tree: expected {batch} requests like qo_indptr, got a DraftTree of {tree.batch_size}")
        _check_tree_rows(tree.num_nodes, spec)
        return TreeInput("bits", None, tree.visibility.shape[1], tree.visibility.size)
    got = view(tree, "tree")
    check_device(got, "tree", spec.device)
    check_contiguous(got, "tree")
    kind = _tree_kind(got)
    if kind in ("parents", "bits"):
        _check_tree_rows(got.shape[0], spec)
    if kind == "dense" and (got.shape[0] < batch or got.shape[1] != got.shape[2]):
        raise ValueError(f"tree: expected a mask [>= {batch}, N, N], got {list(got.shape)}")
    return TreeInput(kind, got, got.shape[1] if kind in ("bits", "dense") else 0, math.prod(got.shape))


def _check_tree_rows(rows: int, spec: PlanSpec) -> None:
    if rows > spec.max_total_q:
        raise ValueError(f"tree: expected at most {spec.max_total_q} rows (max_total_q), got {rows}; plan with a larger capacity")


def _tree_kind(got: ArrayView) -> str:
    rank, dtype = len(got.shape), got.dtype
    if rank == 1 and dtype == "int32":
        return "parents"
    if rank == 1 and dtype in ("bool", "uint8"):
        return "full_mask"
    if rank == 2 and dtype in ("int32", "uint32"):
        return "bits"
    if rank == 3 and dtype in ("bool", "uint8"):
        return "dense"
    raise TypeError("tree: expected a DraftTree, parents int32 [total_q], bits uint32 or int32 [total_q, words], bool [bs, N, N], or a flat bool "
                    f"or uint8 full mask, got {dtype} of rank {rank}")


def tree_rows(tree: Any, batch: int) -> int | None:
    """Query rows a tree argument has room for; None when its form does not say."""
    if tree is None:
        return None
    if isinstance(tree, DraftTree):
        return tree.num_nodes
    got = view(tree, "tree")
    kind = _tree_kind(got)
    return got.shape[0] if kind in ("parents", "bits") else batch * got.shape[1] if kind == "dense" else None


class PlanArguments(NamedTuple):
    """The keyword arguments of `plan` that shape it."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    dtype: Any
    page_size: int
    draft_in_cache: bool
    kernel: str
    deterministic: bool
    max_batch: int | None
    max_total_q: int | None
    max_kv_entries: int | None


def make_spec(implementation: Implementation, qo: ArrayView, kv_indices: ArrayView, tree: Any, given: PlanArguments, stream: int,
              request_rows: int | None = None) -> PlanSpec:
    """Check the arguments of `plan` and fill in capacities from the arrays; where only qo_indptr knows, it is read in the order of `stream`.
    request_rows: query rows of a request; None: what the capacities say."""
    num_heads, page_size = check_count(given.num_heads, "num_heads", 1), check_count(given.page_size, "page_size", 1)
    latent, rope = check_count(given.latent_dim, "latent_dim", 1), check_count(given.rope_dim, "rope_dim", 0)
    dtype = arrays.dtype_name(given.dtype)
    for flag, name in ((given.draft_in_cache, "draft_in_cache"), (given.deterministic, "deterministic")):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    batch = qo.shape[0] - 1
    if batch < 0:
        raise ValueError("qo_indptr: expected at least one entry (batch + 1), got 0")
    chosen = choose_kernel(implementation, given.kernel, num_heads, latent, rope, dtype, page_size, qo.device, request_rows)
    if not chosen:
        raise UnsupportedError(f"{implementation.name}: {chosen.reason}")
    rows = given.max_total_q
    if rows is None:
        rows = tree_rows(tree, batch)
    if rows is None:  # a chain or a flat mask: only qo_indptr itself knows how many rows there are
        rows = int(validation.to_host(qo, stream)[-1])
        if not 0 <= rows <= batch * MAX_DRAFT_TOKENS:
            raise ValueError(f"qo_indptr: expected a last entry from 0 to {batch * MAX_DRAFT_TOKENS} ({MAX_DRAFT_TOKENS} draft tokens a request), "
                             f"got {rows} at position {batch}")
    max_batch = batch if given.max_batch is None else check_count(given.max_batch, "max_batch", 0)
    entries = kv_indices.shape[0] if given.max_kv_entries is None else check_count(given.max_kv_entries, "max_kv_entries", 0)
    spec = PlanSpec(num_heads, latent, rope, dtype, page_size, bool(given.draft_in_cache), chosen.kernel, bool(given.deterministic),
                    max(max_batch, 1), max(check_count(rows, "max_total_q", 0), 1), max(entries, 1), qo.device)
    if given.kernel == "auto" and qo.device is not None and request_rows is None:  # only now are they known
        best = choose_kernel(implementation, "auto", num_heads, latent, rope, dtype, page_size, qo.device, spec.rows_of_a_request)
        spec = dataclasses.replace(spec, kernel=best.kernel)
    return spec


def make_plan(implementation: Implementation, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, tree: Any, kv_lens: Any, validate: bool | None,
              stream: Any, given: PlanArguments) -> Plan:
    """`plan` of an implementation: check, allocate, and lay out the first step."""
    qo, pages = check_index_array(qo_indptr, "qo_indptr"), check_index_array(kv_indices, "kv_indices")
    check_device(pages, "kv_indices", qo.device)
    handle = _stream_of(stream, qo.library, qo.device)
    if is_capturing(handle, qo.device):
        raise ValueError("plan: it allocates and cannot be captured in a CUDA graph; plan before the capture, and capture update and run")
    spec = make_spec(implementation, qo, pages, tree, given, handle)
    plan = Plan(implementation, spec, default_validate() if validate is None else bool(validate))
    plan.update(qo_indptr, kv_indptr, kv_indices, tree=tree, kv_lens=kv_lens, stream=stream)
    return plan


#: Plans `verify_mla` keeps a thread: enough for a model's few shapes, few enough that forgotten ones do not hold much memory.
KEPT_PLANS = 8
_kept = threading.local()
# Plans that a CUDA graph was recorded with: it has their addresses, and nobody can tell when it is gone.
_captured: set[Plan] = set()


def _room(count: int) -> int:
    """Capacity of a kept plan: the next power of two, so that a list that grows by a token a step does not want a new plan every step."""
    return 1 << max(count - 1, 0).bit_length()


def verify_once(implementation: Implementation, q: Any, kv_cache: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, *, tree: Any,
                sm_scale: Any, kv_lens: Any, draft_kv: Any, logit_cap: Any, latent_dim: int, rope_dim: int | None, page_size: int,
                kernel: str, deterministic: bool, validate: bool | None, out: Any, lse: Any, return_lse: bool, stream: Any) -> Any:
    """`verify_mla` of an implementation: a plan for this very shape, kept for the next call of the same thread and stream."""
    queries = view(q, "q")
    if len(queries.shape) != 3:
        raise ValueError(f"q: expected shape [rows, heads, latent_dim + rope_dim], got {list(queries.shape)}")
    if queries.dtype not in VALUE_DTYPES:
        raise TypeError(f"q: expected {', '.join(VALUE_DTYPES)}, got {queries.dtype}")
    qo, pages = check_index_array(qo_indptr, "qo_indptr", queries.device), check_index_array(kv_indices, "kv_indices", queries.device)
    batch = qo.shape[0] - 1
    latent_dim = check_count(latent_dim, "latent_dim", 1)
    rope = queries.shape[2] - latent_dim if rope_dim is None else check_count(rope_dim, "rope_dim", 0)
    if rope < 0 or latent_dim + rope != queries.shape[2]:
        raise ValueError(f"q: expected a last dimension of latent_dim + rope_dim = {latent_dim + max(rope, 0)}, got {queries.shape[2]}")
    rows = max(queries.shape[0], tree_rows(tree, batch) or 0)
    handle = _stream_of(stream, queries.library, queries.device)
    given = PlanArguments(queries.shape[1], latent_dim, rope, queries.dtype, page_size, draft_kv is None, kernel, deterministic,
                          _room(batch), _room(rows), _room(pages.shape[0]))
    spec = make_spec(implementation, qo, pages, tree, given, handle, rows_of_a_request(rows, batch, queries.shape[1], deterministic))
    checking = default_validate() if validate is None else bool(validate)
    plans: OrderedDict[Any, Plan] = _kept.__dict__.setdefault("plans", OrderedDict())
    key = (implementation.name, spec, checking, handle)
    plan, capturing = plans.pop(key, None), is_capturing(handle, spec.device)
    if plan is None:
        if capturing:
            raise ValueError("verify_mla: the first call of a shape allocates and cannot be captured; call it once before the capture, or use plan")
        plan = Plan(implementation, spec, checking)
    if capturing:
        _captured.add(plan)
    plans[key] = plan
    while len(plans) > KEPT_PLANS:
        plans.popitem(last=False)
    plan.update(qo_indptr, kv_indptr, kv_indices, tree=tree, kv_lens=kv_lens, stream=handle if queries.device is not None else None)
    return plan.run(q, kv_cache, sm_scale=sm_scale, draft_kv=draft_kv, logit_cap=logit_cap, out=out, lse=lse, return_lse=return_lse,
                    stream=handle if queries.device is not None else None)
