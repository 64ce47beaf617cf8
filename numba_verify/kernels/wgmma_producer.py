"""Producer warps of `wgmma`: a tile's queries, then its KV rows from anywhere in the pool, into the ring, a slot at a time.

    thread t      rows t // 8, t // 8 + 16, ... of the slot; 16-byte chunk t % 8 of every segment: 8 neighbours copy 128 contiguous bytes a step

A key at or past the end of the list becomes zeros: its weight is 0, and 0 * NaN from memory that nobody owns would not be. So do query rows past
the request's last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mma_config import ITEMSIZE, SEGMENT_BYTES, THREADS_PER_ROW
from .mma_work import block_bytes
from .tile import key_functions
from .wgmma_config import ROWS, WARPGROUP, WgmmaConfig
from .wgmma_work import Parts
from .work import KV_LEN, PREFIX, Q_BEGIN, Q_LEN, REQUEST_FIELDS, SLOT_BEGIN

#: Rows that the warpgroup copies side by side.
PASS_ROWS = WARPGROUP // THREADS_PER_ROW


def _copies(lang: Any, config: WgmmaConfig) -> Callable:
    """copy_row(target, source, valid): this thread's chunks of one row, all segments."""
    uint32, uint64, unroll, copy = lang.uint32, lang.uint64, lang.unroll, lang.cp_async_16_zfill
    segments, segment = config.segments, config.segment_bytes

    @lang.device
    def copy_row(target, source, valid):
        for s in range(segments):
            unroll()
            copy(uint32(target + uint32(s * segment)), source + uint64(s * SEGMENT_BYTES), uint32(16) if valid else uint32(0))

    return copy_row


def _queries(lang: Any, config: WgmmaConfig, parts: Parts, copy_row: Callable) -> Callable:
    """fetch(...): the query rows of a tile into the next slots; the first of them is `number`."""
    uint32, uint64, unroll, landed = lang.uint32, lang.uint64, lang.unroll, lang.cp_async_mbarrier_arrive_noinc
    wait, place_of, phase_of = lang.mbarrier_wait(True), parts.ring.place, parts.ring.phase
    tile, at, size = config.tile, config.layout, uint32(block_bytes(config))
    slots, passes = tile.q_slots, ROWS // tile.q_slots // PASS_ROWS
    full_at, empty_at, item, quotient = uint32(at.full), uint32(at.empty), uint64(ITEMSIZE), lang.quotient_u32

    @lang.device
    def fetch(base, target, number, row, sub, first, row_heads, rows, q_address, q_begin, q_row, q_head):
        """target: where this thread's row of slot 0 goes; first: flat row (draft token x head) of the tile's first; rows: how many there are."""
        for i in range(slots):
            place = place_of(uint32(number + uint32(i)))
            # The score or value warps have read what lay in this slot before; the first round finds it free.
            wait(uint32(base + empty_at + (place << uint32(3))), uint32(phase_of(uint32(number + uint32(i))) ^ uint32(1)))
            for j in range(passes):
                unroll()
                flat = uint32(first + row + uint32((uint32(i) * uint32(passes) + uint32(j)) * uint32(PASS_ROWS)))
                token = quotient(flat, row_heads)
                valid, source = flat < rows, q_address
                if valid:
                    source = q_address + ((q_begin + uint64(token)) * q_row + uint64(flat - token * row_heads) * q_head) * item
                copy_row(uint32(target + place * size + uint32(j * PASS_ROWS * SEGMENT_BYTES)), source + (uint64(sub) << uint64(4)), valid)
            landed(uint32(base + full_at + (place << uint32(3))))

    return fetch


