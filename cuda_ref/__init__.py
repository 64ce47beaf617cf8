"""Tree-verify MLA attention in CUDA C: the twin of `numba_verify`, with the same Python calls.

`verify_mla`, `plan`, `can_run` and `warmup` have the signatures and the promises of their twins; the work is done by a C library that
`cuda_ref.build` compiles on first use (nvcc for a GPU, g++ for NumPy arrays). `DraftTree` and the error classes are numba_verify's own.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["DraftTree", "NoDeviceError", "UnsupportedError", "build", "can_run", "plan", "verify_mla", "warmup"]

_SHARED = ("DraftTree", "NoDeviceError", "UnsupportedError")
_TWINS = ("can_run", "plan", "verify_mla", "warmup")


def _twins() -> dict[str, Any]:
    """The public calls of numba_verify over this library."""
    from numba_verify.api import make_api
    from numba_verify.planner import Implementation

    from . import backend

    implementation = Implementation("cuda_ref", backend.AVAILABLE, backend.support, backend.make_executor, host_default="reference")
    return make_api(implementation, backend.warm)._asdict()


def __getattr__(name: str) -> Any:
    # Looked up when asked for: `python -m cuda_ref.build` and the C library alone need neither numba_verify nor NumPy.
    if name == "build":
        return importlib.import_module("cuda_ref.build")
    if name in _SHARED:
        globals()[name] = getattr(importlib.import_module("numba_verify"), name)
    elif name in _TWINS:
        globals().update(_twins())
    else:
        raise AttributeError(f"module 'cuda_ref' has no attribute {name!r}")
    return globals()[name]
