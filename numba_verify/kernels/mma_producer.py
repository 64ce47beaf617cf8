"""Producer warps of `mma`: KV rows from anywhere in the pool into the ring, 16 keys a block, ahead of everybody else.

    thread t      row t // 8 of the block; 16-byte chunks t % 8, t % 8 + 8, ...: 8 neighbours copy 128 contiguous bytes a step

A key at or past the end of the list becomes zeros: its weight is 0, and 0 * NaN from memory that nobody owns would not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mma_config import BLOCK_KEYS, ITEMSIZE, THREADS_PER_ROW, MmaConfig, layout
from .mma_work import Parts, block_bytes
from .tile import key_functions
from .work import CTA_COUNT, CTA_FIELDS, CTA_REQUEST, CTA_TILE, CTA_UNIT, KV_LEN, PREFIX, Q_BEGIN, REQUEST_FIELDS, SLOT_BEGIN


def producer_role(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """Device function that one producer thread runs from start to end."""
    uint32, uint64, int64, unroll, u32 = lang.uint32, lang.uint64, lang.int64, lang.unroll, lang.u32
    copy, landed, wait = lang.cp_async_16_zfill, lang.cp_async_mbarrier_arrive_noinc, lang.mbarrier_wait(config.sm_90)
    commit, wait_for_copies = lang.cp_async_commit, lang.cp_async_wait_group(0)
    _, byte_offset = key_functions(lang, ITEMSIZE)
    steps, place, blocks = parts.walk, parts.swizzle, parts.ring
    find, stop_of, units_of, row_offset = steps.find, steps.stop, steps.units, place.row
    place_of, phase_of, full_of = blocks.place, blocks.phase, parts.full.place
    at, fields, key_blocks, keys = layout(config.shape, config.tile), REQUEST_FIELDS, config.tile.key_blocks, config.tile.keys
    segments, size = config.shape.row_dim * ITEMSIZE // (16 * THREADS_PER_ROW), uint32(block_bytes(config))
    ring_at, full_at, empty_at = uint32(at.ring), uint32(at.full), uint32(at.empty)
    new_slots, block_keys = lang.local_array(key_blocks, u32), BLOCK_KEYS

    @lang.device
    def slots_of(found, slots, slot0, key, pooled):
        """Pool rows of this thread's keys of one step, `key` its first; read long before they are needed."""
        for b in range(key_blocks):
            unroll()
            found[b] = uint32(0)
            if uint32(key + uint32(b * block_keys)) < pooled:
                found[b] = slots[slot0 + uint64(key + uint32(b * block_keys))]

    @lang.device
    def copy_row(target, source, valid):
        for s in range(segments):
            unroll()
            copy(uint32(target + uint32(s * 128)), source + uint64(s * 128), uint32(16) if valid else uint32(0))

    @lang.device
    def produce(base, t, ctas, p, requests, slots, kv_address, token_stride, page_size, page_gap, draft_address, draft_stride, row_heads, aside):
        """t: thread of the role. aside: nonzero when draft rows come from draft_kv."""
        row, sub = t >> uint32(3), t & uint32(7)
        target = uint32(base + ring_at + row_offset(row, sub))
        chunk = uint64(sub) * uint64(16)
        number, found = uint32(0), new_slots()
        cta = p * CTA_FIELDS
        r, tile, unit, left = (uint32(ctas[cta + CTA_REQUEST]), uint32(ctas[cta + CTA_TILE]), uint32(ctas[cta + CTA_UNIT]),
                               uint32(ctas[cta + CTA_COUNT]))
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            stop = stop_of(requests, r, unit, left, row_heads)
            table = int64(r) * fields
            kv_len, pooled = uint32(requests[table + KV_LEN]), uint32(requests[table + KV_LEN])
            if aside != 0:
                pooled = uint32(requests[table + PREFIX])
            slot0, draft0 = uint64(requests[table + SLOT_BEGIN]), uint64(requests[table + Q_BEGIN])
            key = uint32(unit * uint32(keys) + row)
            slots_of(found, slots, slot0, key, pooled)
            for _ in range(unit, stop):
                sources = new_slots()
                for b in range(key_blocks):
                    unroll()
                    sources[b] = found[b]
                slots_of(found, slots, slot0, uint32(key + uint32(keys)), pooled)
                for b in range(key_blocks):
                    unroll()
                    source = kv_address + byte_offset(sources[b], token_stride, page_size, page_gap)
                    if key >= pooled and key < kv_len:
                        source = draft_address + (draft0 + uint64(key - pooled)) * draft_stride * uint64(ITEMSIZE)
                    # The value warps have read what lay in this block before; the first round finds it free.
                    slot = place_of(number)
                    wait(uint32(base + empty_at + (slot << uint32(3))), uint32(phase_of(number) ^ uint32(1)))
                    copy_row(uint32(target + slot * size), source + chunk, key < kv_len)
                    landed(uint32(base + full_at + (full_of(number) << uint32(3))))
                    number = uint32(number + uint32(1))
                    key = uint32(key + uint32(block_keys))
            left, unit = uint32(left - uint32(stop - unit)), stop
            if unit == units_of(requests, r):
                tile, unit = uint32(tile + uint32(1)), uint32(0)
        # No thread leaves with copies under way.
        commit()
        wait_for_copies()

    return produce
