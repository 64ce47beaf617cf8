"""Value warpgroups of `wgmma`: O += P V in registers, and the writing of a piece.

    warpgroup v   all 64 rows of the tile, columns v * latent / 2 ...
    warp w of it  rows 16 w ...; lane l: rows g = l / 4 and g + 8 of them, of every 8 columns 2 (l % 4) and the next

V is the latent part of the very rows that the scores were made of, read along the other dimension (MN-major).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import WARP
from .mma_config import CURSOR_WORDS, ITEMSIZE, SEGMENT_BYTES, SLOT_WORD
from .mma_value import output_functions
from .mma_work import block_bytes
from .mma_write import piece_writer
from .wgmma_config import PATTERN_BYTES, ROWS, SUM_PLACES, VALUE_GROUPS, WARPGROUP, WgmmaConfig
from .wgmma_work import Parts, operand

SCORE_WARPS = GROUP_WARPS = WARPGROUP // WARP
SEGMENT_DIMS = SEGMENT_BYTES // ITEMSIZE


class Accumulate(NamedTuple):
    """Of O, and a factory of its registers: clear O = 0; rescale O *= alpha; start: where the operands of a step begin, for begin_step: O += P V
    begins; end_step(output): it is done."""

    new_output: Callable
    clear: Callable
    rescale: Callable
    start: Callable
    begin_step: Callable
    end_step: Callable


def _accumulate(lang: Any, config: WgmmaConfig) -> Accumulate:
    """Build the functions in the vocabulary `lang`."""
    uint32, unroll, f32 = lang.uint32, lang.unroll, lang.f32
    columns, keys, at = config.shape.latent_dim // VALUE_GROUPS, config.tile.keys, config.layout
    count, new_output = columns // 2, lang.local_array(columns // 2, f32)
    fence, commit, wait = lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_wait(0, count)
    # Weights: core matrices of 8 rows x 8 keys, 128 bytes each, one after the other along the keys.
    weights = operand(lang, 128, keys // 8 * 128, 0)
    # Values: MN-major, 64 columns are a segment of the slot, 8 keys are 1024 bytes.
    values = operand(lang, config.segment_bytes, PATTERN_BYTES, 128)
    p_start, p_at, v_start, v_at = weights.start, weights.at, values.start, values.at
    clear, rescale = output_functions(lang, 1, columns // 8, at.alpha // 4)
    multiply, width = _products(lang, config, columns)
    weight_step, value_step, half = 2 * 128, 2 * PATTERN_BYTES, width // SEGMENT_DIMS * config.segment_bytes

    @lang.device
    def start(weights_at, values_at):
        return p_start(weights_at), v_start(values_at)

    @lang.device
    def begin_step(output, p, v):
        # O was cleared or rescaled.
        fence()
        for k in range(keys // 16):
            unroll()
            multiply(output, p_at(p, uint32(weight_step * k >> 4)), v_at(v, uint32(value_step * k >> 4)),
                     v_at(v, uint32((value_step * k + half) >> 4)))
        commit()

    return Accumulate(new_output, clear, rescale, start, begin_step, wait)


def _products(lang: Any, config: WgmmaConfig, columns: int) -> tuple[Callable, int]:
    """(multiply(output, p, v, v_next), columns of one product): O += P V for 16 keys; v_next: of the second half of V.

    A product of 256 columns takes more registers than ptxas allows a kernel that starts with 128 a thread, whatever they are raised to later.
    """
    width, dtype, uint32 = min(columns, 128), config.shape.dtype, lang.uint32
    first = lang.wgmma_ss(width, dtype, True)
    second = lang.wgmma_ss(width, dtype, True, width // 2)

    @lang.device
    def halves(output, p, v, v_next):
        first(output, p, v, uint32(1))
        second(output, p, v_next, uint32(1))

    @lang.device
    def whole(output, p, v, v_next):
        first(output, p, v, uint32(1))

    return halves if columns > width else whole, width


def value_role(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """Device function that one value thread runs from start to end."""
    uint32, uint64, int64, shared, u32, opaque, pointer, i64 = (lang.uint32, lang.uint64, lang.int64, lang.shared, lang.u32, lang.opaque,
                                                                lang.pointer, lang.i64)
    arrive, warp_sync, proxy_fence, wait, hold_back = (lang.mbarrier_arrive, lang.bar_warp_sync, lang.fence_proxy_async,
                                                       *(lang.mbarrier_wait(True),) * 2)
    find, stop_of, units_of, slot_of = parts.walk.find, parts.walk.stop, parts.walk.units, parts.walk.slot
    share_begin, put_down, pick_up, place_of, phase_of = parts.share_begin, parts.cursor.put, parts.cursor.get, parts.ring.place, parts.ring.phase
    product, at, columns = _accumulate(lang, config), config.layout, config.shape.latent_dim // VALUE_GROUPS
    new_output, clear, rescale, start = product.new_output, product.clear, product.rescale, product.start
    begin_step, end_step = product.begin_step, product.end_step
    new_inverses, read, write = piece_writer(lang, config.shape, at, ROWS, 1, 1, columns, early=True)
    q_slots, size, deterministic = uint32(config.tile.q_slots), uint32(block_bytes(config)), config.deterministic
    first_delayed, scored_at, full_at, test = uint32(VALUE_GROUPS - config.tile.delayed), uint32(at.scored), uint32(at.full), lang.mbarrier_test
    ring_at, ready_at, empty_at, flags_at = uint32(at.ring), uint32(at.ready), uint32(at.empty), uint32(at.flags // 4)
    weights_at, weights_size = (uint32(x) for x in config.weights)
    cursors_at, columns_bytes = uint32(at.cursors // 4 + SCORE_WARPS * CURSOR_WORDS), uint32(columns // SEGMENT_DIMS * config.segment_bytes)

    @lang.device
    def cursor_of(t):
        return uint32(cursors_at + (t >> uint32(5)) * uint32(CURSOR_WORDS))

    @lang.device
    def release(base, place):
        # This thread has read what it wants of the slot's factors and sums, and its weights and values are multiplied: it may be filled again.
        arrive(uint32(base + empty_at + (place << uint32(3))))

    @lang.device
    def value(base, t, ctas, p, requests_address, out_address, out_row, out_head, lse_address, partial_address, statistics_address, row_heads,
              num_rows, flags):
        marks = shared(uint32(0), u32)
        # parities: bit k is that of the phase of slot k's barrier `ready` that comes next. Q passes through slots without one.
        output, number, piece, parities = new_output(), uint32(0), uint32(0), uint32(0)
        (r, tile, unit, left), requests = share_begin(ctas, p, requests_address), pointer(requests_address, i64)
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            end = uint32(number + q_slots + uint32(stop_of(requests, r, unit, left, row_heads) - unit))
            if (t & uint32(31)) == uint32(0):
                # Picked up after the last step. And so is the partial slot, should one be needed.
                cursor = cursor_of(t)
                put_down(cursor, r, tile, unit, left, number)
                slot = uint32(uint32(p << int64(1)) + (uint32(1) if unit == uint32(0) else uint32(0)))
                marks[cursor + uint32(SLOT_WORD)] = uint32(slot_of(requests, r, tile, unit, row_heads)) if deterministic else slot
            number = uint32(number + q_slots)
            clear(output)
            while number != end:
                # Worked out in every step: what lives through them takes registers from O.
                here, place = opaque(t), place_of(number)
                warp, lane = here >> uint32(5), here & uint32(31)
                part, w = warp // uint32(GROUP_WARPS), warp % uint32(GROUP_WARPS)
                # The weights of this step, and with them the keys they belong to, are there; products read both by the other proxy.
                wait(uint32(base + ready_at + (place << uint32(3))), (parities >> place) & uint32(1))
                proxy_fence()
                parities = uint32(parities ^ (uint32(1) << place))
                if marks[flags_at + place * uint32(SCORE_WARPS) + w] != uint32(0):
                    rescale(output, uint32(place * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2))))
                weights, values = start(uint32(base + weights_at + place * weights_size),
                                        uint32(base + ring_at + place * size + part * columns_bytes))
                if part >= first_delayed and uint32(number + uint32(1)) != end:
                    # The next step of the piece is scored first, so that the tensor cores have work while its softmax is made; but only if its keys
                    # are there, or they would have none until then. (A step of another piece might wait for the slot that is held here.)
                    following = uint32(number + uint32(1))
                    there = place_of(following)
                    if test(uint32(base + full_at + (there << uint32(3))), phase_of(following)) != uint32(0):
                        # Its barrier was in the phase before when its slot was ready last, which this warp has seen.
                        hold_back(uint32(base + scored_at + (there << uint32(3))), (parities >> there) & uint32(1))
                begin_step(output, weights, values)
                if part >= first_delayed:
                    # Complete since long before `ready` was, and waited for already if the step before held back; but no phase of a barrier should
                    # pass without a wait. While the products run, since then it costs nothing. (`ready` has gone on: the parity of before.)
                    hold_back(uint32(base + scored_at + (place << uint32(3))), ((parities >> place) & uint32(1)) ^ uint32(1))
                end_step(output)
                number = uint32(number + uint32(1))
                if number != end:
                    release(base, place)
            # The cursor, written by one lane, is there for all.
            warp_sync()
            here = opaque(t)
            warp, lane, cursor = here >> uint32(5), here & uint32(31), cursor_of(here)
            part, w = warp // uint32(GROUP_WARPS), warp % uint32(GROUP_WARPS)
            r, tile, unit, left, number = pick_up(cursor)
            count, at_slot = uint32(end - number - q_slots), uint64(marks[cursor + uint32(SLOT_WORD)])
            stop, units = uint32(unit + count), units_of(requests, r)
            g, inverses = uint32(w * uint32(16) + (lane >> uint32(2))), new_inverses()
            sums = uint32((piece % uint32(SUM_PLACES)) * uint32(ROWS))
            peak, total = read(inverses, here, sums, uint32(0), count, g)
            # Only now, with the sums read: see `WgmmaTile.__post_init__`.
            release(base, place_of(uint32(end - uint32(1))))
            # All lanes have picked up the cursor, which is put down anew for the next piece.
            warp_sync()
            write(output, inverses, peak, total, sums, uint32(0), count, here, part, g, lane, requests, r, tile, unit == uint32(0) and stop == units,
                  at_slot, row_heads, num_rows, flags, out_address, out_row, out_head, lse_address, partial_address, statistics_address)
            left, unit, number, piece = uint32(left - count), stop, end, uint32(piece + uint32(1))
            if unit == units:
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return value
