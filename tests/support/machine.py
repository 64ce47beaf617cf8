"""Where the tests run kernels: on the GPU when there is one, else numba kernels in the simulator and CUDA C in the host build.

On the GPU the suite needs no array library: it uses the package's own minimal device array. Tests of torch, CuPy and JAX use those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cuda_ref
import numba_verify
from numba_verify.gpu import driver, simulator
from numba_verify.gpu.device_array import DeviceArray, to_device, upload

from .poison import Guarded
from .problems import Problem

KERNELS = ("naive", "flash", "paged", "mma", "wgmma")
#: Kernels that cut tiles: there deterministic=True is another code path. The others keep its promise without being asked.
SPLITTING = ("paged", "mma", "wgmma")
#: Kernels on tensor cores, which take 16-bit rows of whole 128-byte segments.
TENSOR = ("mma", "wgmma")
IMPLEMENTATIONS = {"numba_verify": numba_verify, "cuda_ref": cuda_ref}
#: (latent_dim, rope_dim) of these in cuda_ref, which is compiled ahead.
TWIN_LAYOUTS = ((512, 64), (512, 0), (256, 64), (128, 64))
HAS_GPU = driver.device_count() > 0
#: Where there is a GPU it has to be a Hopper one.
HAS_WGMMA = not HAS_GPU or driver.device_info(0).arch == "sm_90a"
PLACE = f"{driver.device_info(0).name}" if HAS_GPU else "simulator (numba_verify) and host build (cuda_ref)"


def takes(name: str, kernel: str, latent_dim: int, rope_dim: int, dtype: str) -> bool:
    """Whether `kernel` of implementation `name` runs such rows here; test_errors holds both to it."""
    if kernel not in TENSOR:
        return True
    if kernel == "wgmma" and not HAS_WGMMA:
        return False
    layout = latent_dim in (128, 256, 512) and rope_dim in (0, 64, 128) if name != "cuda_ref" else (latent_dim, rope_dim) in TWIN_LAYOUTS
    return layout and dtype != "float32"


def put(array: Any) -> Any:
    """A NumPy array where the kernels run; anything else (None, DraftTree, numbers) unchanged."""
    if not HAS_GPU or not isinstance(array, np.ndarray):
        return array
    return to_device(array)


def put_guarded(guard: Guarded) -> Any:
    """A guarded array where the kernels run, red zones, gaps and all."""
    if not HAS_GPU:
        return guard.array
    return DeviceArray(upload(guard.backing), guard.array.shape, guard.array.dtype, guard.array.strides, guard.offset)


def fetch(array: Any) -> np.ndarray:
    """The contents of a contiguous array of the kernels' side; bfloat16 by its bits where the library has no such type."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, DeviceArray):
        return array.numpy()
    return array.copy_to_host()  # a new output for a caller with no library of its own is a numba device array


def launch(source: Any, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
    """Run one kernel (a KernelSource) where the kernels run. Its arrays are NumPy arrays, and hold what it left there afterwards."""
    if not HAS_GPU:
        kernel = source.build(simulator.language(), source.config)
        simulator.launch(kernel, grid=grid, block=source.threads, shared_bytes=source.shared_bytes, args=arguments,
                         overlaps=source.overlaps)
        return
    from numba_verify.gpu.launch import LoadedKernel

    placed = [to_device(a) if isinstance(a, np.ndarray) else a for a in arguments]
    with driver.context(0):
        LoadedKernel(source, 0).launch(0, grid, [a.buffer.address if isinstance(a, DeviceArray) else a for a in placed])
    for array, copy in zip(arguments, placed, strict=True):
        if isinstance(array, np.ndarray):
            array[...] = copy.numpy()


class Call:
    """One call of one implementation on one problem, with guarded arguments and outputs.

    `options` go to verify_mla. The padding rows of out and lse are guarded like everything else: a kernel may write the rows of draft
    tokens only.
    """

    def __init__(self, implementation: str, kernel: str, problem: Problem, **options: Any):
        self.implementation, self.kernel, self.problem, self.options = implementation, kernel, problem, options

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        problem, case = self.problem, self.problem.case
        rows, total = problem.q.shape[0], problem.total_q
        outputs = problem.guarded.__class__()
        outputs.output("out", (rows, case.heads, case.latent_dim), problem.q.dtype, written=total, row_gap=case.row_gap)
        outputs.output("lse", (rows, case.heads), np.float32, written=total)
        guards = {**problem.guarded.guards, **outputs.guards}
        placed = {name: put_guarded(guard) for name, guard in guards.items()}
        tree = placed.get("tree", problem.tree)
        module = IMPLEMENTATIONS[self.implementation]
        arguments = {
            "tree": tree, "sm_scale": problem.sm_scale, "kv_lens": placed.get("kv_lens"), "draft_kv": placed.get("draft_kv"),
            "logit_cap": case.logit_cap, "latent_dim": case.latent_dim, "page_size": case.page_size,
            "kernel": self.kernel, "deterministic": case.deterministic,
            "out": placed["out"], "lse": placed["lse"]}
        module.verify_mla(placed["q"], placed["kv_cache"], placed["qo_indptr"], placed["kv_indptr"], placed["kv_indices"],
                          **{**arguments, **self.options})
        for name, guard in guards.items():
            if HAS_GPU:
                back = placed[name].bytes_back()
                guard.check(back)
                guard.backing[:] = back
            else:
                guard.check()
        return outputs.guards["out"].array, outputs.guards["lse"].array

