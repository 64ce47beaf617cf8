"""The kernels on tensor cores of cuda_ref, tile by tile, for test_cuda_ref_mma.py and test_cuda_ref_wgmma.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuda_ref.backend
import numba_verify.backend
from cuda_ref import binding
from cuda_ref.binding import Status
from numba_verify.api import make_api
from numba_verify.planner import Implementation

from . import machine, oracle
from .problems import Case, Problem, build

H200_SHARED, A100_SHARED, SMALLEST_SHARED = 232_448, 166_912, 101_376
#: Another order of the threads each: a kernel that is right is right under all of them.
SEEDS = ("0", "1", "2", "3")
#: nvr_kernel of kernels on tensor cores.
NUMBERS = {kernel: binding.KERNELS[kernel] for kernel in machine.TENSOR}


def with_tile(module: ModuleType, tile: Any) -> SimpleNamespace:
    """verify_mla of an implementation, with this tile."""
    # A name of its own: plans that verify_mla keeps must not be shared with another tile's.
    make = functools.partial(module.make_executor, tile=tile)
    implementation = Implementation(f"{module.__name__} {tile}", module.AVAILABLE, module.support, make, "reference")
    return SimpleNamespace(verify_mla=make_api(implementation, module.warm).verify_mla)


def run(problem: Problem, module: ModuleType, kernel: str, tile: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a problem."""
    monkeypatch.setitem(machine.IMPLEMENTATIONS, "tile under test", with_tile(module, tile))
    return machine.Call("tile under test", kernel, problem)()


def check_in_all_orders(case: Case, kernel: str, tile: Any, monkeypatch: pytest.MonkeyPatch, seeds: Sequence[str] = SEEDS) -> None:
    """The right answer, the same bits in every order of the threads."""
    problem = build(case)
    answer, bits = oracle.solve(problem), set()
    for seed in seeds if not machine.HAS_GPU else seeds[:1]:
        monkeypatch.setenv("CUDA_REF_HOST_SEED", seed)
        out, lse = run(problem, cuda_ref.backend, kernel, tile, monkeypatch)
        oracle.check(problem, answer, out, lse, f"{case} {tile}, seed {seed}")
        bits.add(out[:problem.total_q].tobytes() + lse[:problem.total_q].tobytes())
    assert len(bits) == 1


def check_same_algorithm(case: Case, kernel: str, tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU both implementations round alike, where they do the same: a sum in another order would show in some bits of out."""
    if machine.HAS_GPU:
        pytest.skip("two compilers need not contract products and sums alike")
    problem = build(case)
    ours, theirs = (run(problem, module, kernel, tile, monkeypatch)[0] for module in (numba_verify.backend, cuda_ref.backend))
    np.testing.assert_array_equal(theirs[:problem.total_q].view(np.uint16), ours[:problem.total_q].view(np.uint16))


def library() -> Any:
    return cuda_ref.backend.library_of(0 if machine.HAS_GPU else None)


def config(kernel: str, tile: int = 0, **changes: Any) -> binding.PlanConfig:
    fields = {"num_heads": 16, "latent_dim": 512, "rope_dim": 64, "page_size": 1, "max_batch": 4, "max_total_q": 16, "max_kv_entries": 100,
              "kernel": NUMBERS[kernel], "tile_config": tile}
    return binding.PlanConfig(**{**fields, **changes})


def can_run(kernel: str, **changes: Any) -> tuple[int, str]:
    """(status, text) of nvr_can_run."""
    lib = library()
    status = lib.nvr_can_run(config(kernel, **changes), NUMBERS[kernel])
    return status, "" if status == Status.OK else lib.nvr_last_error().decode()


def skip_if_refused(kernel: str, number: int) -> None:
    status, text = can_run(kernel, tile=number)
    if status != Status.OK:
        pytest.skip(f"{machine.PLACE}: {text}")


def shared_bytes(kernel: str, **changes: Any) -> int:
    """What nvr_shared_bytes says."""
    size = binding.ctypes.c_uint64()
    assert library().nvr_shared_bytes(config(kernel, **changes), NUMBERS[kernel], size) == Status.OK
    return size.value
