"""What the three roles of `mma` share: the walk over a CTA's share of the line of work, the ring, the swizzles and the barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import WARP
from .mma_config import ITEMSIZE, SCORE_THREADS, SEGMENT_BYTES, VALUE_THREADS, MmaConfig
from .work import KV_LEN, PIECE_BEGIN, Q_LEN, REQUEST_FIELDS, work_split


class Walk(NamedTuple):
    """Device functions. find(requests, r, tile, row_heads) -> (r, tile): the tile itself or, past the request's last, the next request's
    first. stop(requests, r, unit, left, row_heads) -> where the piece that starts at `unit` ends. units(requests, r): units of a tile.
    slot(requests, r, tile, unit, row_heads): the partial slot of the piece, where the request alone says (deterministic)."""

    find: Callable
    stop: Callable
    units: Callable
    slot: Callable


def walk(lang: Any, config: MmaConfig) -> Walk:
    """The walk in the vocabulary `lang`: every role takes it by itself, so that each may be at another tile."""
    uint32, int64, fields, split = lang.uint32, lang.int64, REQUEST_FIELDS, work_split(lang, config.schedule)
    blocks_of, piece_of, tiles_of = split.blocks, split.piece, split.tiles

    @lang.device
    def find(requests, r, tile, row_heads):
        while int64(tile) >= tiles_of(requests[int64(r) * fields + Q_LEN], int64(row_heads)):
            r, tile = uint32(r + uint32(1)), uint32(0)
        return r, tile

    @lang.device
    def units(requests, r):
        return uint32(blocks_of(requests[int64(r) * fields + KV_LEN]))

    @lang.device
    def stop(requests, r, unit, left, row_heads):
        table = int64(r) * fields
        count = blocks_of(requests[table + KV_LEN])
        length = uint32(piece_of(tiles_of(requests[table + Q_LEN], int64(row_heads)), count, requests[table + PIECE_BEGIN]))
        end, count = uint32((unit // length + uint32(1)) * length), uint32(count)
        end = end if end < count else count
        return end if uint32(end - unit) < left else uint32(unit + left)

    @lang.device
    def slot(requests, r, tile, unit, row_heads):
        table = int64(r) * fields
        count = blocks_of(requests[table + KV_LEN])
        length = uint32(piece_of(tiles_of(requests[table + Q_LEN], int64(row_heads)), count, requests[table + PIECE_BEGIN]))
        pieces = uint32(uint32(count) + length - uint32(1)) // length
        return requests[table + PIECE_BEGIN] + int64(tile) * int64(pieces) + int64(unit // length)

    return Walk(find, stop, units, slot)


class Swizzle(NamedTuple):
    """Device functions for the byte offset of 16-byte chunk `chunk` of row `row`: in q and ring (row(row, chunk), whole rows of row_dim
    elements) and in the weights (weight(row, chunk), rows of `keys` elements)."""

    row: Callable
    weight: Callable


def swizzle(lang: Any, config: MmaConfig) -> Swizzle:
    """The two swizzles; both put the 8 rows of any ldmatrix matrix into 8 different 16-byte bank groups."""
    uint32 = lang.uint32
    row_bytes, segment = uint32(config.shape.row_dim * ITEMSIZE), uint32(SEGMENT_BYTES)
    weight_bytes = config.tile.keys * ITEMSIZE
    # Rows narrower than 128 bytes lie several to a bank line: only every 2nd (4th) row starts a new one and needs another turn.
    shift, mask, weight_bytes = uint32((SEGMENT_BYTES // weight_bytes).bit_length() - 1), uint32(config.tile.keys // 8 - 1), uint32(weight_bytes)

    @lang.device
    def row_offset(row, chunk):
        return uint32(row * row_bytes + (chunk >> uint32(3)) * segment + (((chunk ^ row) & uint32(7)) << uint32(4)))

    @lang.device
    def weight_offset(row, chunk):
        return uint32(row * weight_bytes + ((chunk ^ ((row >> shift) & mask)) << uint32(4)))

    return Swizzle(row_offset, weight_offset)


class Cursor(NamedTuple):
    """Device functions put(at, r, tile, unit, left, number) and get(at) -> the same: where a role is on the line, in shared memory from word
    `at` on. number: a count of the role's own.

    The walk would live in registers through all steps of a piece, and they are needed there: one thread of a role puts it down before a
    barrier, and all pick it up after the last step. Value warps do not wait for each other: each has a place of its own.
    """

    put: Callable
    get: Callable


def cursor(lang: Any) -> Cursor:
    """Build them in the vocabulary `lang`."""
    uint32, shared, u32 = lang.uint32, lang.shared, lang.u32

    @lang.device
    def put(at, r, tile, unit, left, number):
        words = shared(uint32(0), u32)
        words[at], words[at + uint32(1)], words[at + uint32(2)], words[at + uint32(3)] = r, tile, unit, left
        words[at + uint32(4)] = number

    @lang.device
    def get(at):
        words = shared(uint32(0), u32)
        return words[at], words[at + uint32(1)], words[at + uint32(2)], words[at + uint32(3)], words[at + uint32(4)]

    return Cursor(put, get)


class Ring(NamedTuple):
    """Device functions of a running number of a block, counted by each role from its start: place(number) -> its place in the ring;
    phase(number) -> the parity of the phase of the mbarrier there: 0 in the first round, then 1, 0, ..."""

    place: Callable
    phase: Callable


def ring(lang: Any, places: int) -> Ring:
    """A ring of `places` in the vocabulary `lang`."""
    uint32, places = lang.uint32, lang.uint32(places)

    @lang.device
    def place(number):
        return uint32(number % places)

    @lang.device
    def phase(number):
        return uint32((number // places) & uint32(1))

    return Ring(place, phase)


class Signals(NamedTuple):
    """The named barriers of the kernel (0 is bar_sync's) and `ready`, as device functions; `group`: a group of score warps, `w`: a row warp of it.

    score_sync(): all score warps.  group_sync(group): the warps of a group; where it is one warp, that.
    turn_sync(w, group) / turn_arrive(w, group): the row warp before this group's has decided its peaks / so has this one, for the next.
    ready_sync(base, step) / ready_arrive(base, group): weights, factors and, at the end of a piece, sums of the step (of the CTA, the group's) are
    written.  free_*(group): the value warps have read them.
    """

    score_sync: Callable
    group_sync: Callable
    turn_sync: Callable
    turn_arrive: Callable
    ready_sync: Callable
    ready_arrive: Callable
    free_sync: Callable
    free_arrive: Callable


def signals(lang: Any, config: MmaConfig) -> Signals:
    """Build them in the vocabulary `lang`. Numbers: 1 score, 2.. group, 4.. turn, 8.. ready, 12.. free: 15 at most, as many as there are.

    `ready` is an mbarrier where the tile holds back: at a named barrier the value warps would wait for each other, and one that holds back would
    hold back all. Elsewhere it is a named barrier, at which warps sleep on every GPU.
    """
    tile, ready_at = config.tile, lang.uint32(config.layout.ready)
    wait, arrive = lang.mbarrier_wait(config.sm_90), lang.mbarrier_arrive
    uint32, groups, members = lang.uint32, lang.uint32(tile.groups), WARP * tile.row_warps
    score, pair, handed = lang.named_barrier(1, SCORE_THREADS), lang.numbered_barrier(members), lang.numbered_barrier(2 * WARP)
    both, bar_warp_sync = lang.numbered_barrier(members + VALUE_THREADS), lang.bar_warp_sync
    pair_sync, handed_sync, handed_arrive, both_sync, both_arrive = pair.sync, handed.sync, handed.arrive, both.sync, both.arrive

    @lang.device
    def group_sync(group):
        pair_sync(uint32(uint32(2) + group))

    @lang.device
    def warp_sync(group):
        bar_warp_sync()

    @lang.device
    def turn_sync(w, group):
        handed_sync(uint32(uint32(4) + w * groups + group))

    @lang.device
    def turn_arrive(w, group):
        following = uint32(group + uint32(1))
        handed_arrive(uint32(uint32(4) + w * groups + (uint32(0) if following == groups else following)))

    @lang.device
    def ready_sync(base, step):
        both_sync(uint32(uint32(8) + step % groups))

    @lang.device
    def ready_arrive(base, group):
        both_arrive(uint32(uint32(8) + group))

    @lang.device
    def ready_wait(base, step):
        wait(uint32(base + ready_at + ((step % groups) << uint32(3))), (step // groups) & uint32(1))

    @lang.device
    def ready_say(base, group):
        arrive(uint32(base + ready_at + (group << uint32(3))))

    @lang.device
    def free_sync(group):
        both_sync(uint32(uint32(12) + group))

    @lang.device
    def free_arrive(group):
        both_arrive(uint32(uint32(12) + group))

    return Signals(score.sync, warp_sync if tile.row_warps == 1 else group_sync, turn_sync, turn_arrive,
                   *((ready_wait, ready_say) if tile.holds_back else (ready_sync, ready_arrive)), free_sync, free_arrive)


class Parts(NamedTuple):
    """What all roles use, built once: every device function is compiled by itself, and copies would be compiled again.

    ring: of the blocks and their barriers `empty`.  full: of the barriers `full`.  scored: of steps, for the barriers `scored`.
    """

    walk: Walk
    swizzle: Swizzle
    ring: Ring
    full: Ring
    scored: Ring
    signals: Signals
    cursor: Cursor


def parts(lang: Any, config: MmaConfig) -> Parts:
    """Build them in the vocabulary `lang`."""
    tile = config.tile
    blocks = ring(lang, tile.blocks)
    full = blocks if tile.full_barriers == tile.blocks else ring(lang, tile.full_barriers)
    return Parts(walk(lang, config), swizzle(lang, config), blocks, full, ring(lang, max(tile.scored_steps, 1)),
                 signals(lang, config), cursor(lang))


#: Bytes from ring block to ring block, for a row of `row_dim` elements.
def block_bytes(config: MmaConfig) -> int:
    return config.tile.block_keys * config.shape.row_dim * ITEMSIZE
