"""Tree-verify attention with MLA, in numba-cuda: a few draft tokens a request, arranged in a tree, attend to a long paged prefix and to
their own ancestors.

The public names are these and no others; `help(numba_verify.verify_mla)` has shapes and an example. `cuda_ref` is the same library in
CUDA C, with the same signatures.
"""

from .api import can_run, plan, verify_mla, warmup
from .errors import NoDeviceError, UnsupportedError
from .planner import Plan
from .tree import DraftTree

__version__ = "0.1.0"
__all__ = ["DraftTree", "NoDeviceError", "Plan", "UnsupportedError", "can_run", "plan", "verify_mla", "warmup"]
