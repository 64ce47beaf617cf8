"""Value warps of `mma`: O += P V in registers, and the writing of a piece: a row of out, or a partial for `combine`.

    warp w        all rows of the tile, columns w * latent / 8 ...
    lane l        of every 16 x 8 tile of O: rows g = l / 4 and g + 8, columns 2 (l % 4) and the next

V is the latent part of the very rows that the scores were made of; ldmatrix.trans reads it column by column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .mma_config import CURSOR_WORDS, ITEMSIZE, SLOT_WORD, VALUE_WARPS, MmaConfig, layout
from .mma_work import Parts, block_bytes
from .tile import LN_2
from .work import (
    CTA_COUNT,
    CTA_FIELDS,
    CTA_REQUEST,
    CTA_TILE,
    CTA_UNIT,
    FLAG_LSE,
    Q_BEGIN,
    Q_LEN,
    REQUEST_FIELDS,
)


class Accumulate(NamedTuple):
    """Of O, and a factory of its registers: clear O = 0; rescale O *= alpha; add_step O += P V for the keys of a step."""

    new_output: Callable
    clear: Callable
    rescale: Callable
    add_step: Callable


def _accumulate(lang: Any, config: MmaConfig, place_of: Callable) -> Accumulate:
    """Build the functions in the vocabulary `lang`. place_of: `Ring.place`."""
    uint32, unroll, f32, float32, shared = lang.uint32, lang.unroll, lang.f32, lang.float32, lang.shared
    tile, at = config.tile, layout(config.shape, config.tile)
    row_tiles, columns = tile.rows // 16, config.shape.latent_dim // VALUE_WARPS
    column_tiles, count, alpha_at = columns // 8, row_tiles * columns // 2, at.alpha // 4
    new_output = lang.local_array(count, f32)
    load_weights, load_values, multiply, new_weights, new_values = _fragments(lang, config)
    warp_sync, arrive, empty_at, size = lang.bar_warp_sync, lang.mbarrier_arrive, uint32(at.empty), uint32(block_bytes(config))
    key_blocks, pairs = tile.key_blocks, columns // 16

    @lang.device
    def clear(output):
        for i in range(count):
            unroll()
            output[i] = float32(0)

    @lang.device
    def rescale(output, row):
        """row: of this lane in this group's factors."""
        alpha = shared(uint32(0), f32)
        for i in range(2 * row_tiles):
            unroll()
            factor = alpha[uint32(alpha_at + 8 * i) + row]
            for n in range(column_tiles):
                unroll()
                j = (i // 2 * column_tiles + n) * 4 + 2 * (i % 2)
                output[j], output[j + 1] = output[j] * factor, output[j + 1] * factor

    @lang.device
    def free_block(base, number, lane):
        # This warp has fetched its columns of the block: the producers may refill it.
        warp_sync()
        if lane == uint32(0):
            arrive(uint32(base + empty_at + (place_of(number) << uint32(3))))

    @lang.device
    def add_step(output, base, number, values_at, weight_at, lane):
        """number: running number of the step's first block; values_at: the lane's ldmatrix row in ring block 0, 16 columns of the warp on it is
        the same address with bits 5 and 6 XOR 1; weight_at: in this group's weights, a block on it is the same with bit 5 XOR 1."""
        weights, values = new_weights(), new_values()
        load_weights(weights, weight_at)
        load_values(values, 0, uint32(place_of(number) * size + values_at))
        for b in range(key_blocks):
            unroll()
            here = uint32(place_of(uint32(number + uint32(b))) * size + values_at)
            following = uint32(place_of(uint32(number + uint32(b + 1))) * size + values_at)
            for c in range(pairs):
                unroll()
                # The next 16 columns are on their way while these are multiplied.
                if c + 1 < pairs:
                    load_values(values, b * pairs + c + 1, uint32(here ^ uint32((c + 1) << 5)))
                elif b + 1 < key_blocks:
                    load_values(values, b * pairs + c + 1, following)
                multiply(output, weights, values, b * pairs + c, c)
                if c == pairs - 1 and b + 1 < key_blocks:
                    load_weights(weights, uint32(weight_at ^ uint32((b + 1) << 5)))
            free_block(base, uint32(number + uint32(b)), lane)

    return Accumulate(new_output, clear, rescale, add_step)


def _fragments(lang: Any, config: MmaConfig) -> tuple[Callable, ...]:
    """(load_weights, load_values, multiply, new_weights, new_values) of P V: all rows, 16 keys and 16 columns at a time."""
    uint32, unroll, u32 = lang.uint32, lang.unroll, lang.u32
    ldmatrix, ldmatrix_trans = lang.ldmatrix_x4, lang.ldmatrix_x4_trans
    mma = lang.mma_m16n8k16_bf16 if config.shape.dtype == "bfloat16" else lang.mma_m16n8k16_f16
    row_tiles, column_tiles = config.tile.rows // 16, config.shape.latent_dim // VALUE_WARPS // 8
    weight_rows = uint32(16 * config.tile.keys * ITEMSIZE)

    @lang.device
    def load_weights(weights, weight_at):
        for m in range(row_tiles):
            unroll()
            x = ldmatrix(uint32(weight_at + uint32(m) * weight_rows))
            for i in range(4):
                unroll()
                weights[4 * m + i] = x[i]

    @lang.device
    def load_values(values, i, at):
        """i: counts the 16 columns of a step; two of them have room."""
        x = ldmatrix_trans(at)
        for j in range(4):
            unroll()
            values[4 * (i % 2) + j] = x[j]

    @lang.device
    def multiply(output, weights, values, i, c):
        """c: which 16 columns of the warp."""
        for m in range(row_tiles):
            unroll()
            for e in range(2):
                unroll()
                o, j, k = (m * column_tiles + 2 * c + e) * 4, 4 * m, 4 * (i % 2) + 2 * e
                x = mma(weights[j], weights[j + 1], weights[j + 2], weights[j + 3], values[k], values[k + 1],
                        output[o], output[o + 1], output[o + 2], output[o + 3])
                output[o], output[o + 1], output[o + 2], output[o + 3] = x[0], x[1], x[2], x[3]

    return load_weights, load_values, multiply, lang.local_array(4 * row_tiles, u32), lang.local_array(8, u32)


def _write(lang: Any, config: MmaConfig) -> tuple[Callable, ...]:
    """(finish, save): the rows of a whole tile to out and lse; of a part of it to a partial slot and its statistics."""
    uint32, uint64, unroll, float32, shared, f32 = lang.uint32, lang.uint64, lang.unroll, lang.float32, lang.shared, lang.f32
    pointer, u32, store2, log2 = lang.pointer, lang.u32, lang.st_global_v2_f32, lang.lg2_approx_f32
    pack = lang.f32_to_bf16x2 if config.shape.dtype == "bfloat16" else lang.f32_to_f16x2
    at, latent = layout(config.shape, config.tile), config.shape.latent_dim
    row_tiles, column_tiles = config.tile.rows // 16, latent // VALUE_WARPS // 8
    rows, groups, rounded_at, references_at = config.tile.rows, config.tile.groups, at.rounded // 4, at.references // 4
    columns, ln2, minus_infinity = uint32(latent // VALUE_WARPS), float32(LN_2), float32(-float("inf"))
    exp2 = lang.ex2_approx_f32

    @lang.device
    def statistics_of(floats, sums_at, row, first, count):
        """(peak, sum of the weights by that peak) of a row after `count` steps, which groups first, first + 1, ... took in turn. sums_at: of
        the exact sums or of the rounded ones."""
        total = float32(0)
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
    def inverse_of(row, first, count):
        """1 / sum of the rounded weights of a row; 0 for one that saw nothing."""
        _, total = statistics_of(shared(uint32(0), f32), uint32(rounded_at), row, first, count)
        inverse = float32(0)
        if total != float32(0):
            inverse = float32(1) / total
        return inverse

    @lang.device
    def finish(output, start, count, w, g, lane, out_address, first, valid, row_heads, q_begin, out_row, out_head):
        for i in range(2 * row_tiles):
            unroll()
            inverse, flat = inverse_of(uint32(g + uint32(8 * i)), start, count), uint32(first + g + uint32(8 * i))
            if flat < valid:
                token = flat // row_heads
                head = uint32(flat - token * row_heads)
                words = pointer(out_address, u32)
                where = ((q_begin + uint64(token)) * out_row + uint64(head) * out_head + uint64(w * columns)) >> uint64(1)
                for n in range(column_tiles):
                    unroll()
                    j = (i // 2 * column_tiles + n) * 4 + 2 * (i % 2)
                    words[where + uint64(uint32(4 * n) + (lane & uint32(3)))] = pack(output[j + 1] * inverse, output[j] * inverse)

    @lang.device
    def save(output, start, count, w, g, lane, partial_address, slot):
        for i in range(2 * row_tiles):
            unroll()
            inverse, row = inverse_of(uint32(g + uint32(8 * i)), start, count), slot * uint64(rows) + uint64(g + uint32(8 * i))
            where = partial_address + (row * uint64(latent) + uint64(w * columns + uint32(2) * (lane & uint32(3)))) * uint64(4)
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

    return statistics_of, finish, save, lse_of


def value_role(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """Device function that one value thread runs from start to end."""
    uint32, uint64, int64, pointer, shared = lang.uint32, lang.uint64, lang.int64, lang.pointer, lang.shared
    u32, f32, put_down, pick_up = lang.u32, lang.f32, parts.cursor.put, parts.cursor.get
    product = _accumulate(lang, config, parts.ring.place)
    new_output, clear, rescale, add_step = product.new_output, product.clear, product.rescale, product.add_step
    statistics_of, finish, save, lse_of = _write(lang, config)
    steps, place, signal = parts.walk, parts.swizzle, parts.signals
    find, stop_of, units_of, slot_of, row_offset, weight_offset = steps.find, steps.stop, steps.units, steps.slot, place.row, place.weight
    tile, at, fields = config.tile, layout(config.shape, config.tile), REQUEST_FIELDS
    columns, key_blocks = config.shape.latent_dim // VALUE_WARPS, tile.key_blocks
    ring_at, weights_at, flags_at, totals_at = uint32(at.ring), uint32(at.weights), uint32(at.flags // 4), uint32(at.totals // 4)
    cursor_at, opaque = uint32(at.cursors // 4 + CURSOR_WORDS), lang.opaque
    rows, row_warps, deterministic = tile.rows, tile.row_warps, config.deterministic
    ready_sync, free_arrive, groups = signal.ready_sync, signal.free_arrive, tile.groups
    weight_bytes = uint32(tile.rows * tile.keys * ITEMSIZE)

    @lang.device
    def value(base, t, ctas, p, requests, out_address, out_row, out_head, lse_address, partial_address, statistics_address, row_heads, num_rows,
              flags):
        w, lane = t >> uint32(5), t & uint32(31)
        g = lane >> uint32(2)
        marks = shared(uint32(0), u32)
        output, number, piece = new_output(), uint32(0), uint32(0)
        cta = p * CTA_FIELDS
        r, tile, unit, left = (uint32(ctas[cta + CTA_REQUEST]), uint32(ctas[cta + CTA_TILE]), uint32(ctas[cta + CTA_UNIT]),
                               uint32(ctas[cta + CTA_COUNT]))
        for k in range(groups):
            if uint32(k) < left:
                # Nothing has been written yet: the groups that have a step may begin.
                free_arrive(uint32(k))
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            end = uint32(number + uint32(stop_of(requests, r, unit, left, row_heads) - unit) * uint32(key_blocks))
            if t == uint32(0):
                # Picked up after the last step, long after the barrier of the first. And so is the partial slot, should one be needed.
                words_at = uint32(cursor_at + (piece & uint32(1)) * uint32(CURSOR_WORDS))
                put_down(words_at, r, tile, unit, left, number)
                slot = uint32(uint32(p << int64(1)) + (uint32(1) if unit == uint32(0) else uint32(0)))
                marks[words_at + uint32(SLOT_WORD)] = uint32(slot_of(requests, r, tile, unit, row_heads)) if deterministic else slot
            clear(output)
            while number != end:
                turn = uint32(number // uint32(key_blocks)) % uint32(groups)
                # The weights of this step, and with them the keys they belong to, are there.
                ready_sync(turn)
                if (marks[flags_at + turn * uint32(row_warps)] | marks[flags_at + turn * uint32(row_warps) + uint32(row_warps - 1)]) != uint32(0):
                    rescale(output, uint32(turn * uint32(rows) + g))
                # Worked out in every step: what lives through them takes registers from O.
                here, origin = opaque(lane), opaque(base)
                key, half = here & uint32(15), here >> uint32(4)
                values_at = uint32(origin + ring_at + row_offset(key, uint32(w * uint32(columns // 8) + half)))
                weight_at = uint32(origin + weights_at + turn * weight_bytes + weight_offset(key, half))
                add_step(output, base, number, values_at, weight_at, lane)
                number = uint32(number + uint32(key_blocks))
                if uint32(end - number) >= uint32(groups * key_blocks):
                    # This thread has read weights and factors, and the group has another step in this piece: it may write its next.
                    free_arrive(turn)
            words_at = uint32(cursor_at + (piece & uint32(1)) * uint32(CURSOR_WORDS))
            r, tile, unit, left, number = pick_up(words_at)
            count, start = uint32(end - number) // uint32(key_blocks), uint32(number // uint32(key_blocks)) % uint32(groups)
            stop, number, piece = uint32(unit + count), end, uint32(piece + uint32(1))
            table = int64(r) * fields
            q_begin, first = uint64(requests[table + Q_BEGIN]), uint32(tile * uint32(rows))
            n = uint64(requests[table + Q_LEN])
            if q_begin + n > uint64(num_rows):
                n = uint64(num_rows) - q_begin if q_begin < uint64(num_rows) else uint64(0)
            valid = uint32(uint32(n) * row_heads)
            units = units_of(requests, r)
            whole = unit == uint32(0) and stop == units
            at_slot = uint64(marks[words_at + uint32(SLOT_WORD)])
            if t < uint32(rows):
                peak, total = statistics_of(shared(uint32(0), f32), totals_at, t, start, count)
                flat = uint32(first + t)
                if whole:
                    if (flags & FLAG_LSE) != 0 and flat < valid:
                        pointer(lse_address, f32)[q_begin * uint64(row_heads) + uint64(flat)] = lse_of(peak, total)
                else:
                    statistics = pointer(statistics_address, f32)
                    where = (at_slot * uint64(rows) + uint64(t)) * uint64(2)
                    statistics[where] = peak
                    statistics[where + uint64(1)] = total
            if whole:
                finish(output, start, count, w, g, lane, out_address, first, valid, row_heads, q_begin, out_row, out_head)
            else:
                save(output, start, count, w, g, lane, partial_address, at_slot)
            # Sums and peaks are read as well now: the groups of the last steps may write those of the next piece, as far as it goes.
            for step in range(uint32(count - uint32(groups)) if count > uint32(groups) else uint32(0), count):
                if uint32(step) + uint32(groups) < left:
                    free_arrive(uint32((start + uint32(step)) % uint32(groups)))
            left, unit = uint32(left - count), stop
            if unit == units:
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return value
