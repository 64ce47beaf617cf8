"""The line of work: the tables that `schedule` writes, and what it, the kernels that do the work, and `combine` must agree on.

The query rows of a request are numbered token by token, head by head: row rr is head rr % row_heads of token rr // row_heads (`paged` fills
the heads up to whole tiles, so that no tile spans two tokens; `mma` does not). `tile_rows` rows are a tile. The work is a line of units,
one a KV tile for one tile of rows: request by request, tile by tile.

    units      |r0 t0 .....|r0 t1 .....|r1 t0 ..|r1 t1 ..|r2 t0 ...................|
    CTAs       |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|-- 5 --|

A tile cut by a boundary is done in pieces, each a partial result in a slot of its own; `combine` merges them. cuts.py says where to cut.
With `deterministic` the cuts depend on the request alone (pieces), and a CTA takes the whole pieces that start in its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import MAX_DRAFT_TOKENS

# One row of the request table, int64. PIECE_BEGIN: deterministic, the first partial slot of a request whose tiles are cut; otherwise the
# request's first CTA, if tiles have CTAs of their own.
REQUEST_FIELDS = 8
Q_BEGIN, Q_LEN, PREFIX, KV_LEN, SLOT_BEGIN, MASK_BEGIN, UNIT_BEGIN, PIECE_BEGIN = range(REQUEST_FIELDS)
# One row of the CTA table, int64: where the CTA starts (request, tile of it, unit of that; on the line) and how many units it takes. There is
# one row more than CTAs, without CTA_COUNT.
CTA_FIELDS = 5
CTA_REQUEST, CTA_TILE, CTA_UNIT, CTA_BEGIN, CTA_COUNT = range(CTA_FIELDS)
# One row of the merge table, int64: a tile in pieces. Its first partial slot (the others: `WorkSplit.slot`), its pieces, the tile, and the
# request's first query row and draft tokens. Row 0 is the header: how many tiles of few pieces there are, how many of many, and the last row
# of the table. Tiles of few pieces stand in rows 1, 2, ...; those of many in the last row, the one before it, ...
MERGE_FIELDS = 5
MERGE_SLOT, MERGE_PIECES, MERGE_TILE, MERGE_ROW, MERGE_TOKENS = range(MERGE_FIELDS)
HEADER_FEW, HEADER_MANY, HEADER_LAST = range(3)
#: Pieces up to which a tile has few: `combine` merges a whole row of such a tile at a time, and 32 columns of a row of another one.
FEW_PIECES = 16

FLAG_LSE, FLAG_DRAFT_ASIDE = 1, 2
#: A tile is cut into no shorter pieces, in keys: below that, loading the queries and writing a partial costs more than it spreads.
MIN_KEYS = 128
#: deterministic: keys of one piece at least, and pieces of all tiles of one request at most. The second bounds the partials that must
#: be kept and still fills a GPU from one request.
PIECE_KEYS = 1024
MAX_PIECES = 128


@dataclass(frozen=True)
class ScheduleConfig:
    """`kv_tile`: keys of a unit. `tile_rows`: query rows of a tile. `deterministic`: cuts by the request alone. `min_keys`: shortest share of
    a CTA where tiles are cut. `merge_keys`: keys that a CTA does in the time by which each piece delays all others (see `cuts`)."""

    kv_tile: int
    tile_rows: int
    deterministic: bool
    min_keys: int = MIN_KEYS
    merge_keys: int = 0

    @property
    def min_units(self) -> int:
        """`min_keys` in units."""
        return -(-self.min_keys // self.kv_tile)

    def __str__(self) -> str:
        return f"r{self.tile_rows}k{self.kv_tile}m{self.min_keys}p{self.merge_keys}{'_deterministic' if self.deterministic else ''}"


def partial_slots(config: ScheduleConfig, num_ctas: int, max_batch: int, max_total_q: int, max_kv_tokens: int, row_heads: int) -> int:
    """Partials a plan may need. A CTA leaves at most two: the end of one tile and the beginning of another.

    deterministic: at most MAX_PIECES a request; and a request of K keys has at most K / k rounded up, which is 2 K / k at most where it is more
    than one, for each of at most MAX_PIECES / 2 tiles (with more it is not cut). k: PIECE_KEYS in whole units."""
    if not config.deterministic:
        return 2 * num_ctas
    keys = PIECE_KEYS // config.kv_tile * config.kv_tile
    tiles = min(MAX_PIECES // 2, -(-min(max_total_q, MAX_DRAFT_TOKENS) * row_heads // config.tile_rows))
    return min(min(max_batch, max_total_q) * MAX_PIECES, tiles * (2 * (max_kv_tokens + max_total_q) // keys))


def merge_rows(max_partials: int) -> int:
    """Rows of the merge table: the header, and a tile in pieces for every two partials."""
    return 1 + max_partials // 2


class WorkSplit(NamedTuple):
    """Device functions that `schedule`, the kernel that does the work, and `combine` must agree on."""

    tiles: Callable
    blocks: Callable
    piece: Callable
    slot: Callable


def work_split(lang: Any, config: ScheduleConfig) -> WorkSplit:
    """tiles(n, row_heads): tiles of a request of n draft tokens.
    blocks(kv_len): units of one tile, at least 1 so that an empty row is written too.
    piece(tiles, blocks, piece_begin): units of one piece of a tile of a request with `tiles` tiles; the whole tile unless deterministic, and
    where the table says with piece_begin = -1 that there is no room for partials (index arrays that overlap: none that are valid do).
    slot(first, k): partial slot of piece k (uint32) of a tile whose piece 0 is in slot `first`. Not deterministic: CTA p has slot 2 p for the
    end of a tile that others began, 2 p + 1 for the beginning of one that others end; so the pieces are in 2 p + 1, 2 p + 2, 2 p + 4, ..."""
    int64, uint32, quotient = lang.int64, lang.uint32, lang.quotient_u32
    kv_tile, tile_rows, deterministic = config.kv_tile, config.tile_rows, config.deterministic
    piece_units, max_pieces = PIECE_KEYS // kv_tile, MAX_PIECES

    @lang.device
    def tiles_of(n, row_heads):
        return (n * row_heads + int64(tile_rows - 1)) // int64(tile_rows)

    @lang.device
    def blocks(kv_len):
        units = (kv_len + int64(kv_tile - 1)) // int64(kv_tile)
        return units if units > int64(1) else int64(1)

    @lang.device
    def whole(tiles, units, piece_begin):
        return units

    @lang.device
    def by_request(tiles, units, piece_begin):
        # In 32 bits: a division of 64 is a function call, which takes registers and a stack.
        short = uint32(units)
        # A request without draft tokens has no tiles, and is not cut.
        divisor = uint32(tiles) if tiles > int64(0) else uint32(max_pieces + 1)
        pieces, most = uint32(short + uint32(piece_units - 1)) // uint32(piece_units), quotient(uint32(max_pieces), divisor)
        if pieces > most:
            pieces = most
        if pieces < uint32(1) or piece_begin < int64(0):
            pieces = uint32(1)
        return int64(quotient(uint32(short + pieces - uint32(1)), pieces))

    @lang.device
    def alternate(first, k):
        return uint32(first + k + k - (uint32(1) if k > uint32(0) else uint32(0)))

    @lang.device
    def consecutive(first, k):
        return uint32(first + k)

    if deterministic:
        return WorkSplit(tiles_of, blocks, by_request, consecutive)
    return WorkSplit(tiles_of, blocks, whole, alternate)


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
