"""combine by itself: hand-made merge tables and partials against float64. In whole plans it is tested by test_agreement, with few pieces."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support import machine

from numba_verify.backend import HOPPER_CAPABILITY
from numba_verify.gpu import driver, simulator
from numba_verify.gpu.compile import KernelSource
from numba_verify.kernels import combine, work
from numba_verify.kernels.config import Shape

pytestmark = pytest.mark.kernel

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Tile(NamedTuple):
    """`pieces` pieces of tile `tile` of a request that begins at query row `row` and has `tokens` draft tokens."""

    pieces: int
    tile: int
    row: int
    tokens: int


class Merge(NamedTuple):
    """One launch. Few heads and rows, so that the last tile of a request is not full and tiles span tokens where row_heads = heads."""

    tiles: tuple[Tile, ...]
    latent_dim: int = 128
    dtype: str = "bfloat16"
    tile_rows: int = 8
    heads: int = 3
    row_heads: int = 3
    deterministic: bool = False
    base2: bool = False
    blocks: int = 3
    gap: int = 0
    overlap: bool = False


FEW = (Tile(2, 0, 0, 4), Tile(16, 1, 0, 4), Tile(3, 0, 5, 1))
MANY = (Tile(17, 0, 0, 4), Tile(65, 1, 0, 4), Tile(33, 0, 5, 1))
MIXED = (Tile(2, 0, 0, 4), Tile(70, 1, 0, 4))
BOTH = (*FEW, Tile(17, 0, 6, 2), Tile(9, 0, 8, 2))
MERGES = {
    "few": Merge(FEW),
    "few_base2": Merge(FEW, base2=True),
    "few_of_512": Merge(FEW, 512, "float16"),
    "few_of_384": Merge(FEW, 384, "float32", base2=True),
    "few_of_256": Merge(FEW, 256),
    "few_of_96": Merge(FEW, 96),
    "few_of_32": Merge(FEW, 32, "float32"),
    "many": Merge(MANY),
    "many_fixed": Merge(MANY, deterministic=True),
    "many_base2_of_512": Merge(MANY, 512, base2=True, deterministic=True),
    "many_of_384": Merge(MANY, 384, "float16"),
    "many_of_160": Merge(MANY, 160, "float32"),
    "more_than_a_chunk": Merge(MIXED, 256, base2=True),
    "most_there_can_be": Merge((Tile(376, 0, 0, 2),), 32, blocks=1),
    "padded_heads": Merge(BOTH, row_heads=8, heads=3),
    "rows_of_64": Merge((Tile(2, 0, 0, 30), Tile(20, 1, 0, 30)), tile_rows=64, blocks=6),
    "gaps_between_rows": Merge(FEW, dtype="float16", gap=8),
    "one_block": Merge(BOTH, blocks=1),
    "nothing": Merge(()),
    "overlap": Merge(BOTH, base2=True, overlap=True),
    "overlap_of_nothing": Merge((), overlap=True),
}


def drawn(case, seed=0):
    """(merge table, partials, statistics), every slot that no merge names full of NaN."""
    rng, rows, latent = np.random.default_rng(seed), case.tile_rows, case.latent_dim
    slots_of = work.work_split(simulator.language(), work.ScheduleConfig(16, rows, case.deterministic)).slot
    table, few, many, slot, used = np.full((len(case.tiles) + 4, work.MERGE_FIELDS), -7, np.int64), 0, 0, 1, []
    for merge in case.tiles:
        at = 1 + few if merge.pieces <= work.FEW_PIECES else len(table) - 1 - many
        few, many = few + (merge.pieces <= work.FEW_PIECES), many + (merge.pieces > work.FEW_PIECES)
        table[at] = slot, merge.pieces, merge.tile, merge.row, merge.tokens
        used.append([slots_of(slot, k) for k in range(merge.pieces)])
        slot = used[-1][-1] + (1 if case.deterministic else 1 + used[-1][-1] % 2)
    table[0, :3] = few, many, len(table) - 1
    partial = np.full((slot + 1, rows, latent), np.nan, np.float32)
    statistics = np.full((slot + 1, rows, 2), np.nan, np.float32)
    for slots in used:
        partial[slots] = rng.standard_normal((len(slots), rows, latent))
        statistics[slots, :, 0] = rng.uniform(-30, 30, (len(slots), rows))
        statistics[slots, :, 1] = rng.uniform(1, 200, (len(slots), rows))
    return table, partial, statistics, used


def launched(case, table, partial, statistics, wants_lse=True):
    """(out [rows, heads, latent], lse [rows, heads]) with one row and one head more than there are, NaN where nothing was written."""
    rows = max([merge.row + merge.tokens for merge in case.tiles], default=1)
    out = np.full((rows + 1, case.heads, case.latent_dim + case.gap), np.nan, DTYPES[case.dtype])
    lse = np.full((rows + 1, case.heads), np.nan, np.float32)
    config = combine.CombineConfig(Shape(case.latent_dim, 0, case.dtype), work.ScheduleConfig(16, case.tile_rows, case.deterministic), case.base2,
                                   case.overlap)
    source = KernelSource("combine", combine.build, config, combine.SIGNATURE, combine.THREADS, combine.BLOCKS_PER_SM, combine.shared_bytes(),
                          case.overlap)
    machine.launch(source, (case.blocks, 1), [out, lse, table, partial, statistics, case.heads * (case.latent_dim + case.gap),
                                              case.latent_dim + case.gap, case.row_heads, case.heads, int(wants_lse), rows])
    return out.astype(np.float64), lse.astype(np.float64)


def expected(case, partial, statistics, used):
    """The same in float64."""
    rows = max([merge.row + merge.tokens for merge in case.tiles], default=1)
    out, lse = np.full((rows + 1, case.heads, case.latent_dim), np.nan), np.full((rows + 1, case.heads), np.nan)
    exp, log, unit = (np.exp2, np.log2, np.log(2)) if case.base2 else (np.exp, np.log, 1)
    for merge, slots in zip(case.tiles, used, strict=True):
        for h in range(case.tile_rows):
            token, head = divmod(merge.tile * case.tile_rows + h, case.row_heads)
            if token >= merge.tokens or head >= case.heads:
                continue
            peak, total = statistics[slots, h].astype(np.float64).T
            weight = total * exp(peak - max(peak.max(), -1e30))
            with np.errstate(divide="ignore"):
                lse[merge.row + token, head] = (max(peak.max(), -1e30) + log(weight.sum())) * unit if weight.sum() else -np.inf
            mean = np.zeros(case.latent_dim) if weight.sum() == 0 else weight @ partial[slots, h].astype(np.float64) / weight.sum()
            out[merge.row + token, head] = mean
    return out, lse


def check(case, got, want):
    out, lse = got
    tolerance = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2e-6}[case.dtype]
    np.testing.assert_allclose(out[:, :, :case.latent_dim], want[0], rtol=tolerance, atol=1e-5)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-5)
    assert np.isnan(out[:, :, case.latent_dim:]).all(), "the gap between rows is not written"


@pytest.mark.parametrize("name", MERGES)
def test_merge(name):
    case = MERGES[name]
    if case.overlap and machine.HAS_GPU and driver.device_info(0).capability < HOPPER_CAPABILITY:
        pytest.skip("grids do not overlap before sm_90")
    table, partial, statistics, used = drawn(case)
    check(case, launched(case, table, partial, statistics), expected(case, partial, statistics, used))


@pytest.mark.parametrize("tiles", [FEW, MANY], ids=["few", "many"])
def test_pieces_that_saw_nothing(tiles):
    """They have peak -inf, sum 0 and zeros; a row of nothing else gets out 0 and lse -inf."""
    case = Merge(tiles)
    table, partial, statistics, used = drawn(case)
    for slots in used:
        statistics[slots[-1]], partial[slots[-1]] = (-np.inf, 0), 0
        statistics[slots, 2], partial[slots, 2] = (-np.inf, 0), 0
    out, lse = launched(case, table, partial, statistics)
    check(case, (out, lse), expected(case, partial, statistics, used))
    assert np.isneginf(lse).any() and (out == 0).any()


@pytest.mark.parametrize("tiles", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("place", ["sum", "peak"])
@pytest.mark.parametrize("base2", [False, True])
def test_nan_of_a_piece_shows(tiles, place, base2):
    """In out and lse of its row, and nowhere else."""
    case = Merge(tiles, base2=base2)
    table, partial, statistics, used = drawn(case)
    want = expected(case, partial, statistics, used)
    statistics[used[0][1], 1, ("peak", "sum").index(place)] = np.nan  # row 1 of the first tile: token 0, head 1
    out, lse = launched(case, table, partial, statistics)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 1])
    want[0][0, 1], want[1][0, 1] = np.nan, np.nan
    check(case, (out, lse), want)


def test_no_lse_when_none_is_wanted():
    table, partial, statistics, used = drawn(MERGES["few"])
    out, lse = launched(MERGES["few"], table, partial, statistics, wants_lse=False)
    assert np.isnan(lse).all() and not np.isnan(out[0]).any()


def test_the_bits_do_not_depend_on_the_grid():
    case = MERGES["one_block"]
    table, partial, statistics, _ = drawn(case)
    first = launched(case, table, partial, statistics)
    for blocks in (2, 5, 40):
        again = launched(case._replace(blocks=blocks), table, partial, statistics)
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True))


def test_the_grid_is_no_larger_than_the_work():
    config = combine.CombineConfig(Shape(512, 64, "bfloat16"), work.ScheduleConfig(64, 64, False), True)
    assert combine.grid(config, 132, 2 * 132) == (132 * combine.BLOCKS_PER_SM, 1)
    assert combine.grid(config, 132, 4) == (2 * 64 * 16 // 4, 1)  # two merges of 64 rows of 16 strips, 4 warps a block
    assert combine.grid(config, 132, 0) == (0, 1)
