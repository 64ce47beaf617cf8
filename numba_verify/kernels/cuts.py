"""Where the line of work is cut: which share of it each CTA takes. The cheapest of three ways:

    whole    no tile is cut. No more tiles than CTAs: a CTA for each. More: even cuts, each moved to the nearest border of a tile
    apart    no CTA works on two tiles: each tile has CTAs of its own, as few as keep to a common length
    even     every CTA gets the same length of line: all end together, but many CTAs end one tile and begin another

    cost in units    whole  longest share        apart  longest share + c        even  longest share + 2 c + 1 / 24 of it

c is what loading the queries of a piece and writing its result cost. Every CTA pays it for each of its tiles; beyond that, `even` pays it for
the second half of a tile, and both ways that cut for the merge. The 1 / 24: CTAs of a request that begin at the same key read the same rows at
the same time, from the cache; those that begin anywhere, each from memory. A deterministic plan has pieces that do not depend on the way and
takes the even cuts.

Where tiles are cut, a share is no shorter than `min_keys`, nor than the cheapest when few keys meet many CTAs: all partial results go through the
same cache and one kernel that merges them, so S keys a share cost S + merge_keys * keys of all tiles / S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import WARP
from .scans import SCHEDULE_THREADS, WARPS, block_sum, warp_scan
from .work import (
    CTA_BEGIN,
    CTA_COUNT,
    CTA_FIELDS,
    CTA_REQUEST,
    CTA_TILE,
    CTA_UNIT,
    KV_LEN,
    PIECE_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
    UNIT_BEGIN,
    ScheduleConfig,
    request_finder,
    work_split,
)

EVEN, APART, WHOLE = range(3)
#: What even cuts cost since CTAs of a request are out of step, as a part of the share.
OUT_OF_STEP = 24
#: c, in keys: on an H200 some 3 us, in which a CTA does about 128 keys.
PIECE_COST_KEYS = 128


def cutter(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: fills the CTA table from the request table. `longest`: units of the longest tile. Returns whether a tile may be cut."""
    int64, deterministic, min_units, cost = lang.int64, config.deterministic, config.min_units, -(-PIECE_COST_KEYS // config.kv_tile)
    # Of a deterministic plan the share does not say how many pieces there are.
    kv_tile, merge_keys = int64(config.kv_tile), int64(0 if deterministic else config.merge_keys)
    table, sum_up, choose = _table(lang, config), block_sum(lang), _chooser(lang, config)

    @lang.device
    def cut(ctas, requests, batch, row_heads, num_ctas, units_in_all, tiles_in_all, longest, thread):
        share = (units_in_all + num_ctas - int64(1)) // num_ctas
        payload = share if share > int64(min_units) else int64(min_units)
        # While shares of one unit more are cheaper: by the second condition, which implies the first but could be too large a number.
        while (payload + int64(1)) * kv_tile < num_ctas * merge_keys and payload * (payload + int64(1)) * kv_tile < units_in_all * merge_keys:
            payload = payload + int64(1)
        most = payload + int64(2 * cost) + payload // int64(OUT_OF_STEP)  # what an uncut share may be long
        way, length, used = int64(EVEN), payload, int64(0)
        if not deterministic:
            if tiles_in_all <= num_ctas:
                way, length, used = choose(requests, batch, row_heads, num_ctas, tiles_in_all, payload, most, longest, thread)
            elif longest <= most:
                way, length = int64(WHOLE), share
        wanted = True
        # A loop and not a second call: that would be inlined as well, and code that runs once costs by its length.
        while wanted:
            found = table(ctas, requests, batch, row_heads, num_ctas, way, length, used, units_in_all, thread)
            wanted = False
            if way == int64(WHOLE):
                # The sum also lets all threads read the table before it is written anew.
                _, longer = sum_up(int64(1) if found > most else int64(0), thread)
                if longer > int64(0):
                    way, length, wanted = int64(EVEN), payload, True
        return way == int64(EVEN) or used > tiles_in_all

    return cut


def _table(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: fills the CTA table in one way; returns the longest share of the thread's CTAs. `length`: units a CTA, where tiles have
    CTAs of their own units a piece at most; then `used` CTAs have work."""
    uint32, int64, bar_sync, fields, cta_fields, threads = lang.uint32, lang.int64, lang.bar_sync, REQUEST_FIELDS, CTA_FIELDS, SCHEDULE_THREADS
    split, find, pieces_of, deterministic = work_split(lang, config), request_finder(lang), _pieces(lang), config.deterministic
    tiles_of, blocks_of, piece_of = split.tiles, split.blocks, split.piece

    @lang.device
    def start(ctas, requests, batch, row_heads, p, way, length, used, units_in_all):
        """Row p, but for CTA_COUNT."""
        r, tile, unit, begin = int64(0), int64(0), int64(0), units_in_all
        at, end, field = p * length, units_in_all, int64(UNIT_BEGIN)
        if way == int64(APART):
            at, end, field = p, used, int64(PIECE_BEGIN)
        if at < end:
            r = find(requests, batch, at, field)
            row = r * fields
            inside, units, tiles = at - requests[row + field], blocks_of(requests[row + KV_LEN]), tiles_of(requests[row + Q_LEN], row_heads)
            if way == int64(APART):
                pieces = pieces_of(units, length)
                tile = int64(uint32(uint32(inside) // pieces))
                unit = (inside - tile * int64(pieces)) * int64(pieces_of(units, pieces))
            else:
                tile = inside // units
                unit = inside - tile * units
                if deterministic:
                    # The first piece that starts here or later.
                    piece = piece_of(tiles, units, requests[row + PIECE_BEGIN])
                    unit = (unit + piece - int64(1)) // piece * piece
                    unit = unit if unit < units else units
                elif way == int64(WHOLE):
                    unit = units if unit + unit >= units else int64(0)
            begin = requests[row + UNIT_BEGIN] + tile * units + unit
            if unit == units:
                tile, unit = tile + int64(1), int64(0)
            if tile == tiles:
                r, tile = find(requests, batch, begin, UNIT_BEGIN), int64(0)
        row = p * cta_fields
        ctas[row + CTA_REQUEST] = r
        ctas[row + CTA_TILE] = tile
        ctas[row + CTA_UNIT] = unit
        ctas[row + CTA_BEGIN] = begin

    @lang.device
    def table(ctas, requests, batch, row_heads, num_ctas, way, length, used, units_in_all, thread):
        for p in range(int64(thread), num_ctas + int64(1), int64(threads)):
            start(ctas, requests, batch, row_heads, p, way, length, used, units_in_all)
        # The CTA table is complete before any thread looks at where the next CTA begins.
        bar_sync()
        most = int64(0)
        for p in range(int64(thread), num_ctas, int64(threads)):
            row = p * cta_fields
            count = ctas[row + cta_fields + CTA_BEGIN] - ctas[row + CTA_BEGIN]
            ctas[row + CTA_COUNT] = count
            most = most if most > count else count
        return most

    return table


def _pieces(lang: Any) -> Callable:
    """Device function: ceil(units / length) as uint32. Both fit 32 bits, whose division takes a third of the time."""
    uint32 = lang.uint32

    @lang.device
    def pieces(units, length):
        return uint32(uint32(uint32(units) + uint32(length) - uint32(1)) // uint32(length))

    return pieces


def _chooser(lang: Any, config: ScheduleConfig) -> Callable:
    """choose(...) -> (way, length, used) of `_table`, where no more tiles are than CTAs. A tile may then have a CTA: where no tile is cut, those
    are its tiles' numbers, which the request table holds already."""
    int64, bar_sync, threads, fields = lang.int64, lang.bar_sync, SCHEDULE_THREADS, REQUEST_FIELDS
    sum_up, first_fitting, pieces_of, split = block_sum(lang), _first_fitting(lang, config), _pieces(lang), work_split(lang, config)
    tiles_of, blocks_of, cost = split.tiles, split.blocks, -(-PIECE_COST_KEYS // config.kv_tile)

    @lang.device
    def assign(requests, batch, row_heads, length, thread):
        """Gives each request its first CTA; returns how many have work."""
        used = int64(0)
        for base in range(int64(0), batch, int64(threads)):
            r = base + int64(thread)
            count = int64(0)
            if r < batch:
                count = tiles_of(requests[r * fields + Q_LEN], row_heads) * int64(pieces_of(blocks_of(requests[r * fields + KV_LEN]), length))
            before, here = sum_up(count, thread)
            if r < batch:
                requests[r * fields + PIECE_BEGIN] = used + before
            used = used + here
            # The first CTAs are written before any thread looks up a request by them, and the sums read before the next overwrite them.
            bar_sync()
        return used

    @lang.device
    def choose(requests, batch, row_heads, num_ctas, tiles_in_all, payload, most, longest, thread):
        way, length, used, best = int64(EVEN), payload, int64(0), most
        if longest <= best:
            way, length, used, best = int64(APART), longest, tiles_in_all, longest
        if payload + int64(cost) < best:
            common = first_fitting(requests, batch, row_heads, num_ctas, payload, most - payload - int64(cost), thread)
            if common > int64(0) and common + int64(cost) < best:
                way, length, used = int64(APART), common, assign(requests, batch, row_heads, common, thread)
        return way, length, used

    return choose


def _first_fitting(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: a length from `payload` on with which all tiles have enough CTAs; 0 if none of those tried does. From `payload` + `span` on
    even cuts are no dearer. Each warp tries one: with a span of 8 at most that is every length there is, else they are spread over it, and what
    is found may be above the least by less than an eighth of the span."""
    uint32, int64, shared, i64, bar_sync, scan = lang.uint32, lang.int64, lang.shared, lang.i64, lang.bar_sync, warp_scan(lang)
    split, pieces_of = work_split(lang, config), _pieces(lang)
    tiles_of, blocks_of, fields, warps, last = split.tiles, split.blocks, REQUEST_FIELDS, WARPS, uint32(WARP - 1)

    @lang.device
    def first_fitting(requests, batch, row_heads, num_ctas, payload, span, thread):
        needed = shared(uint32(8 * WARPS), i64)
        lane, warp, step = uint32(thread & last), uint32(thread >> uint32(5)), (span + int64(warps - 1)) // int64(warps)
        length, need = payload + int64(warp) * step, int64(0)
        for r in range(int64(lane), batch, int64(WARP)):
            need = need + tiles_of(requests[r * fields + Q_LEN], row_heads) * int64(pieces_of(blocks_of(requests[r * fields + KV_LEN]), length))
        need = scan(need, lane)
        if lane == last:
            needed[warp] = need
        # What each length needs is written before any thread looks for the first that fits.
        bar_sync()
        found = int64(0)
        for w in range(warps):
            if found == int64(0) and needed[uint32(w)] <= num_ctas:
                found = payload + int64(w) * step
        return found

    return first_fitting
