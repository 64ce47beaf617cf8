"""mma in CUDA C: every tile, in any order of the threads, beside the twin; which tile a plan takes; what is refused."""

import os

import pytest
from support import cases, machine, mma_cases, twin
from support.twin import A100_SHARED, H200_SHARED, SMALLEST_SHARED

import cuda_ref.backend
import numba_verify.backend
from cuda_ref import binding
from cuda_ref.binding import Status
from numba_verify.kernels.config import Shape
from numba_verify.kernels.mma_config import MMA_TILES, choose_mma_tile
from numba_verify.problem import PlanSpec

#: Borders of tiles and steps, many pieces, more steps than a ring has blocks, a peak that moves, NaN in a hidden row, every row layout.
NAMES = ("rows_63", "tokens_17", "one_step_each", "borders", "rounds", "cut", "cut_aside", "rise_again", "rise_of_some", "rise_of_half",
         "rise_and_cut", "nan_hidden", "nan_cut", "random_heads", "blind_heads", "full_row_heads", "no_rope_heads", "latent_256", "cap",
         "ragged_deterministic")
CASES = [case for case in cases.ALL + mma_cases.ALL if case.name in NAMES]


@pytest.fixture
def large(monkeypatch):
    """The host build's imaginary GPU has room for every tile."""
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(H200_SHARED))


@pytest.mark.kernel
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile(case, tile, large, monkeypatch):
    twin.skip_if_refused("mma", 1 + MMA_TILES.index(tile))
    twin.check_in_all_orders(case, "mma", tile, monkeypatch)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
def test_same_algorithm(tile, large, monkeypatch):
    twin.check_same_algorithm(next(case for case in CASES if case.name == "rise_again"), "mma", tile, monkeypatch)


@pytest.mark.parametrize("dims", machine.TWIN_LAYOUTS, ids=str)
@pytest.mark.parametrize("tile", MMA_TILES, ids=str)
def test_tiles_are_the_twins(tile, dims):
    """The enum counts them from 1 on; shared memory tells that rows, keys, blocks and warps are the same."""
    size = twin.shared_bytes("mma", tile=1 + MMA_TILES.index(tile), latent_dim=dims[0], rope_dim=dims[1])
    assert size == tile.shared_bytes(Shape(*dims, "bfloat16"))


@pytest.mark.parametrize("shared", [H200_SHARED, A100_SHARED, SMALLEST_SHARED])
@pytest.mark.parametrize("dims", machine.TWIN_LAYOUTS, ids=str)
def test_default_tile_is_the_twins(shared, dims, monkeypatch):
    """NVR_MMA_DEFAULT follows choose_mma_tile and PlanSpec.rows_of_a_request. The imaginary GPU hands registers over, whatever it is called."""
    if machine.HAS_GPU:
        pytest.skip("of a GPU only one answer can be asked")
    monkeypatch.setenv("CUDA_REF_HOST_SHARED", str(shared))
    shape = Shape(*dims, "bfloat16")
    for heads, batch, total, deterministic in ((1, 4, 16, False), (4, 4, 16, False), (3, 4, 17, False), (8, 4, 16, False), (16, 4, 9, False),
                                               (128, 1, 1, False), (1, 4, 4, True), (1, 0, 0, False)):
        spec = PlanSpec(heads, *dims, "bfloat16", 1, True, "mma", deterministic, max(batch, 1), total, 1, None)
        tile = choose_mma_tile(shape, spec.rows_of_a_request, shared, hands_over=True)
        size = twin.shared_bytes("mma", num_heads=heads, max_batch=batch, max_total_q=total, deterministic=deterministic, latent_dim=dims[0],
                                 rope_dim=dims[1])
        assert size == tile.shared_bytes(shape), (heads, batch, total, deterministic)


@pytest.mark.skipif(machine.HAS_GPU, reason="the imaginary GPU's numbers")
def test_refusals():
    dtypes = binding.DTYPES
    assert twin.can_run("mma") == (Status.OK, "")
    assert twin.can_run("mma", dtype=dtypes["float32"]) == (Status.DTYPE, "dtype float32: mma takes bfloat16 and float16; paged would run")
    assert twin.can_run("mma", latent_dim=384) == (
        Status.UNSUPPORTED_DIMS, "latent_dim is 384 and rope_dim 64; mma is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run")
    need = MMA_TILES[0].shared_bytes(Shape(512, 64, "bfloat16"))
    assert twin.can_run("mma", tile=1) == (Status.SHARED_MEMORY, f"the mma tile of 64 rows x 32 keys needs {need} B of shared memory, this device "
                                           "has 101376 B; the default tile would run")
    os.environ["CUDA_REF_HOST_SHARED"] = "90000"
    try:
        status, text = twin.can_run("mma")
    finally:
        del os.environ["CUDA_REF_HOST_SHARED"]
    assert status == Status.SHARED_MEMORY and text.startswith("the mma tile of 16 rows x 16 keys needs ") and text.endswith("B; paged would run")


def test_support_speaks_like_the_twin():
    for arguments in ((8, 512, 64, "float32"), (8, 96, 64, "bfloat16"), (8, 512, 32, "float16")):
        ours, theirs = (module.support("mma", *arguments, 1, None) for module in (numba_verify.backend, cuda_ref.backend))
        assert theirs == ours != ""
    assert "mma is compiled for 512/64" in cuda_ref.backend.support("mma", 8, 256, 0, "bfloat16", 1, None)
