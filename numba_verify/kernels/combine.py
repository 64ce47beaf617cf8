"""combine: merges the partial results of tiles in pieces, by the merge table of `schedule`. A tile that was not cut costs nothing here.

    grid (any number of blocks), 128 threads; each warp by itself takes item after item:
      tile of few pieces     one row, all columns     lane l: columns 4 l .. 4 l + 3 of every 128, all pieces
      tile of many pieces    one row, 32 columns      lane l: columns 4 (l % 8) .. + 3, pieces l / 8, l / 8 + 4, l / 8 + 8, ...

    out = sum_k w_k * partial_k / sum_k w_k      w_k = total_k * exp(peak_k - max)
    lse = max + ln sum_k w_k                     all totals 0 (nobody saw anything): out 0, lse -inf; a NaN in either shows in both

    per warp, shared memory    ring [2][8][32 lanes] of 16 B: while 8 loads are added up, the next 8 are on their way
                               a lane reads only what it fetched itself, so there is no barrier

The order of summation depends on the number of pieces alone: few are added in key order; of many, every fourth one, then the four sums.

Two trips to memory: the row of the table; then statistics and the first 16 loads of partials at once. The grid is as small as fills the GPU:
a block for every row of every tile that might be cut would cost 5 us on an H200 in blocks that find nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import WARP, Shape
from .elements import elements
from .tile import LN_2, LOG2_E, warp_reductions
from .work import (
    FLAG_LSE,
    HEADER_FEW,
    HEADER_LAST,
    HEADER_MANY,
    MERGE_FIELDS,
    MERGE_PIECES,
    MERGE_ROW,
    MERGE_SLOT,
    MERGE_TILE,
    MERGE_TOKENS,
    ScheduleConfig,
    merge_rows,
    work_split,
)

THREADS = 128
WARPS = THREADS // WARP
SIGNATURE = ("address",) * 5 + ("i64",) * 6
#: Columns of a lane: one 16-byte load of float32.
COLUMNS = 4
LOAD_BYTES = 4 * COLUMNS
#: Groups of lanes that share the pieces of a tile of many: 8 lanes fetch 128 bytes of a piece together, a whole cache line.
GROUPS = 4
#: Loads of a batch, and batches on their way at once.
BATCH, BATCHES = 8, 2
RING_BYTES = BATCHES * BATCH * WARP * LOAD_BYTES
#: Blocks that fill an SM: their rings take 192 KB of the 228 KB of an H200; elsewhere fewer are resident and the rest queues.
BLOCKS_PER_SM = 6


@dataclass(frozen=True)
class CombineConfig:
    """Merges what a kernel left that worked by `schedule`. `base2`: its peaks are in units of log2 e, as are exponents of 2. `overlap`: it is
    launched so that it may start before that kernel has ended (sm_90 and later)."""

    shape: Shape
    schedule: ScheduleConfig
    base2: bool
    overlap: bool = False

    @property
    def strips(self) -> int:
        """Warps that merge one row of a tile of many pieces."""
        return self.shape.latent_dim * GROUPS // (COLUMNS * WARP)

    def __str__(self) -> str:
        mode = ("_base2" if self.base2 else "") + ("_overlap" if self.overlap else "") + ("_deterministic" if self.schedule.deterministic else "")
        return f"{self.shape.latent_dim}_{self.shape.dtype}_r{self.schedule.tile_rows}{mode}"


def shared_bytes() -> int:
    """A ring a warp."""
    return WARPS * RING_BYTES


def grid(config: CombineConfig, sm_count: int, max_partials: int) -> tuple[int, int]:
    """Blocks that fill the GPU, or fewer when even all merges there can be have fewer rows."""
    rows = (merge_rows(max_partials) - 1) * config.schedule.tile_rows
    return min(sm_count * BLOCKS_PER_SM, -(-rows * config.strips // WARPS)), 1


def build(lang: Any, config: CombineConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, int64, pointer, i64, f32 = lang.uint32, lang.uint64, lang.int64, lang.pointer, lang.i64, lang.f32
    tid, block_x, blocks_x, shared_address = lang.tid_x, lang.ctaid_x, lang.nctaid_x, lang.shared_address
    rows, strips, quotient = config.schedule.tile_rows, config.strips, lang.quotient_u32
    overlap, wait_for_partials = config.overlap, lang.griddepcontrol_wait
    merge_strip, merge_row = _merge(lang, config, 1, GROUPS), _merge(lang, config, -(-config.shape.latent_dim // (COLUMNS * WARP)), 1)

    def combine(out_address, lse_address, merges_address, partial_address, statistics_address,
                out_row, out_head, row_heads, num_heads, flags, num_rows):
        thread, merges, statistics = tid(), pointer(merges_address, i64), pointer(statistics_address, f32)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        ring = uint32(shared_address(uint32(0)) + warp * uint32(RING_BYTES) + lane * uint32(LOAD_BYTES))
        few, many, last = merges[HEADER_FEW], merges[HEADER_MANY], merges[HEADER_LAST]
        of_many = many * int64(rows * strips)
        # Neighbouring items go to different blocks: when there are few, they spread over the SMs.
        start, step = int64(warp) * int64(blocks_x()) + int64(block_x()), int64(blocks_x()) * int64(WARPS)
        for item in range(start, of_many + few * int64(rows), step):
            whole, index, strip = item >= of_many, uint32(item - of_many), uint32(0)
            if not whole:
                index = uint32(uint32(item) // uint32(strips))
                strip = uint32(uint32(item) - index * uint32(strips))
            tile = uint32(index // uint32(rows))
            h = uint32(index - tile * uint32(rows))
            at = (int64(1) + int64(tile) if whole else last - int64(tile)) * int64(MERGE_FIELDS)
            flat = uint32(uint32(merges[at + MERGE_TILE]) * uint32(rows) + h)
            token = quotient(flat, uint32(row_heads))
            head, row = uint32(flat - token * uint32(row_heads)), merges[at + MERGE_ROW] + int64(token)
            if int64(token) < merges[at + MERGE_TOKENS] and int64(head) < num_heads and row < num_rows:
                first, pieces = uint32(merges[at + MERGE_SLOT]), uint32(merges[at + MERGE_PIECES])
                out_at, lse_at = uint64(row) * uint64(out_row) + uint64(head) * uint64(out_head), uint64(row) * uint64(num_heads) + uint64(head)
                # The table is older than the kernel before; partials and statistics are its work. Asked again for each item, which costs nothing.
                if overlap:
                    wait_for_partials()
                if whole:
                    merge_row(ring, lane, first, pieces, h, strip, partial_address, statistics, out_address, out_at, lse_address, lse_at, flags)
                else:
                    merge_strip(ring, lane, first, pieces, h, strip, partial_address, statistics, out_address, out_at, lse_address, lse_at, flags)
        # Also with nothing to merge: whatever comes next in the stream waits for this grid alone, which may not end before the other.
        if overlap:
            wait_for_partials()

    return combine


def _formulas(lang: Any, config: CombineConfig) -> tuple[Callable, Callable]:
    """Device functions. weight(peak, total, base): of a piece, against the greatest peak.  lse(base, total): of the merged row."""
    float32, exp2, log2, base2 = lang.float32, lang.ex2_approx_f32, lang.lg2_approx_f32, config.base2
    log2e, ln2, minus_infinity = float32(LOG2_E), float32(LN_2), float32(-float("inf"))

    @lang.device
    def weight(peak, total, base):
        difference = peak - base
        return total * exp2(difference if base2 else difference * log2e)

    @lang.device
    def lse(base, total):
        value = minus_infinity
        if total != float32(0):
            value = (base + log2(total)) * ln2 if base2 else base + log2(total) * ln2
        return value

    return weight, lse


def _fetch(lang: Any, config: CombineConfig, parts: int, groups: int) -> Callable:
    """Device function: starts to bring the lane's pieces of the batch that begins with piece `base`, `parts` loads of each, into their half of
    the ring. `k`: the lane's first piece. Pieces and columns that do not exist become zeros. Always one commit group, empty for a batch
    behind the last piece."""
    uint32, uint64, unroll, copy, commit = lang.uint32, lang.uint64, lang.unroll, lang.cp_async_16_zfill, lang.cp_async_commit
    rows, latent, own = config.schedule.tile_rows, config.shape.latent_dim, BATCH // parts
    slot_of, slot_bytes, width = work_split(lang, config.schedule).slot, WARP * LOAD_BYTES, COLUMNS * WARP

    @lang.device
    def fetch(ring, base, group, first, pieces, h, column, partial_address):
        half = uint32(ring + uint32(base // uint32(own * groups) & uint32(1)) * uint32(BATCH * slot_bytes))
        if base < pieces:
            for u in range(own):
                unroll()
                k = uint32(base + uint32(u * groups) + group)
                at = (uint64(slot_of(first, k)) * uint64(rows) + uint64(h)) * uint64(4 * latent) + uint64(column) * uint64(4)
                for s in range(parts):
                    unroll()
                    there = k < pieces and column + uint32(s * width) < uint32(latent)
                    copy(uint32(half + uint32((u * parts + s) * slot_bytes)), partial_address + at + uint64(4 * s * width),
                         uint32(LOAD_BYTES) if there else uint32(0))
        commit()

    return fetch


def _add_up(lang: Any, groups: int) -> Callable:
    """Device function: x of all groups of lanes, the same bits in every lane."""
    uint32, shuffle = lang.uint32, lang.shfl_sync_bfly_f32

    @lang.device
    def one(x):
        return x

    @lang.device
    def four(x):
        x = x + shuffle(x, uint32(16))
        return x + shuffle(x, uint32(8))

    return {1: one, 4: four}[groups]


def _merge(lang: Any, config: CombineConfig, parts: int, groups: int) -> Callable:
    """Device function: a warp merges strip `strip` of row h of a tile. `groups` groups of lanes share the pieces; a lane has `parts` times 4
    columns, so the strip is parts * 128 / groups columns wide."""
    uint32, uint64, float32, pointer, f32, unroll = lang.uint32, lang.uint64, lang.float32, lang.pointer, lang.f32, lang.unroll
    maximum, shuffle, load, (_, warp_max) = lang.max_f32, lang.shfl_sync_idx_f32, lang.ld_shared_v4_f32, warp_reductions(lang)
    element, wait, new_values = elements(lang, config.shape.dtype), lang.cp_async_wait_group(BATCHES - 1), lang.local_array(COLUMNS * parts, f32)
    store_four, itemsize, add_up = element.store_four, element.itemsize, _add_up(lang, groups)
    (weight_of, lse_of), fetch, slot_of = _formulas(lang, config), _fetch(lang, config, parts, groups), work_split(lang, config.schedule).slot
    rows, latent, slot_bytes, width = config.schedule.tile_rows, config.shape.latent_dim, WARP * LOAD_BYTES, COLUMNS * WARP
    own, lanes, minus_infinity = BATCH // parts, WARP // groups, float32(-float("inf"))
    batch = own * groups

    @lang.device
    def merge(ring, lane, first, pieces, h, strip, partial_address, statistics, out_address, out_at, lse_address, lse_at, flags):
        group = uint32(lane // uint32(lanes))
        column = uint32(strip * uint32(parts * lanes * COLUMNS) + (lane & uint32(lanes - 1)) * uint32(COLUMNS))
        for b in range(BATCHES):
            unroll()
            fetch(ring, uint32(b * batch), group, first, pieces, h, column, partial_address)
        # Lane l has the statistics of piece l, and then of l + 32, ...
        own_peak, own_total = minus_infinity, float32(0)
        if lane < pieces:
            at = (uint64(slot_of(first, lane)) * uint64(rows) + uint64(h)) * uint64(2)
            own_peak, own_total = statistics[at], statistics[at + uint64(1)]
        peak, k = own_peak, uint32(lane + uint32(WARP))
        while k < pieces:
            peak = maximum(peak, statistics[(uint64(slot_of(first, k)) * uint64(rows) + uint64(h)) * uint64(2)])
            k = uint32(k + uint32(WARP))
        peak = warp_max(peak)
        base = peak if peak > minus_infinity else float32(0)  # nobody saw anything: -inf - -inf would be NaN
        weight, total, value, k = weight_of(own_peak, own_total, base), float32(0), new_values(), uint32(0)
        for i in range(COLUMNS * parts):
            unroll()
            value[i] = float32(0)
        while k < pieces:
            if k > uint32(0) and k & uint32(31) == uint32(0):
                weight = float32(0)
                if k + lane < pieces:
                    at = (uint64(slot_of(first, uint32(k + lane))) * uint64(rows) + uint64(h)) * uint64(2)
                    weight = weight_of(statistics[at], statistics[at + uint64(1)], base)
            wait()
            half = uint32(ring + uint32(k // uint32(batch) & uint32(1)) * uint32(BATCH * slot_bytes))
            for u in range(own):
                unroll()
                share = shuffle(weight, uint32(k + uint32(u * groups) + group) & uint32(31))
                total = total + share
                for s in range(parts):
                    unroll()
                    x = load(uint32(half + uint32((u * parts + s) * slot_bytes)))
                    for i in range(COLUMNS):
                        unroll()
                        value[COLUMNS * s + i] = value[COLUMNS * s + i] + share * x[i]
            fetch(ring, uint32(k + uint32(BATCHES * batch)), group, first, pieces, h, column, partial_address)
            k = uint32(k + uint32(batch))
        total, scale = add_up(total), float32(0)
        if total != float32(0):
            scale = float32(1) / total
        for s in range(parts):
            unroll()
            i = COLUMNS * s
            a, b, c, d = add_up(value[i]), add_up(value[i + 1]), add_up(value[i + 2]), add_up(value[i + 3])
            if group == uint32(0) and column + uint32(s * width) < uint32(latent):
                store_four(out_address + (out_at + uint64(column) + uint64(s * width)) * uint64(itemsize), a * scale, b * scale, c * scale,
                           d * scale)
        if (flags & FLAG_LSE) != 0 and lane == uint32(0) and strip == uint32(0):
            pointer(lse_address, f32)[lse_at] = lse_of(base, total)

    return merge
