"""What the three roles of `wgmma` share: the ring and its barriers, the swizzle of a slot, and the walk of `mma`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .mma_config import SEGMENT_BYTES
from .mma_work import Cursor, Ring, Swizzle, Walk, cursor, ring, walk
from .wgmma_config import WgmmaConfig
from .work import CTA_COUNT, CTA_FIELDS, CTA_REQUEST, CTA_TILE, CTA_UNIT, Q_LEN, REQUEST_FIELDS, SLOT_BEGIN


def swizzle(lang: Any, config: WgmmaConfig) -> Swizzle:
    """Of a slot: segment after segment, each with 128 bytes of every row, whose 16-byte chunks change places by the row modulo 8.

    The 128-byte swizzle of wgmma's operands: one copy is K-major for Q K^T and, read along the other dimension, MN-major for P V.
    """
    uint32, segment, row_bytes = lang.uint32, lang.uint32(config.segment_bytes), lang.uint32(SEGMENT_BYTES)

    @lang.device
    def row_offset(row, chunk):
        return uint32((chunk >> uint32(3)) * segment + row * row_bytes + (((chunk ^ row) & uint32(7)) << uint32(4)))

    return Swizzle(row_offset, None)


class Operand(NamedTuple):
    """Device functions of a wgmma operand in shared memory. low(address) -> the low half of its descriptor; uniform(low) -> the same, known to be
    equal in all lanes; start(address): both; at(start, steps) -> the descriptor of what lies `steps` times 16 bytes further."""

    low: Callable
    uniform: Callable
    start: Callable
    at: Callable


def operand(lang: Any, leading: int, stride: int, swizzle: int) -> Operand:
    """Build them in the vocabulary `lang`; the layout is `wgmma_descriptor`'s.

    Addresses are in the low half, the high half is a constant. From lane 0, so that ptxas knows that it is the same in all lanes: then the
    descriptors of a product are made by one addition each in uniform registers, otherwise by six instructions and two moves from ordinary ones.
    """
    uint32, uint64, shuffle, describe = lang.uint32, lang.uint64, lang.shfl_sync_idx_u32, lang.wgmma_descriptor(leading, stride, swizzle)
    high_half = uint64(0xFFFFFFFF00000000)

    @lang.device
    def low(address):
        return uint32(describe(address))

    @lang.device
    def uniform(x):
        return shuffle(x, uint32(0))

    @lang.device
    def start(address):
        return uniform(low(address))

    @lang.device
    def at(start, steps):
        return uint64(uint32(start + steps)) | (describe(uint32(0)) & high_half)

    return Operand(low, uniform, start, at)


def share_begin(lang: Any) -> Callable:
    """begin(ctas, p, requests) -> (request, tile, unit, units): where CTA p's share of the line starts, and how long it is. By the addresses of the
    two tables.

    All at once, and the request's row is fetched with it: the compiler would put each load where its result is used first, one memory latency after
    the other, before the first copy can start. It moves ordinary loads behind the branch that follows, and those of `opaque` copies too.
    """
    uint32, uint64, load, prefetch = lang.uint32, lang.uint64, lang.ld_volatile_u64, lang.prefetch_global_l1

    @lang.device
    def begin(ctas, p, requests):
        row = ctas + uint64(p) * uint64(8 * CTA_FIELDS)
        r, tile, unit, left = (uint32(load(row + uint64(8 * CTA_REQUEST))), uint32(load(row + uint64(8 * CTA_TILE))),
                               uint32(load(row + uint64(8 * CTA_UNIT))), uint32(load(row + uint64(8 * CTA_COUNT))))
        if left != uint32(0):
            # Each half of the row, which is 64 bytes: two sectors of the cache.
            request = requests + uint64(r) * uint64(8 * REQUEST_FIELDS)
            prefetch(request + uint64(8 * Q_LEN))
            prefetch(request + uint64(8 * SLOT_BEGIN))
        return r, tile, unit, left

    return begin


class Parts(NamedTuple):
    """What all roles use, built once: every device function is compiled by itself, and copies would be compiled again."""

    walk: Walk
    swizzle: Swizzle
    ring: Ring
    cursor: Cursor
    share_begin: Callable


def parts(lang: Any, config: WgmmaConfig) -> Parts:
    """Build them in the vocabulary `lang`."""
    return Parts(walk(lang, config), swizzle(lang, config), ring(lang, config.tile.slots), cursor(lang), share_begin(lang))
