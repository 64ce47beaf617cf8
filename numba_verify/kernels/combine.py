"""combine: merges the partial results of tiles that `paged` cut. A tile that was not cut costs nothing here.

    grid (CTAs, HT), 128 threads: block (p, h) merges head row h of every cut tile whose first piece CTA p holds

    out = sum_k w_k * partial_k / sum_k w_k      w_k = sum_k * exp(max_k - max), k in key order, always from left to right
    lse = max + ln sum_k w_k                     all sums 0 (nobody saw anything): out 0, lse -inf
    thread t          columns t, t + 128, ...: one pass over the pieces for all of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .elements import elements
from .paged import PagedConfig
from .schedule import (
    CTA_COUNT,
    CTA_FIELDS,
    CTA_REQUEST,
    CTA_TILE,
    CTA_UNIT,
    FLAG_LSE,
    KV_LEN,
    PIECE_BEGIN,
    Q_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
    UNIT_BEGIN,
    work_split,
)
from .tile import LN_2, LOG2_E

THREADS = 128
SIGNATURE = ("address",) * 6 + ("i64",) * 5


@dataclass(frozen=True)
class CombineConfig:
    """Merges what a `paged` kernel of the same configuration left."""

    paged: PagedConfig

    def __str__(self) -> str:
        return str(self.paged)


def build(lang: Any, config: CombineConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, int64, float32 = lang.uint32, lang.uint64, lang.int64, lang.float32
    pointer, i64, f32, tid, block_x, block_y = lang.pointer, lang.i64, lang.f32, lang.tid_x, lang.ctaid_x, lang.ctaid_y
    exp2, log2, maximum = lang.ex2_approx_f32, lang.lg2_approx_f32, lang.max_f32
    paged = config.paged
    element, split = elements(lang, paged.shape.dtype), work_split(lang, paged.schedule)
    tag, store = element.tag, element.store
    blocks_of, piece_of, deterministic = split.blocks, split.piece, paged.deterministic
    head_tile, latent, threads = paged.tile.head_tile, paged.shape.latent_dim, THREADS
    columns = -(-latent // threads)
    unroll, new_values = lang.unroll, lang.local_array(columns, f32)
    minus_infinity, log2e, ln2 = float32(-float("inf")), float32(LOG2_E), float32(LN_2)

    @lang.device
    def slot_of(k, p, piece0):
        """Partial of the k-th piece of a tile that starts in CTA p (deterministic: whose pieces start at `piece0`)."""
        slot = piece0 + k
        if not deterministic:
            slot = int64(2) * p + int64(1) if k == int64(0) else int64(2) * (p + k)
        return slot

    @lang.device
    def piece_count(ctas, requests, p, table, tile, units, length):
        """Pieces of the tile: fixed by the request, or as many as there are CTAs that reach into it."""
        count = (units + length - int64(1)) // length
        if not deterministic:
            line_end = requests[table + UNIT_BEGIN] + (tile + int64(1)) * units
            row = p * CTA_FIELDS
            owner = ctas[row + CTA_REQUEST] * REQUEST_FIELDS
            position = (requests[owner + UNIT_BEGIN] + ctas[row + CTA_TILE] * blocks_of(requests[owner + KV_LEN])
                        + ctas[row + CTA_UNIT] + ctas[row + CTA_COUNT])  # where the share of CTA p ends on the line of units
            count, cta = int64(1), p
            while position < line_end:
                cta = cta + int64(1)
                position = position + ctas[cta * CTA_FIELDS + CTA_COUNT]
                count = count + int64(1)
        return count

    @lang.device
    def merge(partial, statistics, count, p, piece0, h, t, out, out_at, lse, lse_at, wants_lse):
        """One head row: every thread its columns, in one pass over the pieces."""
        peak = minus_infinity
        for k in range(count):
            peak = maximum(peak, statistics[(uint64(slot_of(int64(k), p, piece0)) * uint64(head_tile) + h) * uint64(2)])
        base = peak if peak > minus_infinity else float32(0)
        value, total = new_values(), float32(0)
        for c in range(columns):
            unroll()
            value[c] = float32(0)
        for k in range(count):
            at = uint64(slot_of(int64(k), p, piece0)) * uint64(head_tile) + h
            weight = statistics[at * uint64(2) + uint64(1)] * exp2((statistics[at * uint64(2)] - base) * log2e)
            total = total + weight
            for c in range(columns):
                unroll()
                column = t + uint32(c * threads)
                if column < uint32(latent):
                    value[c] = value[c] + weight * partial[at * uint64(latent) + uint64(column)]
        for c in range(columns):
            unroll()
            column = t + uint32(c * threads)
            result = float32(0)
            if total != float32(0):
                result = value[c] / total
            if column < uint32(latent):
                store(out, out_at + uint64(column), result)
        if wants_lse != 0 and t == uint32(0):
            result = minus_infinity
            if total != float32(0):
                result = base + log2(total) * ln2
            lse[lse_at] = result

    def combine(out_address, lse_address, requests_address, ctas_address, partial_address, statistics_address,
                out_row, out_head, num_heads, flags, num_rows):
        t, p, h = tid(), int64(block_x()), uint64(block_y())
        requests, ctas = pointer(requests_address, i64), pointer(ctas_address, i64)
        partial, statistics = pointer(partial_address, f32), pointer(statistics_address, f32)
        head_tiles = (num_heads + int64(head_tile - 1)) // int64(head_tile)
        cta = p * CTA_FIELDS
        r, tile, unit, left = ctas[cta + CTA_REQUEST], ctas[cta + CTA_TILE], ctas[cta + CTA_UNIT], ctas[cta + CTA_COUNT]
        while left > int64(0):
            table = r * REQUEST_FIELDS
            tiles = requests[table + Q_LEN] * head_tiles
            if tile >= tiles:
                r, tile = r + int64(1), int64(0)
            else:
                units = blocks_of(requests[table + KV_LEN])
                length = piece_of(tiles, units, requests[table + PIECE_BEGIN])
                row = uint64(requests[table + Q_BEGIN] + tile // head_tiles)
                head = uint64(tile % head_tiles) * uint64(head_tile) + h
                taken = units - unit if units - unit < left else left
                cut = length < units or taken < units  # in pieces by rule, or by the end of this share
                if unit == int64(0) and cut and head < uint64(num_heads) and row < uint64(num_rows):
                    count = piece_count(ctas, requests, p, table, tile, units, length)
                    merge(partial, statistics, count, p, requests[table + PIECE_BEGIN] + tile * count, h, t, pointer(out_address, tag),
                          row * uint64(out_row) + head * uint64(out_head), pointer(lse_address, f32), row * uint64(num_heads) + head,
                          flags & FLAG_LSE)
                left = left - taken
                unit = unit + taken
                if unit == units:
                    tile, unit = tile + int64(1), int64(0)

    return combine
