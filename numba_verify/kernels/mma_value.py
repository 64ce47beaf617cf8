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
from .mma_write import piece_writer
from .work import CTA_COUNT, CTA_FIELDS, CTA_REQUEST, CTA_TILE, CTA_UNIT


class Accumulate(NamedTuple):
    """Of O, and a factory of its registers: clear O = 0; rescale O *= alpha; add_step O += P V for the keys of a step."""

    new_output: Callable
    clear: Callable
    rescale: Callable
    add_step: Callable


def output_functions(lang: Any, row_tiles: int, column_tiles: int, alpha_at: int) -> tuple[Callable, Callable]:
    """(clear, rescale) of an output of 16 x 8 tiles in registers: clear(output): O = 0; rescale(output, row): O *= alpha, of which this lane's first
    row is element `row` of the float32 array at word `alpha_at` of shared memory."""
    uint32, unroll, f32, float32, shared = lang.uint32, lang.unroll, lang.f32, lang.float32, lang.shared
    count = row_tiles * column_tiles * 4

    @lang.device
    def clear(output):
        for i in range(count):
            unroll()
            output[i] = float32(0)

    @lang.device
    def rescale(output, row):
        alpha = shared(uint32(0), f32)
        for i in range(2 * row_tiles):
            unroll()
            factor = alpha[uint32(alpha_at + 8 * i) + row]
            for n in range(column_tiles):
                unroll()
                j = (i // 2 * column_tiles + n) * 4 + 2 * (i % 2)
                output[j], output[j + 1] = output[j] * factor, output[j + 1] * factor

    return clear, rescale


def _accumulate(lang: Any, config: MmaConfig, place_of: Callable) -> Accumulate:
    """Build the functions in the vocabulary `lang`. place_of: `Ring.place`."""
    uint32, unroll, f32 = lang.uint32, lang.unroll, lang.f32
    tile, at = config.tile, layout(config.shape, config.tile)
    row_tiles, columns = tile.rows // 16, config.shape.latent_dim // VALUE_WARPS
    column_tiles, count, alpha_at = columns // 8, row_tiles * columns // 2, at.alpha // 4
    new_output = lang.local_array(count, f32)
    load_weights, load_values, multiply, new_weights, new_values = _fragments(lang, config)
    warp_sync, arrive, empty_at, size = lang.bar_warp_sync, lang.mbarrier_arrive, uint32(at.empty), uint32(block_bytes(config))
    key_blocks, pairs = tile.key_blocks, columns // 16

    clear, rescale = output_functions(lang, row_tiles, column_tiles, alpha_at)

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


def _holding(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """hold_back(base, w, step, end): value warp `w` may wait with `step` (of the CTA, at hand; `end`: of the piece).

    All wait for the score warps, so the one in the same quarter of the SM should have the tensor cores first. What it is at when a step is
    ready: if the step is of its own group, its next product, which may last as long as the ring does; else often a product about to end, after
    which it is at its softmax and leaves the tensor cores alone. So steps of other groups wait for that. No data goes with it.
    """
    uint32, holds_back, listen, scored_at = lang.uint32, config.tile.holds_back, lang.mbarrier_wait(config.sm_90), config.layout.scored
    place_of, phase_of, row_warps, groups = parts.scored.place, parts.scored.phase, config.tile.row_warps, config.tile.groups

    @lang.device
    def hold_back(base, w, step, end):
        if holds_back:
            # The warp numbers of both roles begin at a multiple of 4, so the score warp of this quarter has the number w % 4.
            row_warp, group = w % uint32(row_warps), (w // uint32(row_warps)) % uint32(groups)
            scored = step if step % uint32(groups) == group else uint32(step + uint32(1))
            # Of its own group's steps too, which are scored since long: no phase of an mbarrier passes without a wait.
            if scored % uint32(groups) == group and scored != end:
                listen(uint32(base + uint32(scored_at) + ((place_of(scored) * uint32(row_warps) + row_warp) << uint32(3))), phase_of(scored))

    return hold_back


def value_role(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """Device function that one value thread runs from start to end."""
    uint32, uint64, int64, shared, u32 = lang.uint32, lang.uint64, lang.int64, lang.shared, lang.u32
    put_down, pick_up = parts.cursor.put, parts.cursor.get
    product = _accumulate(lang, config, parts.ring.place)
    new_output, clear, rescale, add_step = product.new_output, product.clear, product.rescale, product.add_step
    new_inverses, read, write = piece_writer(lang, config.shape, layout(config.shape, config.tile), config.tile.rows, config.tile.groups,
                                             config.tile.rows // 16, config.shape.latent_dim // VALUE_WARPS, early=False)
    steps, signal, row_offset, weight_offset = parts.walk, parts.signals, parts.swizzle.row, parts.swizzle.weight
    find, stop_of, units_of, slot_of = steps.find, steps.stop, steps.units, steps.slot
    tile, at = config.tile, layout(config.shape, config.tile)
    columns, key_blocks = config.shape.latent_dim // VALUE_WARPS, tile.key_blocks
    ring_at, weights_at, flags_at, hold_back = uint32(at.ring), uint32(at.weights), uint32(at.flags // 4), _holding(lang, config, parts)
    cursor_at, opaque = uint32(at.cursors // 4 + CURSOR_WORDS), lang.opaque
    rows, row_warps, deterministic = tile.rows, tile.row_warps, config.deterministic
    ready_sync, free_arrive, groups, warp_sync = signal.ready_sync, signal.free_arrive, tile.groups, lang.bar_warp_sync
    broadcast = lang.shfl_sync_idx_u32
    weight_bytes = uint32(tile.rows * tile.keys * ITEMSIZE)

    @lang.device
    def value(base, t, ctas, p, requests, out_address, out_row, out_head, lse_address, partial_address, statistics_address, row_heads, num_rows,
              flags):
        marks = shared(uint32(0), u32)
        output, number = new_output(), uint32(0)
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
            # All lanes have picked up the cursor of the piece before.
            warp_sync()
            if (t & uint32(31)) == uint32(0):
                # Picked up after the last step: the lanes have met since, handing back blocks. And so is the partial slot, should one be needed.
                words_at = uint32(cursor_at + (t >> uint32(5)) * uint32(CURSOR_WORDS))
                put_down(words_at, r, tile, unit, left, number)
                slot = uint32(uint32(p << int64(1)) + (uint32(1) if unit == uint32(0) else uint32(0)))
                marks[words_at + uint32(SLOT_WORD)] = uint32(slot_of(requests, r, tile, unit, row_heads)) if deterministic else slot
            clear(output)
            # By opaque copies: parts of this place are known before the piece, and would take registers from O one by one.
            here = opaque(t)
            values_at = opaque(uint32(opaque(base) + ring_at + row_offset(here & uint32(15), uint32((here >> uint32(5)) * uint32(columns // 8)
                                                                                                    + ((here >> uint32(4)) & uint32(1))))))
            while number != end:
                turn = uint32(number // uint32(key_blocks)) % uint32(groups)
                # The weights of this step, and with them the keys they belong to, are there.
                ready_sync(base, uint32(number // uint32(key_blocks)))
                hold_back(opaque(base), opaque(t) >> uint32(5), uint32(number // uint32(key_blocks)), uint32(end // uint32(key_blocks)))
                if (marks[flags_at + turn * uint32(row_warps)] | marks[flags_at + turn * uint32(row_warps) + uint32(row_warps - 1)]) != uint32(0):
                    rescale(output, uint32(turn * uint32(rows) + ((opaque(t) >> uint32(2)) & uint32(7))))
                # Worked out in every step: another place that lives through them is one too many.
                here = opaque(t)
                place = weight_offset(here & uint32(15), (here >> uint32(4)) & uint32(1))
                add_step(output, base, number, values_at, uint32(opaque(base) + weights_at + turn * weight_bytes + place), here & uint32(31))
                number = uint32(number + uint32(key_blocks))
                if uint32(end - number) >= uint32(groups * key_blocks):
                    # This thread has read weights and factors, and the group has another step in this piece: it may write its next.
                    free_arrive(turn)
            # From a copy for the same reason: what the writing wants to know would be worked out before the steps.
            here = opaque(t)
            w, lane, g = here >> uint32(5), here & uint32(31), (here >> uint32(2)) & uint32(7)
            words_at = uint32(cursor_at + w * uint32(CURSOR_WORDS))
            # With a constant lane ptxas knows that all lanes have the same: uniform registers, which take none from O.
            words_at = broadcast(words_at, uint32(0))
            r, tile, unit, left, number = pick_up(words_at)
            count, start = uint32(end - number) // uint32(key_blocks), uint32(number // uint32(key_blocks)) % uint32(groups)
            stop, number = uint32(unit + count), end
            units = units_of(requests, r)
            inverses = new_inverses()
            peak, total = read(inverses, here, uint32(0), start, count, g)
            write(output, inverses, peak, total, uint32(0), start, count, here, w, g, lane, requests, r, tile, unit == uint32(0) and stop == units,
                  uint64(marks[words_at + uint32(SLOT_WORD)]), row_heads, num_rows, flags, out_address, out_row, out_head, lse_address,
                  partial_address, statistics_address)
            # Sums and peaks are read as well now: the groups of the last steps may write those of the next piece, as far as it goes.
            for step in range(uint32(count - uint32(groups)) if count > uint32(groups) else uint32(0), count):
                if uint32(step) + uint32(groups) < left:
                    free_arrive(uint32((start + uint32(step)) % uint32(groups)))
            left, unit = uint32(left - count), stop
            if unit == units:
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return value