def producer_role(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """Device function that one producer thread runs from start to end."""
    uint32, uint64, int64, unroll, u32, pointer, i64 = (lang.uint32, lang.uint64, lang.int64, lang.unroll, lang.u32, lang.pointer, lang.i64)
    landed, wait = lang.cp_async_mbarrier_arrive_noinc, lang.mbarrier_wait(True)
    commit_copies, wait_for_copies = lang.cp_async_commit, lang.cp_async_wait_group(0)
    _, byte_offset = key_functions(lang, ITEMSIZE)
    find, stop_of, units_of, row_offset = parts.walk.find, parts.walk.stop, parts.walk.units, parts.swizzle.row
    share_begin, place_of, phase_of, copy_row = parts.share_begin, parts.ring.place, parts.ring.phase, _copies(lang, config)
    fetch_queries = _queries(lang, config, parts, copy_row)
    at, fields, keys, q_slots, size = config.layout, REQUEST_FIELDS, config.tile.keys, config.tile.q_slots, uint32(block_bytes(config))
    ring_at, full_at, empty_at = uint32(at.ring), uint32(at.full), uint32(at.empty)
    passes = keys // PASS_ROWS
    new_slots = lang.local_array(passes, u32)

    @lang.device
    def slot_of(slots, slot0, key, pooled):
        """The pool row of a key; read long before it is needed."""
        found = uint32(0)
        if key < pooled:
            found = slots[slot0 + uint64(key)]
        return found

    @lang.device
    def produce(base, t, ctas, p, requests_address, slots, q_address, q_row, q_head, num_rows, kv_address, token_stride, page_size, page_gap,
                draft_address, draft_stride, row_heads, aside):
        """t: thread of the role. aside: nonzero when draft rows come from draft_kv."""
        row, sub = t >> uint32(3), t & uint32(7)
        target, chunk = uint32(base + ring_at + row_offset(row, sub)), uint64(sub) << uint64(4)
        number, found = uint32(0), new_slots()
        (r, tile, unit, left), requests = share_begin(ctas, p, requests_address), pointer(requests_address, i64)
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            stop = stop_of(requests, r, unit, left, row_heads)
            table = int64(r) * fields
            q_begin, readable = uint64(requests[table + Q_BEGIN]), uint64(requests[table + Q_LEN])
            if q_begin + readable > uint64(num_rows):
                readable = uint64(num_rows) - q_begin if q_begin < uint64(num_rows) else uint64(0)
            kv_len, pooled = uint32(requests[table + KV_LEN]), uint32(requests[table + KV_LEN])
            if aside != 0:
                pooled = uint32(requests[table + PREFIX])
            slot0 = uint64(requests[table + SLOT_BEGIN])
            key = uint32(unit * uint32(keys) + row)
            for i in range(passes):
                unroll()
                found[i] = slot_of(slots, slot0, uint32(key + uint32(i * PASS_ROWS)), pooled)
            # While these are on their way.
            fetch_queries(base, target, number, row, sub, uint32(tile * uint32(ROWS)), row_heads, uint32(uint32(readable) * row_heads), q_address,
                          q_begin, q_row, q_head)
            number = uint32(number + uint32(q_slots))
            for _ in range(unit, stop):
                place = place_of(number)
                # The value warps have read what lay in this slot before; the first round finds it free.
                wait(uint32(base + empty_at + (place << uint32(3))), uint32(phase_of(number) ^ uint32(1)))
                for i in range(passes):
                    unroll()
                    source = kv_address + byte_offset(found[i], token_stride, page_size, page_gap)
                    if key >= pooled and key < kv_len:
                        source = draft_address + (q_begin + uint64(key - pooled)) * draft_stride * uint64(ITEMSIZE)
                    copy_row(uint32(target + place * size + uint32(i * PASS_ROWS * SEGMENT_BYTES)), source + chunk, key < kv_len)
                    found[i] = slot_of(slots, slot0, uint32(key + uint32(keys)), pooled)
                    key = uint32(key + uint32(PASS_ROWS))
                landed(uint32(base + full_at + (place << uint32(3))))
                number = uint32(number + uint32(1))
            left, unit = uint32(left - uint32(stop - unit)), stop
            if unit == units_of(requests, r):
                tile, unit = uint32(tile + uint32(1)), uint32(0)
        # No thread leaves with copies under way.
        commit_copies()
        wait_for_copies()

    return produce
