"""paged: the tile steps of `flash` under a work list: persistent blocks, split-KV, partial results merged by `combine`.

    grid (CTAs), 256 threads. CTA p walks its share of the line of units that `schedule` cut (work.py, cuts.py):

    request r0, tile t0      t1                     r1, t0
    |..............|=========================|=======...............|        = units of this CTA
                   ^ starts inside t0: partial       ^ stops inside: partial

    for each piece [first, last) of a tile (draft token x HT heads): queries to shared memory, tile steps, then
      whole tile -> out, lse        part of a tile -> partial_out [slot][HT][V] (divided by its own sum), statistics [slot][HT][2] (maximum, sum)

A request longer than any other is cut into as many pieces as the others leave room for, so one long request still fills the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .attend import attend
from .config import TILE_THREADS, Shape, TileConfig
from .elements import elements
from .work import (
    CTA_COUNT,
    CTA_FIELDS,
    CTA_REQUEST,
    CTA_TILE,
    CTA_UNIT,
    FLAG_DRAFT_ASIDE,
    FLAG_LSE,
    KV_LEN,
    PIECE_BEGIN,
    PREFIX,
    Q_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
    SLOT_BEGIN,
    ScheduleConfig,
    work_split,
)

THREADS = TILE_THREADS
SIGNATURE = ("address",) * 11 + ("i64",) * 12 + ("f32",) * 2


@dataclass(frozen=True)
class PagedConfig:
    """Row layout, tile, and how the work was cut."""

    shape: Shape
    tile: TileConfig
    deterministic: bool

    @property
    def schedule(self) -> ScheduleConfig:
        """The schedule this kernel reads."""
        return ScheduleConfig(self.tile.kv_tile, self.tile.head_tile, self.deterministic)

    def __str__(self) -> str:
        mode = "_deterministic" if self.deterministic else ""
        return f"{self.shape.latent_dim}_{self.shape.rope_dim}_{self.shape.dtype}_{self.tile}{mode}"


def build(lang: Any, config: PagedConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, int64 = lang.uint32, lang.uint64, lang.int64
    pointer, u32, i64, f32 = lang.pointer, lang.u32, lang.i64, lang.f32
    tid, block_x = lang.tid_x, lang.ctaid_x
    steps = attend(lang, config.shape, config.tile)
    new_acc, new_statistics, start, load_queries = steps.new_accumulators, steps.new_statistics, steps.start, steps.load_queries
    keys, write, save, tag = steps.keys, steps.write, steps.save, elements(lang, config.shape.dtype).tag
    split = work_split(lang, config.schedule)
    blocks_of, piece_of, deterministic = split.blocks, split.piece, config.deterministic
    head_tile, latent = config.tile.head_tile, config.shape.latent_dim

    def paged(q_address, kv_address, draft_address, out_address, lse_address,
              requests_address, ctas_address, slots_address, visibility_address, partial_address, statistics_address,
              q_row, q_head, token_stride, page_size, page_gap, draft_stride, out_row, out_head, num_heads, words, flags, num_rows,
              sm_scale, logit_cap):
        t, p = tid(), int64(block_x())
        requests, ctas = pointer(requests_address, i64), pointer(ctas_address, i64)
        slots, visibility = pointer(slots_address, u32), pointer(visibility_address, u32)
        q_head, head_tiles = uint64(q_head), (num_heads + int64(head_tile - 1)) // int64(head_tile)
        acc, peak, total = new_acc(), new_statistics(), new_statistics()
        cta = p * CTA_FIELDS
        r, tile, unit, left = ctas[cta + CTA_REQUEST], ctas[cta + CTA_TILE], ctas[cta + CTA_UNIT], ctas[cta + CTA_COUNT]
        while left > int64(0):
            table = r * REQUEST_FIELDS
            tiles = requests[table + Q_LEN] * head_tiles
            if tile >= tiles:
                r, tile = r + int64(1), int64(0)  # the next request; one with no draft tokens is passed over in the same way
            else:
                prefix, kv_len = uint32(requests[table + PREFIX]), uint32(requests[table + KV_LEN])
                units = blocks_of(requests[table + KV_LEN])
                length = piece_of(tiles, units, requests[table + PIECE_BEGIN])
                piece = unit // length
                stop = (piece + int64(1)) * length
                stop = stop if stop < units else units
                stop = stop if stop - unit < left else unit + left
                draft0, slot0 = uint64(requests[table + Q_BEGIN]), uint64(requests[table + SLOT_BEGIN])
                row = uint64(requests[table + Q_BEGIN] + tile // head_tiles)
                head0 = uint64(tile % head_tiles) * uint64(head_tile)
                aside = prefix if (flags & FLAG_DRAFT_ASIDE) != 0 else kv_len
                bits, heads = row * uint64(words), uint32(uint64(num_heads) - head0)
                if row < uint64(num_rows):
                    start(acc, peak, total)
                    load_queries(q_address, row * uint64(q_row) + head0 * q_head, q_head, heads, t)
                    keys(acc, peak, total, unit, stop, prefix, kv_len, aside, visibility, bits, kv_address, slots, slot0, token_stride,
                         page_size, page_gap, draft_address, draft0, uint64(draft_stride), sm_scale, logit_cap, t)
                    if unit == int64(0) and stop == units:
                        write(acc, peak, total, heads, pointer(out_address, tag), row * uint64(out_row) + head0 * uint64(out_head),
                              uint64(out_head), pointer(lse_address, f32), row * uint64(num_heads) + head0, flags & FLAG_LSE, t)
                    else:
                        slot = int64(2) * p + (int64(1) if unit == int64(0) else int64(0))
                        if deterministic:
                            slot = requests[table + PIECE_BEGIN] + tile * ((units + length - int64(1)) // length) + piece
                        save(acc, peak, total, heads, pointer(partial_address, f32), uint64(slot) * uint64(head_tile * latent),
                             pointer(statistics_address, f32), uint64(slot) * uint64(2 * head_tile), t)
                left = left - (stop - unit)
                unit = stop
                if unit == units:
                    tile, unit = tile + int64(1), int64(0)

    return paged
