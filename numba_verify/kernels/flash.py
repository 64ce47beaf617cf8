"""flash: shared-memory head tiling with online softmax. The kernel to read first.

    grid (rows, ceil(H / HT)), 256 threads: one block = one draft token x HT heads, over all keys of its request

              keys 0..TK-1   TK..2TK-1        L .. L+n-1
    heads   +--------------+--------------+ +-----------+
    HT rows |    tile 0    |    tile 1    |…| mask bits |      one KV tile in shared memory serves all HT heads
            +--------------+--------------+ +-----------+

`naive` fetches every KV row once a head; here HT heads share one fetch, so global KV traffic falls by HT. The mask is the prefix length
plus one bit a draft token: it is looked at per key and costs nothing that grows with the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .attend import attend
from .config import TILE_THREADS, Shape, TileConfig
from .elements import elements
from .naive import SIGNATURE as SIGNATURE
from .work import FLAG_DRAFT_ASIDE, FLAG_LSE, KV_LEN, PREFIX, Q_BEGIN, REQUEST_FIELDS, SLOT_BEGIN

THREADS = TILE_THREADS


@dataclass(frozen=True)
class FlashConfig:
    """Row layout and tile."""

    shape: Shape
    tile: TileConfig

    def __str__(self) -> str:
        return f"{self.shape.latent_dim}_{self.shape.rope_dim}_{self.shape.dtype}_{self.tile}"


def grid(config: FlashConfig, rows: int, num_heads: int) -> tuple[int, int]:
    return rows, -(-num_heads // config.tile.head_tile)


def build(lang: Any, config: FlashConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`. Arguments as `naive`."""
    uint32, uint64 = lang.uint32, lang.uint64
    pointer, u32, i32, i64, f32 = lang.pointer, lang.u32, lang.i32, lang.i64, lang.f32
    tid, block_x, block_y = lang.tid_x, lang.ctaid_x, lang.ctaid_y
    steps = attend(lang, config.shape, config.tile)
    new_acc, new_statistics, start, load_queries = steps.new_accumulators, steps.new_statistics, steps.start, steps.load_queries
    keys, write, tag = steps.keys, steps.write, elements(lang, config.shape.dtype).tag
    head_tile, kv_tile = config.tile.head_tile, config.tile.kv_tile
    fields = uint64(REQUEST_FIELDS)
    q_begin_at, prefix_at, kv_len_at, slots_at = uint64(Q_BEGIN), uint64(PREFIX), uint64(KV_LEN), uint64(SLOT_BEGIN)

    def flash(q_address, kv_address, draft_address, out_address, lse_address,
              requests_address, rows_address, slots_address, visibility_address,
              q_row, q_head, token_stride, page_size, page_gap, draft_stride, out_row, out_head, num_heads, words, flags,
              sm_scale, logit_cap):
        row, head0, t = uint64(block_x()), uint64(block_y()) * uint64(head_tile), tid()
        request = pointer(rows_address, i32)[row]
        if request < 0:
            return  # the whole block: no thread is left behind at a barrier
        requests, slots, visibility = pointer(requests_address, i64), pointer(slots_address, u32), pointer(visibility_address, u32)
        table = uint64(request) * fields
        prefix, kv_len = uint32(requests[table + prefix_at]), uint32(requests[table + kv_len_at])
        draft0, slot0 = uint64(requests[table + q_begin_at]), uint64(requests[table + slots_at])
        aside = prefix if (flags & FLAG_DRAFT_ASIDE) != 0 else kv_len
        bits, heads = row * uint64(words), uint32(uint64(num_heads) - head0)

        acc, peak, total = new_acc(), new_statistics(), new_statistics()
        start(acc, peak, total)
        load_queries(q_address, row * uint64(q_row) + head0 * uint64(q_head), uint64(q_head), heads, t)
        tiles = (kv_len + uint32(kv_tile - 1)) // uint32(kv_tile)
        keys(acc, peak, total, 0, tiles, prefix, kv_len, aside, visibility, bits, kv_address, slots, slot0, token_stride, page_size, page_gap,
             draft_address, draft0, uint64(draft_stride), sm_scale, logit_cap, t)
        write(acc, peak, total, heads, pointer(out_address, tag), row * uint64(out_row) + head0 * uint64(out_head), uint64(out_head),
              pointer(lse_address, f32), row * uint64(num_heads) + head0, flags & FLAG_LSE, t)

    return flash
