"""Configurations of wgmma: which add up, where their arrays lie, what is refused and with which words. test_offline.py compiles them."""

import itertools
import re

import pytest

from numba_verify import backend
from numba_verify.errors import UnsupportedError
from numba_verify.gpu import driver
from numba_verify.kernels.config import Shape, choose_tile
from numba_verify.kernels.mma_config import Registers
from numba_verify.kernels.wgmma_config import HOPPER_SHARED_BYTES, WGMMA_TILES, WgmmaConfig, WgmmaTile, choose_wgmma_tile, layout

TUNED, REGISTERS = Shape(512, 64, "bfloat16"), Registers(168, 160, 24)
LAYOUTS = [(latent, rope) for latent in (128, 256, 512) for rope in (0, 64, 128)]
TILES = [*WGMMA_TILES, WgmmaTile(64, 3, 8, REGISTERS), WgmmaTile(32, 6, 2, REGISTERS, delayed=2), WgmmaTile(48, 2, 1, REGISTERS)]


@pytest.mark.parametrize("tile", WGMMA_TILES, ids=str)
def test_every_layout_fits_a_hopper_gpu(tile):
    for latent, rope in LAYOUTS:
        assert tile.shared_bytes(Shape(latent, rope, "float16")) <= HOPPER_SHARED_BYTES
    assert len(set(map(str, WGMMA_TILES))) == len(WGMMA_TILES)


@pytest.mark.parametrize("latent, rope", LAYOUTS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_arrays_do_not_overlap(tile, latent, rope):
    """Counted by hand, and where the hardware wants them."""
    shape = Shape(latent, rope, "bfloat16")
    config, at = WgmmaConfig(shape, tile, False), layout(shape, tile)
    assert list(at) == sorted(at) and all(offset % 16 == 0 for offset in at)
    assert at.ring % 1024 == at.q % 1024 == 0 and config.segment_bytes % 1024 == 0, "the swizzle counts from there"
    row = 2 * (latent + rope)
    assert at.q - at.ring == tile.slots * tile.keys * row
    left = max(row // 128 - tile.q_segments, 0)
    assert at.alpha - at.q == left * 64 * 128
    start, step = config.weights
    if config.weights_apart:
        assert (start, step) == (at.weights, 64 * tile.keys * 2) and at.end - start == tile.slots * step and start % 128 == 0
    else:
        assert rope and at.end + tile.slots * 64 * tile.keys * 2 > HOPPER_SHARED_BYTES, "there would be room for them"
        assert step == tile.keys * row and start + 64 * tile.keys * 2 == at.ring + step, "weights end where their slot ends"
        assert start >= at.ring + tile.keys * 2 * latent, "values come before them"
    barriers = (at.full, at.empty, at.ready, at.scored, at.weights)
    assert min(b - a for a, b in itertools.pairwise(barriers)) >= 8 * tile.slots


@pytest.mark.parametrize("arguments, message", [
    ((16, 3, 6, REGISTERS), "keys: expected 32, 48 or 64, got 16"),
    ((64, 5, 6, REGISTERS), "slots: expected 2 to 4 of 64 keys, got 5"),
    ((48, 7, 6, REGISTERS), "slots: expected 2 to 6 of 48 keys, got 7"),
    ((48, 1, 6, REGISTERS), "slots: expected 2 to 6 of 48 keys, got 1"),
    ((48, 3, 0, REGISTERS), "q_segments: expected at least 1, got 0"),
    ((48, 3, 6, REGISTERS, 3), "delayed: expected 0 to 2 value warpgroups, got 3"),
    ((48, 3, 6, Registers(176, 160, 24)), "are more than the 512 that four warpgroups have together"),
])  # fmt: skip
def test_a_tile_that_does_not_add_up_refuses_itself(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        WgmmaTile(*arguments)


def test_rows_that_are_not_taken_are_refused():
    """Whoever builds the kernel without asking `can_run`, whose texts test_errors has."""
    for shape, message in ((Shape(512, 64, "float32"), "dtype float32"), (Shape(96, 64, "float16"), "latent_dim=96"),
                           (Shape(512, 32, "bfloat16"), "rope_dim=32")):
        with pytest.raises(UnsupportedError, match=f"{message}: kernel='wgmma' takes .*; kernel='paged' would run"):
            WgmmaConfig(shape, WGMMA_TILES[0], False)


def test_no_tile_fits_a_small_gpu():
    assert choose_wgmma_tile(TUNED, HOPPER_SHARED_BYTES) is WGMMA_TILES[0]
    assert choose_wgmma_tile(TUNED, 101_376) is None


@pytest.mark.parametrize("capability, shared, message", [
    ((12, 0), 101_376, "kernel='wgmma' needs sm_90a (Hopper), Toy is sm_120a; kernel='mma' would run"),
    ((8, 0), 166_912, "kernel='wgmma' needs sm_90a (Hopper), Toy is sm_80; kernel='mma' would run"),
    ((7, 5), 65_536, "Toy has compute capability 7.5, the kernels need 8.0 or later; NumPy arrays run anywhere"),
    ((9, 0), 101_376, "kernel='wgmma' needs 211,840 B of shared memory for 512/64, Toy has 101,376 B; kernel='mma' would run"),
])
def test_gpus_without_it(capability, shared, message):
    info = driver.DeviceInfo(0, "Toy", capability, 132, shared, shared + 1024, 1 << 20)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        backend.check_device("wgmma", choose_tile(16), TUNED, info)
