"""The online softmax of `mma` and `wgmma` over the scores of one step, in units of log2(e)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .mma_config import TensorConfig
from .tile import LOG2_E

#: How far the sum of a lane's weights of one row and step may grow; and then log2 of how far a row's largest score may be above its peak. A lane has
#: at most 16 keys of a row: where the first is exceeded, so is the second (but for rounding), and the peak moves. Far from float16's 65504.
GROWN_SUM, GROWTH = 256.0, 4.0


class Softmax(NamedTuple):
    """Device functions of the online softmax over the step's scores of one lane: 2 rows of every 16, 2 keys of every 8.

    to_log2(scores, factor, ...) -> factor: what scores are still to be multiplied by; capped ones are ready.
    maxima(step_peak, scores, factor): the rows' largest.  weigh(weights, exact, rounded, scores, factor, peak): weights, two to a word; the sums
    of the lane's are added up, as they are, for the lse, and as the values are weighed with them, to divide by: a weight of 100 may be rounded by
    0.2, and divided by the exact sum, a row of one large weight would be off by as much.
    hand_over_sums(exact, rounded, peak, row, lane): at the end of a piece, the sums of the rows and the peaks that they are measured from, to shared
    memory; row: the lane's first there.
    """

    to_log2: Callable
    maxima: Callable
    weigh: Callable
    hand_over_sums: Callable


def softmax_of(lang: Any, config: TensorConfig) -> Softmax:
    """Build the functions in the vocabulary `lang`."""
    uint32, float32, unroll, maximum, shuffle = lang.uint32, lang.float32, lang.unroll, lang.max_f32, lang.shfl_sync_bfly_f32
    exp2, tanh, fma, uint16 = lang.ex2_approx_f32, lang.tanh_f32, lang.fma_f32, lang.uint16
    widen = lang.bf16_to_f32 if config.shape.dtype == "bfloat16" else lang.f16_to_f32
    pack = lang.f32_to_bf16x2 if config.shape.dtype == "bfloat16" else lang.f32_to_f16x2
    rows_here, key_tiles = 2 * (config.tile.warp_rows // 16), config.tile.keys // 8
    log2e, minus_infinity, shared, f32, at = float32(LOG2_E), float32(-float("inf")), lang.shared, lang.f32, config.layout
    totals_at, rounded_at, references_at = uint32(at.totals // 4), uint32(at.rounded // 4), uint32(at.references // 4)

    @lang.device
    def to_log2(scores, factor, sm_scale, logit_cap):
        if logit_cap > float32(0):
            for i in range(rows_here * key_tiles * 2):
                unroll()
                scores[i] = logit_cap * tanh(scores[i] * sm_scale / logit_cap) * log2e
            factor = float32(1)
        return factor

    @lang.device
    def row_maximum(scores, i, sign):
        x = minus_infinity
        for n in range(key_tiles):
            unroll()
            j = (i // 2 * key_tiles + n) * 4 + 2 * (i % 2)
            x = maximum(x, maximum(scores[j] * sign, scores[j + 1] * sign))
        x = maximum(x, shuffle(x, uint32(1)))
        return maximum(x, shuffle(x, uint32(2)))

    @lang.device
    def maxima(step_peak, scores, factor):
        # Scaled once a row, not once a score: a product by 1 or -1 costs nothing.
        if factor >= float32(0):
            for i in range(rows_here):
                unroll()
                step_peak[i] = row_maximum(scores, i, float32(1)) * factor
        else:
            for i in range(rows_here):
                unroll()
                step_peak[i] = row_maximum(scores, i, float32(-1)) * -factor

    @lang.device
    def weigh(weights, exact, rounded, scores, factor, peak):
        for i in range(rows_here):
            unroll()
            # A row that has seen nothing yet has peak -inf, and -inf - -inf would be NaN: measure from 0 instead.
            below = float32(0)
            if peak[i] > minus_infinity:
                below = -peak[i]
            for n in range(key_tiles):
                unroll()
                j = (i // 2 * key_tiles + n) * 4 + 2 * (i % 2)
                low, high = exp2(fma(scores[j], factor, below)), exp2(fma(scores[j + 1], factor, below))
                exact[i] = exact[i] + (low + high)
                weights[j // 2] = pack(high, low)
        # By lanes, not by tensor cores: it fits in between the exponentials, of which a quarter of an SM makes 4 a clock.
        for i in range(rows_here):
            unroll()
            for n in range(key_tiles):
                unroll()
                x = weights[(i // 2 * key_tiles + n) * 2 + i % 2]
                rounded[i] = rounded[i] + (widen(uint16(x)) + widen(uint16(x >> uint32(16))))

    @lang.device
    def over_quad(x):
        x = x + shuffle(x, uint32(1))
        return x + shuffle(x, uint32(2))

    @lang.device
    def hand_over_sums(exact, rounded, peak, row, lane):
        floats = shared(uint32(0), f32)
        for i in range(rows_here):
            unroll()
            all_exact, all_rounded, at = over_quad(exact[i]), over_quad(rounded[i]), uint32(row + uint32(8 * i))
            if (lane & uint32(3)) == uint32(0):
                floats[totals_at + at], floats[rounded_at + at], floats[references_at + at] = all_exact, all_rounded, peak[i]

    return Softmax(to_log2, maxima, weigh, hand_over_sums)
