"""expand: page lists -> pool rows, trees -> visibility bits, query rows -> requests. Second launch of an update, see `schedule`.

    grid (any number of blocks), 256 threads, grid-stride
    slots[i]          thread per listed token: page * page_size + offset, so that no other kernel knows pages
    visibility[row]   warp per query row: lane w owns word w (32 lanes x 32 bits = 1024 draft tokens)
    row_request[row]  the request a query row belongs to; -1 past the last row, where kernels stop
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import WARP
from .schedule import EXPAND_THREADS, TREE_KINDS, ExpandConfig, index_reader
from .work import MASK_BEGIN, PREFIX, Q_BEGIN, Q_LEN, REQUEST_FIELDS, request_finder

CAUSAL, PARENTS, BITS, DENSE, FULL_MASK = range(len(TREE_KINDS))


def _ancestors(lang: Any) -> Callable:
    """lane's word of the bits of node i and its ancestors. All lanes walk the same chain; at most n steps, so a cycle ends, and a parent
    outside the request or the array ends it too."""
    uint32, int64 = lang.uint32, lang.int64

    @lang.device
    def ancestors(parents, row0, i, n, length, lane):
        word, node, step = uint32(0), i, int64(0)
        while node >= int64(0) and node < n and step < n:
            if uint32(node) >> uint32(5) == lane:
                word = uint32(word | (uint32(1) << (uint32(node) & uint32(31))))
            node = int64(parents[row0 + node]) if row0 + node < length else int64(-1)
            step = step + int64(1)
        return word

    return ancestors


def _flag(lang: Any) -> Callable:
    """Whether draft token d is visible to row i by a mask of one entry a (row, token): 1 or 0."""
    uint32 = lang.uint32

    @lang.device
    def flag(kind, mask, request, i, d, prefix, n, mask_begin, stride, length):
        seen = uint32(0)
        if kind == CAUSAL:
            seen = uint32(1) if d <= i else uint32(0)
        else:
            at, inside = mask_begin + i * (prefix + n) + prefix + d, True
            if kind == DENSE:
                at, inside = (request * stride + i) * stride + d, i < stride and d < stride
            if inside and at < length:
                seen = uint32(1) if mask[at] != 0 else uint32(0)
        return seen

    return flag


def build_expand(lang: Any, config: ExpandConfig) -> Callable:
    """The kernel `expand`. `widths`: bit 0 kv_indptr, bit 1 kv_indices, bit 2 qo_indptr is int64. `length`: elements of the tree array."""
    uint32, int64, pointer, i32, i64, u8, u32 = lang.uint32, lang.int64, lang.pointer, lang.i32, lang.i64, lang.u8, lang.u32
    int32_of, tid, block, grid, ballot = lang.int32, lang.tid_x, lang.ctaid_x, lang.nctaid_x, lang.vote_sync_ballot
    read, find, ancestors, flag = index_reader(lang), request_finder(lang), _ancestors(lang), _flag(lang)
    threads, warp, fields = EXPAND_THREADS, WARP, REQUEST_FIELDS

    @lang.device
    def row_word(requests, request, row, kind, tree_address, stride, length, lane):
        """lane's word of the visibility bits of query row `row` of `request`; bits at and after n are clear."""
        at = request * fields
        begin, n, prefix = requests[at + Q_BEGIN], requests[at + Q_LEN], requests[at + PREFIX]
        i = row - begin
        word = uint32(0)
        if kind == PARENTS:
            word = ancestors(pointer(tree_address, i32), begin, i, n, length, lane)
        elif kind == BITS:
            if int64(lane) < stride and int64(lane) * int64(32) < n and row * stride + int64(lane) < length:
                word = pointer(tree_address, u32)[row * stride + int64(lane)]
                left = n - int64(lane) * int64(32)
                if left < int64(32):
                    word = uint32(word & ((uint32(1) << uint32(left)) - uint32(1)))
        else:
            mask = pointer(tree_address, u8)
            for w in range((n + int64(31)) // int64(32)):
                d = w * int64(32) + int64(lane)
                seen = uint32(0)
                if d < n:
                    seen = flag(kind, mask, request, i, d, prefix, n, requests[at + MASK_BEGIN], stride, length)
                bits = ballot(seen)
                if uint32(w) == lane:
                    word = bits
        return word

    def expand(qo_indptr, kv_indptr, kv_indices, tree_address, requests_address, slots_address, visibility_address, rows_address,
               batch, page_size, kind, stride, length, words, widths, max_total_q, max_kv_entries):
        requests, slots = pointer(requests_address, i64), pointer(slots_address, u32)
        visibility, row_request = pointer(visibility_address, u32), pointer(rows_address, i32)
        thread = int64(block()) * int64(threads) + int64(tid())
        step = int64(grid()) * int64(threads)

        entries = read(kv_indptr, batch, widths & 1)
        entries = entries if entries < max_kv_entries else max_kv_entries
        for token in range(thread, entries * page_size, step):
            entry = token // page_size
            page = read(kv_indices, entry, widths & 2)
            slots[token] = uint32(page * page_size + (token - entry * page_size))

        total_q = read(qo_indptr, batch, widths & 4)
        lane = uint32(tid() & uint32(warp - 1))
        for row in range(thread // int64(warp), max_total_q, step // int64(warp)):
            request, word = int64(-1), uint32(0)
            if row < total_q and batch > int64(0):
                request = find(requests, batch, row, Q_BEGIN)
                i = row - requests[request * fields + Q_BEGIN]
                if i >= int64(0) and i < requests[request * fields + Q_LEN]:
                    word = row_word(requests, request, row, kind, tree_address, stride, length, lane)
                else:
                    request = int64(-1)  # before the first request, or beyond the draft tokens one may have: no kernel touches such a row
            if int64(lane) < words:
                visibility[row * words + int64(lane)] = word
            if lane == uint32(0):
                row_request[row] = int32_of(request)

    return expand
