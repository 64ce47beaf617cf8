"""One small problem in which a test can replace any argument: for tests of what calls accept, refuse and leave alone.

Two requests, six rows of q of which two are padding, one key tile: milliseconds in the simulator, so every refusal can afford the good call
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_verify import DraftTree
from numba_verify.gpu.device_array import DeviceArray, upload
from numba_verify.memory import ALIGNMENT
from numba_verify.reference import attention

from . import machine
from .poison import Guarded, GuardedArrays
from .problems import DTYPES

HEADS, LATENT, ROPE, ROWS, SLOTS = 2, 32, 32, 6, 32
DIMS = LATENT + ROPE
SM_SCALE = 0.125
#: What a plan of every implementation can hold, and what runs fastest in the simulator.
KERNEL = "naive"
#: Two steps of the same requests, within the same capacities: (parents of each request, cached tokens of each).
STEPS = (([[-1, 0, 0], [-1]], (3, 2)), ([[-1], [-1, 0, 1]], (4, 1)))
PLAN_NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "tree", "kv_lens")


@dataclass
class Small:
    """Host arrays of step 0 or 1 of the problem."""

    step: int = 0
    page_size: int = 1
    aside: bool = False
    dtype: str = "float32"
    latent: int = LATENT
    rope: int = ROPE
    options: dict[str, Any] = field(default_factory=dict)  # more keywords of `plan`

    def __post_init__(self) -> None:
        (lists, prefix), rng = STEPS[self.step], np.random.default_rng(7)
        dtype, dims = DTYPES[self.dtype], self.latent + self.rope
        self.tree = DraftTree.from_lists(lists)
        self.prefix, self.counts = np.array(prefix), np.diff(self.tree.qo_indptr)
        self.total_q = self.tree.num_nodes
        self.q = rng.standard_normal((ROWS, HEADS, dims)).astype(dtype)
        self.keys = [rng.standard_normal((8, dims)).astype(dtype)[:p + n] for p, n in zip(self.prefix, self.counts, strict=True)]
        listed = [k[:p] if self.aside else k for k, p in zip(self.keys, self.prefix, strict=True)]
        tokens = np.array([len(k) for k in listed])
        self.qo_indptr = self.tree.qo_indptr.copy()
        self.kv_indptr = np.concatenate([[0], np.cumsum(-(-tokens // self.page_size))]).astype(np.int32)
        pages = SLOTS // self.page_size
        self.kv_indices = rng.permutation(pages)[:self.kv_indptr[-1]].astype(np.int32)
        self.kv_lens = tokens.astype(np.int32)
        self.kv_cache = np.full((pages, self.page_size, dims), np.nan, dtype)
        for r, k in enumerate(listed):
            place = np.arange(len(k))
            owned = self.kv_indices[self.kv_indptr[r]:self.kv_indptr[r + 1]]
            self.kv_cache[owned[place // self.page_size], place % self.page_size] = k
        self.draft_kv = None
        if self.aside:
            self.draft_kv = np.full((ROWS, dims), np.nan, dtype)
            self.draft_kv[:self.total_q] = np.concatenate([k[p:] for k, p in zip(self.keys, self.prefix, strict=True)])

    @property
    def parents(self) -> np.ndarray:
        return np.array(self.tree.parents)

    def masks(self) -> list[np.ndarray]:
        return [self.tree.mask(r) for r in range(len(self.counts))]

    def update_arguments(self, **changes: Any) -> dict[str, Any]:
        """Keywords of Plan.update, where the kernels run."""
        return place_all({name: getattr(self, name) for name in PLAN_NAMES} | changes)

    def plan_arguments(self, **changes: Any) -> dict[str, Any]:
        """Keywords of plan."""
        given = {"num_heads": HEADS, "latent_dim": self.latent, "rope_dim": self.rope, "dtype": self.dtype, "page_size": self.page_size,
                 "draft_in_cache": not self.aside, "kernel": KERNEL}
        return self.update_arguments(**(given | self.options | changes))

    def run_arguments(self, **changes: Any) -> dict[str, Any]:
        """Keywords of Plan.run."""
        return place_all({"q": self.q, "kv_cache": self.kv_cache, "draft_kv": self.draft_kv, "sm_scale": SM_SCALE} | changes)

    def verify_arguments(self, **changes: Any) -> dict[str, Any]:
        """Keywords of verify_mla."""
        given = {"latent_dim": self.latent, "page_size": self.page_size, "kernel": self.options.get("kernel", KERNEL)}
        return self.update_arguments() | self.run_arguments() | place_all(given | changes)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 out and lse of the draft tokens, from the keys as they were drawn."""
        parts = []
        for r, (k, p, mask) in enumerate(zip(self.keys, self.prefix, self.masks(), strict=True)):
            visible = np.concatenate([np.ones((len(mask), p), bool), mask], axis=1)
            q = self.q[self.qo_indptr[r]:self.qo_indptr[r + 1]].astype(np.float64)
            parts.append(attention(q, k.astype(np.float64), visible, self.latent, SM_SCALE, 0.0))
        return tuple(np.concatenate(part) for part in zip(*parts, strict=True))

    def check(self, out: np.ndarray, lse: np.ndarray | None) -> None:
        """Right to a few roundings of the dtype: these tests ask whether the call worked, others how exactly."""
        right, right_lse = self.expected()
        tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[self.dtype]
        np.testing.assert_allclose(out[:self.total_q].astype(np.float64), right, rtol=tolerance, atol=tolerance)
        if lse is not None:
            np.testing.assert_allclose(lse[:self.total_q], right_lse, rtol=tolerance, atol=tolerance)


