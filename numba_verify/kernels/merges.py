"""Which tiles are in pieces, for `combine`: the merge table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .scans import SCHEDULE_THREADS, block_sum
from .work import (
    CTA_COUNT,
    CTA_FIELDS,
    CTA_REQUEST,
    CTA_TILE,
    CTA_UNIT,
    FEW_PIECES,
    HEADER_FEW,
    HEADER_LAST,
    HEADER_MANY,
    KV_LEN,
    MERGE_FIELDS,
    MERGE_PIECES,
    MERGE_ROW,
    MERGE_SLOT,
    MERGE_TILE,
    MERGE_TOKENS,
    PIECE_BEGIN,
    Q_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
    ScheduleConfig,
    work_split,
)


def merge_lister(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: fills the merge table from the first `count` rows of the CTA table, or (deterministic) of the request table."""
    int64, bar_sync, threads, fields = lang.int64, lang.bar_sync, SCHEDULE_THREADS, MERGE_FIELDS
    sum_up, look = block_sum(lang), _tiles_of_request(lang, config) if config.deterministic else _tile_of_cta(lang, config)

    @lang.device
    def put(merges, before, max_partials, slot, pieces, tile, requests, table):
        row = int64(1) + (before & int64(0xFFFFFFFF))
        if pieces > int64(FEW_PIECES):
            row = (max_partials >> int64(1)) - (before >> int64(32))
        at = row * fields
        merges[at + MERGE_SLOT] = slot
        merges[at + MERGE_PIECES] = pieces
        merges[at + MERGE_TILE] = tile
        merges[at + MERGE_ROW] = requests[table + Q_BEGIN]
        merges[at + MERGE_TOKENS] = requests[table + Q_LEN]

    @lang.device
    def list_merges(merges, requests, ctas, row_heads, count, max_partials, thread):
        # Tiles so far, those of few pieces in the low half and those of many in the high one: one sum for both.
        in_all = int64(0)
        for base in range(int64(0), count, int64(threads)):
            i = base + int64(thread)
            table, first, tiles, pieces, slot = int64(0), int64(0), int64(0), int64(1), int64(0)
            if i < count:
                table, first, tiles, pieces, slot = look(requests, ctas, row_heads, i)
            if pieces == int64(1):
                tiles = int64(0)
            one = int64(1) if pieces <= int64(FEW_PIECES) else int64(1 << 32)
            before, here = sum_up(tiles * one, thread)
            for k in range(tiles):
                put(merges, in_all + before + k * one, max_partials, slot + k * pieces, pieces, first + k, requests, table)
            in_all = in_all + here
            # All threads have read the sums before the next ones overwrite them.
            bar_sync()
        if thread == 0:
            merges[HEADER_FEW] = in_all & int64(0xFFFFFFFF)
            merges[HEADER_MANY] = in_all >> int64(32)
            merges[HEADER_LAST] = max_partials >> int64(1)

    return list_merges


def _tile_of_cta(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: (request's place in its table, tile, tiles, pieces, slot) of the tile that CTA p begins and does not finish: there is at
    most one, in whose middle CTA p + 1 begins. Then its share is full, as are those of all CTAs that the tile runs through."""
    int64, blocks_of = lang.int64, work_split(lang, config).blocks

    @lang.device
    def look(requests, ctas, row_heads, p):
        following = (p + int64(1)) * CTA_FIELDS
        share, unit = ctas[p * CTA_FIELDS + CTA_COUNT], ctas[following + CTA_UNIT]
        table, tile, tiles, pieces = int64(0), int64(0), int64(0), int64(1)
        if unit > int64(0) and unit <= share:
            tile, table = ctas[following + CTA_TILE], ctas[following + CTA_REQUEST] * REQUEST_FIELDS
            tiles, pieces = int64(1), int64(1) + (blocks_of(requests[table + KV_LEN]) - unit + share - int64(1)) // share
        return table, tile, tiles, pieces, int64(2) * p + int64(1)

    return look


def _tiles_of_request(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: (place in the table, first tile, tiles, pieces of one, slot) of request r of a deterministic plan."""
    int64, split = lang.int64, work_split(lang, config)
    tiles_of, blocks_of, piece_of = split.tiles, split.blocks, split.piece

    @lang.device
    def look(requests, ctas, row_heads, r):
        table = r * REQUEST_FIELDS
        tiles, pieces = tiles_of(requests[table + Q_LEN], row_heads), int64(1)
        if tiles > int64(0):
            units = blocks_of(requests[table + KV_LEN])
            length = piece_of(tiles, units, requests[table + PIECE_BEGIN])
            pieces = (units + length - int64(1)) // length
        return table, int64(0), tiles, pieces, requests[table + PIECE_BEGIN]

    return look
