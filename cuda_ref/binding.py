"""ctypes binding of verify_attn.h: structs, library loading, ABI check, status -> exception."""

from __future__ import annotations

import ctypes
import enum
import threading
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 3

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
KERNELS = {"naive": 0, "flash": 1, "paged": 2, "mma": 3, "wgmma": 4}
TREE_KINDS = {"causal": 0, "parents": 1, "bits": 2, "dense": 3, "full_mask": 4}


class Status(enum.IntEnum):
    """enum nvr_status."""

    OK = 0
    NULL_POINTER = 1
    ALIGNMENT = 2
    STRIDE = 3
    SIZE = 4
    DTYPE = 5
    OPTION = 6
    CAPACITY = 7
    WORKSPACE = 8
    UNSUPPORTED_DIMS = 9
    SHARED_MEMORY = 10
    NO_DEVICE = 11
    NO_KERNEL_IMAGE = 12
    LAUNCH = 13
    BARRIER = 14


class PlanConfig(ctypes.Structure):
    """nvr_plan_config."""

    _fields_ = [
        ("device", c_int32),
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("latent_dim", c_int32),
        ("rope_dim", c_int32),
        ("page_size", c_int32),
        ("draft_in_cache", c_int32),
        ("deterministic", c_int32),
        ("tile_config", c_int32),
        ("kernel", c_int32),
        ("max_batch", c_int64),
        ("max_total_q", c_int64),
        ("max_kv_entries", c_int64),
    ]


class IndexArray(ctypes.Structure):
    """nvr_index_array."""

    _fields_ = [("data", c_void_p), ("length", c_int64), ("width", c_int32), ("reserved", c_int32)]


class Tree(ctypes.Structure):
    """nvr_tree."""

    _fields_ = [("kind", c_int32), ("reserved", c_int32), ("data", c_void_p), ("length", c_int64), ("stride", c_int64)]


class Indices(ctypes.Structure):
    """nvr_indices."""

    _fields_ = [
        ("batch", c_int64),
        ("qo_indptr", IndexArray),
        ("kv_indptr", IndexArray),
        ("kv_indices", IndexArray),
        ("kv_lens", IndexArray),
        ("tree", Tree),
    ]


class Tensors(ctypes.Structure):
    """nvr_tensors."""

    _fields_ = [
        ("q", c_void_p),
        ("kv_cache", c_void_p),
        ("draft_kv", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("q_rows", c_int64),
        ("kv_pages", c_int64),
        ("draft_rows", c_int64),
        ("out_rows", c_int64),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("kv_page_stride", c_int64),
        ("kv_token_stride", c_int64),
        ("draft_row_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("sm_scale", c_float),
        ("logit_cap", c_float),
    ]


_SIGNATURES = {
    "nvr_can_run": [POINTER(PlanConfig), c_int],
    "nvr_shared_bytes": [POINTER(PlanConfig), c_int, POINTER(c_uint64)],
    "nvr_workspace_bytes": [POINTER(PlanConfig), POINTER(c_uint64)],
    "nvr_plan_update": [POINTER(PlanConfig), POINTER(Indices), c_void_p, c_uint64, c_void_p],
    "nvr_verify_naive": [POINTER(PlanConfig), POINTER(Tensors), c_void_p, c_uint64, c_void_p],
    "nvr_verify_flash": [POINTER(PlanConfig), POINTER(Tensors), c_void_p, c_uint64, c_void_p],
    "nvr_verify_paged": [POINTER(PlanConfig), POINTER(Tensors), c_void_p, c_uint64, c_void_p],
    "nvr_verify_mma": [POINTER(PlanConfig), POINTER(Tensors), c_void_p, c_uint64, c_void_p],
    "nvr_verify_wgmma": [POINTER(PlanConfig), POINTER(Tensors), c_void_p, c_uint64, c_void_p],
}

_loaded: dict[Path, ctypes.CDLL] = {}
_lock = threading.Lock()


def load(path: Path) -> ctypes.CDLL:
    """Load a built library once per process. Raises `OSError` when it cannot be loaded, `RuntimeError` for another ABI."""
    with _lock:
        if path not in _loaded:
            library = ctypes.CDLL(str(path))
            library.nvr_abi_version.restype = c_int
            version = library.nvr_abi_version()
            if version != ABI_VERSION:
                raise RuntimeError(f"{path} has ABI version {version}, this binding needs {ABI_VERSION}; build it again")
            for name, arguments in _SIGNATURES.items():
                getattr(library, name).argtypes = arguments
                getattr(library, name).restype = c_int
            library.nvr_last_error.restype = c_char_p
            library.nvr_status_string.argtypes = [c_int]
            library.nvr_status_string.restype = c_char_p
            _loaded[path] = library
    return _loaded[path]


def error_text(library: ctypes.CDLL, status: int) -> str:
    """The library's own words on the calling thread's last failure."""
    text = library.nvr_last_error().decode()
    return f"{text} [{library.nvr_status_string(status).decode()}]"


def check(library: ctypes.CDLL, status: int) -> None:
    """Raise what a status stands for: `UnsupportedError`, `NoDeviceError`, `RuntimeError`, else `ValueError`."""
    if status == Status.OK:
        return
    text = error_text(library, status)
    if status in (Status.UNSUPPORTED_DIMS, Status.SHARED_MEMORY, Status.NO_KERNEL_IMAGE):
        from numba_verify.errors import UnsupportedError

        raise UnsupportedError(text)
    if status == Status.NO_DEVICE:
        from numba_verify.errors import NoDeviceError

        raise NoDeviceError(text)
    if status in (Status.LAUNCH, Status.BARRIER):
        raise RuntimeError(text)
    raise ValueError(text)