def small_for(kernel: str, **given: Any) -> Small:
    """A problem whose rows `kernel` takes, planned with it."""
    rows = {"latent": 128, "rope": 64, "dtype": "bfloat16"} if kernel in machine.TENSOR else {}
    return Small(**(rows | given | {"options": {"kernel": kernel} | given.get("options", {})}))


class Outputs:
    """Guarded out and lse, of which only the first `written` rows may change."""

    def __init__(self, small: Small, written: int = 0, rows: int = ROWS):
        guarded = GuardedArrays()
        guarded.output("out", (rows, HEADS, small.latent), DTYPES[small.dtype], written=written)
        guarded.output("lse", (rows, HEADS), np.float32, written=written)
        self._guards = guarded.guards
        self._placed = {name: machine.put_guarded(guard) for name, guard in self._guards.items()}
        self.out, self.lse = self._placed["out"], self._placed["lse"]

    def check(self) -> tuple[np.ndarray, np.ndarray]:
        """AssertionError when a byte changed that may not; else out and lse on the host."""
        for name, guard in self._guards.items():
            if machine.HAS_GPU:
                guard.backing[:] = self._placed[name].bytes_back()
            guard.check()
        return self._guards["out"].array, self._guards["lse"].array


def good_run(plan: Any, small: Small, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """plan.run on `small` writes the right rows and no others; (out, lse) of the draft tokens."""
    outputs = Outputs(small, small.total_q)
    plan.run(**small.run_arguments(out=outputs.out, lse=outputs.lse, **changes))
    out, lse = outputs.check()
    small.check(out, lse)
    return out[:small.total_q].copy(), lse[:small.total_q].copy()


def good_verify(module: Any, small: Small, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same by verify_mla."""
    outputs = Outputs(small, small.total_q)
    module.verify_mla(**small.verify_arguments(out=outputs.out, lse=outputs.lse, **changes))
    out, lse = outputs.check()
    small.check(out, lse)
    return out[:small.total_q].copy(), lse[:small.total_q].copy()


def place(array: Any) -> Any:
    """A NumPy array where the kernels run, with the strides and the misalignment it has; anything else unchanged."""
    if not machine.HAS_GPU or not isinstance(array, np.ndarray):
        return array
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    lead = low % ALIGNMENT
    raw = np.zeros(lead + high - low, np.uint8)
    raw[lead:] = np.frombuffer((np.ctypeslib.ctypes.c_char * (high - low)).from_address(low), np.uint8)
    return DeviceArray(upload(raw), array.shape, array.dtype, array.strides, array.ctypes.data - low + lead)


def place_all(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: place(value) for name, value in arguments.items()}


def bits(results: tuple[np.ndarray, ...]) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in results)


class FencedWorkspace:
    """Stands in for numba_verify.memory.Workspace: the same memory between red zones, poisoned. `made` lists them."""

    made: list[FencedWorkspace] = []

    def __init__(self, nbytes: int, device: int | None):
        self.nbytes, self.device, self.host = nbytes, device, None
        tried: list[Guarded] = []  # kept until one lies on the boundary: the allocator then has to come up with another place
        while not tried or device is None and tried[-1].array.ctypes.data % ALIGNMENT:
            tried.append(Guarded("workspace", (nbytes,), np.uint8, misalign=0 if device is not None else len(tried) % 2 * (ALIGNMENT // 2)))
        guard = tried[-1]
        guard.allow_writes(None)
        guard.arm()
        self._guard = guard
        if device is None:
            self.host, self.address = guard.array, guard.array.ctypes.data
        else:
            self._array = DeviceArray(upload(guard.backing, device), guard.array.shape, np.dtype(np.uint8), None, guard.offset)
            self.address = self._array.buffer.address + guard.offset
        FencedWorkspace.made.append(self)

    def check(self) -> None:
        self._guard.check(None if self.device is None else self._array.bytes_back())
