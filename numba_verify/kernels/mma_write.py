"""How the tensor-core kernels end a piece: the rows of a whole tile to out and lse, of a part of one to a partial slot for `combine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .config import Shape
from .tile import LN_2
from .work import FLAG_LSE, Q_BEGIN, Q_LEN, REQUEST_FIELDS


class Sums(Protocol):
    """Byte offsets of the float32 arrays [groups][rows] that the score warps leave at the end of a piece, see `mma_config.Layout`."""

    totals: int
    rounded: int
    references: int


class _Rows(NamedTuple):
    """Device functions. statistics_of(row, first, count) -> (peak, sum of the weights by that peak) of a row after `count` steps, which groups
    first, first + 1, ... took in turn.  inverse_of(row, first, count) -> 1 / sum of the rounded weights.  finish(...): normalised rows to out.
    save(...): to a partial slot.  lse_of(peak, total): natural logarithm.
    """

    statistics_of: Callable
    inverse_of: Callable
    finish: Callable
    save: Callable
    lse_of: Callable


def _rows(lang: Any, shape: Shape, at: Sums, rows: int, groups: int, row_tiles: int, columns: int) -> _Rows:
    """Build them in the vocabulary `lang`; the arguments are those of `piece_writer`."""
    uint32, uint64, unroll, float32, shared, f32 = lang.uint32, lang.uint64, lang.unroll, lang.float32, lang.shared, lang.f32
    pointer, u32, store2, log2, exp2 = lang.pointer, lang.u32, lang.st_global_v2_f32, lang.lg2_approx_f32, lang.ex2_approx_f32
    pack = lang.f32_to_bf16x2 if shape.dtype == "bfloat16" else lang.f32_to_f16x2
    latent, column_tiles, quotient = shape.latent_dim, columns // 8, lang.quotient_u32
    totals_at, rounded_at, references_at = at.totals // 4, at.rounded // 4, at.references // 4
    columns, ln2, minus_infinity = uint32(columns), float32(LN_2), float32(-float("inf"))

    @lang.device
    def sum_of(sums_at, row, first, count):
        """(peak, sum) of a row; sums_at: of the exact sums or of the rounded ones."""
        floats, total = shared(uint32(0), f32), float32(0)
        peak = floats[uint32(references_at) + uint32((first + count - uint32(1)) % uint32(groups)) * uint32(rows) + row]
        for k in range(groups):
            unroll()
            if uint32(k) < count:
                entry = uint32((first + uint32(k)) % uint32(groups)) * uint32(rows) + row
                part, reference = floats[sums_at + entry], floats[uint32(references_at) + entry]
                if reference < peak:
                    part = part * exp2(reference - peak)
                total = total + part
        return peak, total

    @lang.device
    def statistics_of(row, first, count):
        return sum_of(uint32(totals_at), row, first, count)

    @lang.device
    def inverse_of(row, first, count):
        """0 for a row that saw nothing."""
        _, total = sum_of(uint32(rounded_at), row, first, count)
        inverse = float32(0)
        if total != float32(0):
            inverse = float32(1) / total
        return inverse

    @lang.device
    def finish(output, inverses, part, g, lane, out_address, first, valid, row_heads, q_begin, out_row, out_head):
        """part: which `columns` of a row; g: the lane's first row in the tile; first: the tile's in the request, of which `valid` exist."""
        for i in range(2 * row_tiles):
            unroll()
            inverse, flat = inverses[i], uint32(first + g + uint32(8 * i))
            if flat < valid:
                token = quotient(flat, row_heads)
                head = uint32(flat - token * row_heads)
                words = pointer(out_address, u32)
                where = ((q_begin + uint64(token)) * out_row + uint64(head) * out_head + uint64(part * columns)) >> uint64(1)
                for n in range(column_tiles):
                    unroll()
                    j = (i // 2 * column_tiles + n) * 4 + 2 * (i % 2)
                    words[where + uint64(uint32(4 * n) + (lane & uint32(3)))] = pack(output[j + 1] * inverse, output[j] * inverse)

    @lang.device
    def save(output, inverses, part, g, lane, partial_address, slot):
        for i in range(2 * row_tiles):
            unroll()
            inverse, row = inverses[i], slot * uint64(rows) + uint64(g + uint32(8 * i))
            where = partial_address + (row * uint64(latent) + uint64(part * columns + uint32(2) * (lane & uint32(3)))) * uint64(4)
            for n in range(column_tiles):
                unroll()
                j = (i // 2 * column_tiles + n) * 4 + 2 * (i % 2)
                store2(where + uint64(32 * n), output[j] * inverse, output[j + 1] * inverse)

    @lang.device
    def lse_of(peak, total):
        value = minus_infinity
        if total != float32(0):
            value = (peak + log2(total)) * ln2
        return value

    return _Rows(statistics_of, inverse_of, finish, save, lse_of)


class PieceWriter(NamedTuple):
    """Device functions for the end of a piece: read(inverses, ...) -> (peak, sum) of row t; write(output, inverses, peak, total, ...). `inverses` is
    of new_inverses()."""

    new_inverses: Callable
    read: Callable
    write: Callable


def piece_writer(lang: Any, shape: Shape, at: Sums, rows: int, groups: int, row_tiles: int, columns: int, early: bool) -> PieceWriter:
    """Build them in the vocabulary `lang`. rows: of a tile; groups: of score warps, which take steps in turn; row_tiles, columns: what a value
    warp holds, 16 rows each and their columns. early: `read` takes all that is wanted from shared memory, which may then be used anew; otherwise
    `write` takes the inverses when it needs them, for the sake of registers."""
    uint32, uint64, int64, pointer, f32, float32, unroll = lang.uint32, lang.uint64, lang.int64, lang.pointer, lang.f32, lang.float32, lang.unroll
    part_of = _rows(lang, shape, at, rows, groups, row_tiles, columns)
    statistics_of, inverse_of, finish, save, lse_of = part_of
    fields = REQUEST_FIELDS

    @lang.device
    def fill(inverses, place, start, count, g):
        for i in range(2 * row_tiles):
            unroll()
            inverses[i] = inverse_of(uint32(place + g + uint32(8 * i)), start, count)

    @lang.device
    def read(inverses, t, place, start, count, g):
        """t: thread of the role; place: rows before this piece's sums; start, count: the first group's number, and steps; g: the lane's first
        row of the tile."""
        if early:
            fill(inverses, place, start, count, g)
        peak, total = float32(0), float32(0)
        if t < uint32(rows):
            peak, total = statistics_of(uint32(place + t), start, count)
        return peak, total

    @lang.device
    def write(output, inverses, peak, total, place, start, count, t, part, g, lane, requests, r, tile, whole, at_slot, row_heads, num_rows, flags,
              out_address, out_row, out_head, lse_address, partial_address, statistics_address):
        """part: which `columns`; whole: the piece is its tile, else a partial that goes to `at_slot`."""
        table = int64(r) * fields
        q_begin, first, n = uint64(requests[table + Q_BEGIN]), uint32(tile * uint32(rows)), uint64(requests[table + Q_LEN])
        if q_begin + n > uint64(num_rows):
            n = uint64(num_rows) - q_begin if q_begin < uint64(num_rows) else uint64(0)
        valid = uint32(uint32(n) * row_heads)
        if t < uint32(rows):
            flat = uint32(first + t)
            if whole:
                if (flags & FLAG_LSE) != 0 and flat < valid:
                    pointer(lse_address, f32)[q_begin * uint64(row_heads) + uint64(flat)] = lse_of(peak, total)
            else:
                statistics = pointer(statistics_address, f32)
                where = (at_slot * uint64(rows) + uint64(t)) * uint64(2)
                statistics[where] = peak
                statistics[where + uint64(1)] = total
        if not early:
            fill(inverses, place, start, count, g)
        if whole:
            finish(output, inverses, part, g, lane, out_address, first, valid, row_heads, q_begin, out_row, out_head)
        else:
            save(output, inverses, part, g, lane, partial_address, at_slot)

    return PieceWriter(lang.local_array(2 * row_tiles, f32), read, write)
