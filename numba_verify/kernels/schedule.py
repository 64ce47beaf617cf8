"""From the caller's index arrays to what kernels read: two launches, no host copy.

    schedule   one block     lengths -> request table, prefix sums, a share of the work for every CTA (cuts.py), tiles to be merged (merges.py)
    expand     many blocks   page lists -> one pool row a token; any tree form -> visibility bits; query row -> request

Both run on the device from device arrays, so a captured CUDA graph may be replayed with other lengths, lists and trees. Lengths are
clamped to the capacities: wrong device data gives wrong results, but never a write outside the workspace. work.py has the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import MAX_DRAFT_TOKENS
from .cuts import cutter
from .merges import merge_lister
from .scans import SCHEDULE_THREADS, block_scan
from .work import (
    KV_LEN,
    MASK_BEGIN,
    PIECE_BEGIN,
    PREFIX,
    Q_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
    SLOT_BEGIN,
    UNIT_BEGIN,
    ScheduleConfig,
    work_split,
)

TREE_KINDS = ("causal", "parents", "bits", "dense", "full_mask")
EXPAND_THREADS = 256
SCHEDULE_SIGNATURE = ("address",) * 6 + ("i64",) * 9
EXPAND_SIGNATURE = ("address",) * 8 + ("i64",) * 9


@dataclass(frozen=True)
class ExpandConfig:
    """One variant serves every index width and tree form: both are uniform branches at run time."""

    def __str__(self) -> str:
        return "all"


def index_reader(lang: Any) -> Callable:
    """read(address, i, wide): element i of an int64 (wide != 0) or int32 array, as int64."""
    pointer, i32, i64, int64 = lang.pointer, lang.i32, lang.i64, lang.int64

    @lang.device
    def read(address, i, wide):
        value = int64(0)
        if wide != 0:
            value = int64(pointer(address, i64)[i])
        else:
            value = int64(pointer(address, i32)[i])
        return value

    return read


def _clamp(lang: Any) -> Callable:
    int64 = lang.int64

    @lang.device
    def clamp(value, low, high):
        value = value if value > int64(low) else int64(low)
        return value if value < int64(high) else int64(high)

    return clamp


def _lengths(lang: Any, max_draft_tokens: int) -> tuple[Callable, Callable]:
    """Device functions: (q_begin, n) and (kv_begin, tokens) of request r, clamped to the capacities and to the `entries` that are listed."""
    int64, read, clamp = lang.int64, index_reader(lang), _clamp(lang)

    @lang.device
    def drafts(qo_indptr, r, wide, max_total_q):
        begin = clamp(read(qo_indptr, r, wide), 0, max_total_q)
        end = clamp(read(qo_indptr, r + int64(1), wide), begin, max_total_q)
        return begin, clamp(end - begin, 0, max_draft_tokens)

    @lang.device
    def listed(kv_indptr, kv_lens, r, kv_wide, lens_wide, has_lens, entries, page_size):
        begin = clamp(read(kv_indptr, r, kv_wide), 0, entries)
        end = clamp(read(kv_indptr, r + int64(1), kv_wide), begin, entries)
        tokens = (end - begin) * page_size
        if has_lens != 0:
            tokens = clamp(read(kv_lens, r, lens_wide), 0, tokens)
        return begin, tokens

    return drafts, listed


def build_schedule(lang: Any, config: ScheduleConfig) -> Callable:
    """The kernel `schedule`; see the module docstring. `widths`: bit 0 qo_indptr, bit 1 kv_indptr, bit 2 kv_lens is int64."""
    int64, pointer, i64, tid, bar_sync = lang.int64, lang.pointer, lang.i64, lang.tid_x, lang.bar_sync
    read, clamp, scan, deterministic = index_reader(lang), _clamp(lang), block_scan(lang), config.deterministic
    split = work_split(lang, config)
    tiles_of, blocks_of, piece_of = split.tiles, split.blocks, split.piece
    drafts, listed = _lengths(lang, MAX_DRAFT_TOKENS)
    cut, list_merges = cutter(lang, config), merge_lister(lang, config)
    fields, threads = REQUEST_FIELDS, SCHEDULE_THREADS

    def schedule(qo_indptr, kv_indptr, kv_lens, requests_address, ctas_address, merges_address,
                 batch, page_size, row_heads, widths, flags, max_total_q, max_kv_entries, num_ctas, max_partials):
        requests, ctas, merges = pointer(requests_address, i64), pointer(ctas_address, i64), pointer(merges_address, i64)
        thread = tid()
        t = int64(thread)
        # A list that claims more than kv_indptr[-1] is cut there: `expand` fills no pool rows beyond.
        entries = clamp(read(kv_indptr, batch, widths & 2), 0, max_kv_entries)
        # Slots: deterministic, partials; otherwise one a tile, for a CTA each.
        masks_in_all, units_in_all, slots_in_all, longest = int64(0), int64(0), int64(0), int64(0)
        for base in range(int64(0), batch, int64(threads)):
            r = base + t
            begin, n, kv_begin, prefix, kv_len = int64(0), int64(0), int64(0), int64(0), int64(0)
            if r < batch:
                begin, n = drafts(qo_indptr, r, widths & 1, max_total_q)
                kv_begin, tokens = listed(kv_indptr, kv_lens, r, widths & 2, widths & 4, flags & 1, entries, page_size)
                aside = flags & 2
                prefix = tokens if aside != 0 else tokens - n
                prefix = prefix if prefix > int64(0) else int64(0)
                kv_len = tokens + n if aside != 0 else tokens
            tiles, units = tiles_of(n, row_heads), blocks_of(kv_len)
            slots, tile = tiles, int64(0)
            if tiles > int64(0):
                tile = units
                if deterministic:
                    length = piece_of(tiles, units, int64(0))
                    pieces = (units + length - int64(1)) // length
                    slots = tiles * pieces if pieces > int64(1) else int64(0)
            masks_before, units_before, slots_before, masks, line, here, most = scan(n * (prefix + n), tiles * units, slots, tile, thread)
            if r < batch:
                row = r * fields
                requests[row + Q_BEGIN] = begin
                requests[row + Q_LEN] = n
                requests[row + PREFIX] = prefix
                requests[row + KV_LEN] = kv_len
                requests[row + SLOT_BEGIN] = kv_begin * page_size
                requests[row + MASK_BEGIN] = masks_in_all + masks_before
                requests[row + UNIT_BEGIN] = units_in_all + units_before
                slot = slots_in_all + slots_before
                if deterministic and slot + slots > max_partials:
                    slot = int64(-1)
                requests[row + PIECE_BEGIN] = slot
            masks_in_all, units_in_all, slots_in_all = masks_in_all + masks, units_in_all + line, slots_in_all + here
            longest = longest if longest > most else most
            # The request table is complete before any thread looks up a request of another; and the sums are read before the next overwrite them.
            bar_sync()
        may_cut = cut(ctas, requests, batch, row_heads, num_ctas, units_in_all, slots_in_all, longest, thread)
        looked_at = num_ctas if may_cut and max_partials > int64(0) else int64(0)  # no room: a kernel that cuts nothing
        list_merges(merges, requests, ctas, row_heads, batch if deterministic else looked_at, max_partials, thread)

    return schedule
