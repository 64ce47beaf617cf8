"""mma in CUDA C: every tile, in any order of the threads, beside the twin; which tile a plan takes; what is refused."""

import ctypes
import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest
from support import cases, machine, mma_cases, oracle
from support.problems import build

import cuda_ref.backend
import numba_verify.backend
from cuda_ref import binding
from cuda_ref.binding import Status
from numba_verify.api import make_api
from numba_verify.kernels.config import Shape
from numba_verify.kernels.mma_config import MMA_TILES, choose_mma_tile
from numba_verify.planner import Implementation

H200_SHARED, A100_SHARED, SMALLEST_SHARED = 232_448, 166_912, 101_376
# Another order of the threads each: a kernel that is right is right under all of them.
SEEDS = ("0", "1", "2", "3")
#: Borders of tiles and steps, many pieces, more steps than a ring has blocks, a peak that moves, NaN in a hidden row, every row layout.
NAMES = ("rows_63", "tokens_17", "one_step_each", "borders", "rounds", "cut", "cut_aside", "rise_again", "rise_and_cut", "nan_hidden", "nan_cut",
         "random_heads", "blind_heads", "full_row_heads", "no_rope_heads", "latent_256", "cap", "ragged_deterministic")
CASES = [case for case in cases.ALL + mma_cases.ALL if case.name in NAMES]


@pytest.fixture
def large(monkeypatch):
    """The host build's imaginary GPU has room for every tile."""
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(H200_SHARED))


def with_tile(module, tile):
    """verify_mla of an implementation, with this tile of mma."""
    # A name of its own: plans that verify_mla keeps must not be shared with another tile's.
    make = functools.partial(module.make_executor, tile=tile)
    implementation = Implementation(f"{module.__name__} {tile}", module.AVAILABLE, module.support, make, "reference")
    return SimpleNamespace(verify_mla=make_api(implementation, module.warm).verify_mla)


def run(problem, module, tile, monkeypatch):
    monkeypatch.setitem(machine.IMPLEMENTATIONS, "tile under test", with_tile(module, tile))
    return machine.Call("tile under test", "mma", problem)()


def library():
    return cuda_ref.backend.library_of(0 if machine.HAS_GPU else None)


def config(tile=0, **changes):
    fields = {"num_heads": 16, "latent_dim": 512, "rope_dim": 64, "page_size": 1, "max_batch": 4, "max_total_q": 16, "max_kv_entries": 100,
              "kernel": binding.KERNELS["mma"], "tile_config": tile}
    return binding.PlanConfig(**{**fields, **changes})


def can_run(**changes):
    """(status, text) of nvr_can_run."""
    lib = library()
    status = lib.nvr_can_run(config(**changes), binding.KERNELS["mma"])
    return status, "" if status == Status.OK else lib.nvr_last_error().decode()


def skip_if_refused(number):
    status, text = can_run(tile=number)
    if status != Status.OK:
        pytest.skip(f"{machine.PLACE}: {text}")


@pytest.mark.kernel
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile(case, tile, large, monkeypatch):
    """The right answer, the same bits in every order of the threads."""
    skip_if_refused(1 + MMA_TILES.index(tile))
    problem = build(case)
    answer, bits = oracle.solve(problem), set()
    for seed in SEEDS if not machine.HAS_GPU else SEEDS[:1]:
        monkeypatch.setenv("CUDA_REF_HOST_SEED", seed)
        out, lse = run(problem, cuda_ref.backend, tile, monkeypatch)
        oracle.check(problem, answer, out, lse, f"{case} {tile}, seed {seed}")
        bits.add(out[:problem.total_q].tobytes() + lse[:problem.total_q].tobytes())
    assert len(bits) == 1


@pytest.mark.kernel
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
def test_same_algorithm(tile, large, monkeypatch):
    """On the CPU both implementations round alike, where they do the same: a sum in another order would show in some bits."""
    if machine.HAS_GPU:
        pytest.skip("two compilers need not contract products and sums alike")
    problem = build(next(case for case in CASES if case.name == "rise_again"))
    ours, _ = run(problem, numba_verify.backend, tile, monkeypatch)
    theirs, _ = run(problem, cuda_ref.backend, tile, monkeypatch)
    np.testing.assert_array_equal(theirs[:problem.total_q].view(np.uint16), ours[:problem.total_q].view(np.uint16))


