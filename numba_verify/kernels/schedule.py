"""From the caller's index arrays to what kernels read: two launches, no host copy.

    schedule   one block     lengths -> request table, prefix sums, and a balanced share of the work for every CTA of `paged`
    expand     many blocks   page lists -> one pool row a token; any tree form -> visibility bits; query row -> request

Both run on the device from device arrays, so a captured CUDA graph may be replayed with other lengths, lists and trees. Lengths are
clamped to the capacities: wrong device data gives wrong results, but never a write outside the workspace.

The work of `paged` is a line of units, one a KV tile: request by request, tile by tile (a tile is one draft token x `head_tile` heads).

    units      |r0 t0 .....|r0 t1 .....|r1 t0 ..|r1 t1 ..|r2 t0 ...................|
    CTAs       |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|-- 5 --|

Every CTA gets the same length of line, so all end together; a tile cut by a boundary is merged by `combine`. With `deterministic` the
cuts depend on the request alone (pieces), and a CTA takes the whole pieces that start in its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import MAX_DRAFT_TOKENS

# One row of the request table, int64.
REQUEST_FIELDS = 8
Q_BEGIN, Q_LEN, PREFIX, KV_LEN, SLOT_BEGIN, MASK_BEGIN, UNIT_BEGIN, PIECE_BEGIN = range(REQUEST_FIELDS)
# One row of the CTA table, int64: where the CTA starts and how many units it takes. There is one row more than CTAs.
CTA_FIELDS = 4
CTA_REQUEST, CTA_TILE, CTA_UNIT, CTA_COUNT = range(CTA_FIELDS)

FLAG_LSE, FLAG_DRAFT_ASIDE = 1, 2
TREE_KINDS = ("causal", "parents", "bits", "dense", "full_mask")

SCHEDULE_THREADS = 256
EXPAND_THREADS = 256
#: A CTA takes at least so many KV tiles: below that, loading the queries and writing a partial costs more than it spreads.
MIN_UNITS = 8
#: deterministic: keys of one piece at least, and pieces of all tiles of one request at most. The second bounds the partials that must
#: be kept and still fills a GPU from one request.
PIECE_KEYS = 1024
MAX_PIECES = 128

SCHEDULE_SIGNATURE = ("address",) * 5 + ("i64",) * 9
EXPAND_SIGNATURE = ("address",) * 8 + ("i64",) * 9


@dataclass(frozen=True)
class ScheduleConfig:
    """`kv_tile`: keys of a unit. `deterministic`: cuts by the request alone."""

    kv_tile: int
    deterministic: bool

    def __str__(self) -> str:
        return f"k{self.kv_tile}{'_deterministic' if self.deterministic else ''}"


@dataclass(frozen=True)
class ExpandConfig:
    """One variant serves every index width and tree form: both are uniform branches at run time."""

    def __str__(self) -> str:
        return "all"


def shared_bytes() -> int:
    """Three int64 sums a thread, and three running totals."""
    return 8 * 3 * (SCHEDULE_THREADS + 1)


def partial_slots(max_batch: int, max_total_q: int, max_kv_tokens: int, head_tiles: int) -> int:
    """Partials a deterministic plan may need: at most MAX_PIECES a request; and a request of K keys has at most K / PIECE_KEYS rounded up,
    which is 2 K / PIECE_KEYS where it is more than one, for each of at most MAX_PIECES / 2 tiles (with more it is not cut)."""
    tiles = min(MAX_PIECES // 2, min(max_total_q, MAX_DRAFT_TOKENS) * head_tiles)
    return min(min(max_batch, max_total_q) * MAX_PIECES, tiles * (2 * (max_kv_tokens + max_total_q) // PIECE_KEYS))


class WorkSplit(NamedTuple):
    """Device functions that `schedule`, `paged` and `combine` must agree on."""

    blocks: Callable
    piece: Callable


def work_split(lang: Any, config: ScheduleConfig) -> WorkSplit:
    """blocks(kv_len): units of one tile, at least 1 so that an empty row is written too.
    piece(tiles, blocks, piece_begin): units of one piece of a tile of a request with `tiles` tiles; the whole tile unless deterministic, and
    where the table says with piece_begin = -1 that there is no room for partials (index arrays that overlap: none that are valid do)."""
    int64 = lang.int64
    kv_tile, deterministic = config.kv_tile, config.deterministic
    piece_units, max_pieces = PIECE_KEYS // kv_tile, MAX_PIECES

    @lang.device
    def blocks(kv_len):
        units = (kv_len + int64(kv_tile - 1)) // int64(kv_tile)
        return units if units > int64(1) else int64(1)

    @lang.device
    def whole(tiles, units, piece_begin):
        return units

    @lang.device
    def by_request(tiles, units, piece_begin):
        pieces = (units + int64(piece_units - 1)) // int64(piece_units)
        most = int64(max_pieces) // tiles
        if pieces > most:
            pieces = most
        if pieces < int64(1) or piece_begin < int64(0):
            pieces = int64(1)
        return (units + pieces - int64(1)) // pieces

    return WorkSplit(blocks, by_request if deterministic else whole)


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
    int64, uint32, pointer, i64, shared = lang.int64, lang.uint32, lang.pointer, lang.i64, lang.shared
    read, clamp = index_reader(lang), _clamp(lang)
    tid, bar_sync, threads = lang.tid_x, lang.bar_sync, SCHEDULE_THREADS
    split = work_split(lang, config)
    blocks_of, piece_of = split.blocks, split.piece
    drafts, listed = _lengths(lang, MAX_DRAFT_TOKENS)
    share = _share(lang, config)
    fields, min_units = REQUEST_FIELDS, MIN_UNITS
    scan_steps = threads.bit_length() - 1
    totals_offset, column = uint32(8 * 3 * threads), threads

    def schedule(qo_indptr, kv_indptr, kv_lens, requests_address, ctas_address,
                 batch, page_size, tile_heads, widths, flags, max_total_q, max_kv_entries, num_ctas, max_partials):
        requests, ctas = pointer(requests_address, i64), pointer(ctas_address, i64)
        scan, totals = shared(uint32(0), i64), shared(totals_offset, i64)
        t = int64(tid())
        if t < int64(3):
            totals[t] = int64(0)
        # A list that claims more than kv_indptr[-1] is cut there: `expand` fills no pool rows beyond.
        entries = clamp(read(kv_indptr, batch, widths & 2), 0, max_kv_entries)
        # The totals are zero before any thread reads them below.
        bar_sync()
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
            tiles = n * tile_heads
            units = blocks_of(kv_len)
            pieces = int64(0)
            if tiles > int64(0):
                length = piece_of(tiles, units, int64(0))
                pieces = (units + length - int64(1)) // length
            partials = tiles * pieces if pieces > int64(1) else int64(0)
            scan[t] = n * (prefix + n)
            scan[t + column] = tiles * units
            scan[t + 2 * column] = partials
            # Every thread's terms are in the scan arrays before a neighbour adds them.
            bar_sync()
            for step in range(scan_steps):
                distance = int64(1) << int64(step)
                add0, add1, add2 = int64(0), int64(0), int64(0)
                if t >= distance:
                    add0, add1, add2 = scan[t - distance], scan[t - distance + column], scan[t - distance + 2 * column]
                # All have read their neighbour before any sum is overwritten.
                bar_sync()
                scan[t] = scan[t] + add0
                scan[t + column] = scan[t + column] + add1
                scan[t + 2 * column] = scan[t + 2 * column] + add2
                # All sums of this step are written before the next step reads them.
                bar_sync()
            if r < batch:
                row = r * fields
                requests[row + Q_BEGIN] = begin
                requests[row + Q_LEN] = n
                requests[row + PREFIX] = prefix
                requests[row + KV_LEN] = kv_len
                requests[row + SLOT_BEGIN] = kv_begin * page_size
                requests[row + MASK_BEGIN] = totals[0] + scan[t] - n * (prefix + n)
                requests[row + UNIT_BEGIN] = totals[1] + scan[t + column] - tiles * units
                room = totals[2] + scan[t + 2 * column] <= max_partials
                requests[row + PIECE_BEGIN] = totals[2] + scan[t + 2 * column] - partials if room else int64(-1)
            # The exclusive sums above used the totals of the chunks before this one.
            bar_sync()
            if t < int64(3):
                totals[t] = totals[t] + scan[(t + int64(1)) * column - int64(1)]
            # The totals are complete, and nobody reads the scan arrays any more, before the next chunk or the shares below.
            bar_sync()
        units_in_all = totals[1]
        payload = (units_in_all + num_ctas - int64(1)) // num_ctas
        payload = payload if payload > int64(min_units) else int64(min_units)
        for p in range(t, num_ctas + int64(1), int64(threads)):
            share(ctas, requests, batch, tile_heads, p, payload, units_in_all)

    return schedule


def _share(lang: Any, config: ScheduleConfig) -> Callable:
    """Device function: fill row p of the CTA table."""
    int64 = lang.int64
    split = work_split(lang, config)
    blocks_of, piece_of, deterministic = split.blocks, split.piece, config.deterministic
    find = request_finder(lang)
    fields, cta_fields = REQUEST_FIELDS, CTA_FIELDS

    @lang.device
    def piece_start(requests, batch, tile_heads, unit, units_in_all):
        """The first piece that starts at `unit` or later (deterministic), as a unit; `unit` itself otherwise."""
        unit = unit if unit < units_in_all else units_in_all
        if deterministic and unit < units_in_all:
            row = find(requests, batch, unit, UNIT_BEGIN) * fields
            units = blocks_of(requests[row + KV_LEN])
            length = piece_of(requests[row + Q_LEN] * tile_heads, units, requests[row + PIECE_BEGIN])
            inside = unit - requests[row + UNIT_BEGIN]
            tile = inside // units
            start = (inside - tile * units + length - int64(1)) // length * length
            start = start if start < units else units
            unit = requests[row + UNIT_BEGIN] + tile * units + start
        return unit

    @lang.device
    def share(ctas, requests, batch, tile_heads, p, payload, units_in_all):
        first = piece_start(requests, batch, tile_heads, p * payload, units_in_all)
        last = piece_start(requests, batch, tile_heads, (p + int64(1)) * payload, units_in_all)
        r, tile, unit = int64(0), int64(0), int64(0)
        if first < units_in_all:
            r = find(requests, batch, first, UNIT_BEGIN)
            units = blocks_of(requests[r * fields + KV_LEN])
            inside = first - requests[r * fields + UNIT_BEGIN]
            tile = inside // units
            unit = inside - tile * units
        row = p * cta_fields
        ctas[row + CTA_REQUEST] = r
        ctas[row + CTA_TILE] = tile
        ctas[row + CTA_UNIT] = unit
        ctas[row + CTA_COUNT] = last - first

    return share


def request_finder(lang: Any) -> Callable:
    """find(requests, batch, value, field): the last request whose `field` is <= value. Of several with the same begin only the last is
    not empty, so for a value inside the line it is the owner."""
    int64, fields = lang.int64, REQUEST_FIELDS

    @lang.device
    def find(requests, batch, value, field):
        low, high = int64(0), batch - int64(1)
        while low < high:
            middle = (low + high + int64(1)) >> int64(1)
            if requests[middle * fields + field] <= value:
                low = middle
            else:
                high = middle - int64(1)
        return low

    return find