@pytest.mark.parametrize("dims", [(512, 64), (512, 0), (256, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
def test_tiles_are_the_twins(tile, dims):
    """The enum counts them from 1 on; shared memory tells that rows, keys, blocks and warps are the same."""
    size = ctypes.c_uint64()
    given = config(tile=1 + MMA_TILES.index(tile), latent_dim=dims[0], rope_dim=dims[1])
    assert library().nvr_shared_bytes(given, binding.KERNELS["mma"], size) == Status.OK
    assert size.value == tile.shared_bytes(Shape(*dims, "bfloat16"))


@pytest.mark.parametrize("shared", [H200_SHARED, A100_SHARED, SMALLEST_SHARED])
@pytest.mark.parametrize("dims", [(512, 64), (512, 0), (256, 64), (128, 64)], ids=str)
def test_default_tile_is_the_twins(shared, dims, monkeypatch):
    """NVR_MMA_DEFAULT follows choose_mma_tile and rows_of_a_request. The imaginary GPU hands registers over, whatever it is called."""
    if machine.HAS_GPU:
        pytest.skip("of a GPU only one answer can be asked")
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(shared))
    size, shape = ctypes.c_uint64(), Shape(*dims, "bfloat16")
    for heads, batch, total, deterministic in ((1, 4, 16, False), (4, 4, 16, False), (3, 4, 17, False), (8, 4, 16, False), (16, 4, 9, False),
                                               (128, 1, 1, False), (1, 4, 4, True), (1, 0, 0, False)):
        spec = SimpleNamespace(num_heads=heads, max_batch=max(batch, 1), max_total_q=total, deterministic=deterministic)
        tile = choose_mma_tile(shape, numba_verify.backend.rows_of_a_request(spec), shared, hands_over=True)
        given = config(num_heads=heads, max_batch=batch, max_total_q=total, deterministic=deterministic, latent_dim=dims[0], rope_dim=dims[1])
        assert library().nvr_shared_bytes(given, binding.KERNELS["mma"], size) == Status.OK
        assert size.value == tile.shared_bytes(shape), (heads, batch, total, deterministic)


@pytest.mark.skipif(machine.HAS_GPU, reason="the imaginary GPU's numbers")
def test_refusals():
    dtypes = binding.DTYPES
    assert can_run() == (Status.OK, "")
    assert can_run(dtype=dtypes["float32"]) == (Status.DTYPE, "dtype float32: mma takes bfloat16 and float16; paged would run")
    assert can_run(latent_dim=384) == (
        Status.UNSUPPORTED_DIMS, "latent_dim is 384 and rope_dim 64; mma is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run")
    need = MMA_TILES[0].shared_bytes(Shape(512, 64, "bfloat16"))
    assert can_run(tile=1) == (Status.SHARED_MEMORY, f"the mma tile of 64 rows x 32 keys needs {need} B of shared memory, this device has "
                               "101376 B; the default tile would run")
    os.environ["CUDA_REF_HOST_SHARED"] = "90000"
    try:
        status, text = can_run()
    finally:
        del os.environ["CUDA_REF_HOST_SHARED"]
    assert status == Status.SHARED_MEMORY and text.startswith("the mma tile of 16 rows x 16 keys needs ") and text.endswith("B; paged would run")


def test_support_speaks_like_the_twin():
    for arguments in ((8, 512, 64, "float32"), (8, 96, 64, "bfloat16"), (8, 512, 32, "float16")):
        ours, theirs = (module.support("mma", *arguments, 1, None) for module in (numba_verify.backend, cuda_ref.backend))
        assert theirs == ours != ""
    assert "mma is compiled for 512/64" in cuda_ref.backend.support("mma", 8, 256, 0, "bfloat16", 1, None)
