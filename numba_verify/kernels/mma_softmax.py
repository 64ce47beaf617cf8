"""The online softmax of `mma` over the scores of one step, in units of log2(e)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .mma_config import MmaConfig
from .tile import LOG2_E


class Softmax(NamedTuple):
    """Device functions of the online softmax over the step's scores of one lane: 2 rows of every 16, 2 keys of every 8.

    to_log2(scores, factor, ...) -> factor: what scores are still to be multiplied by; capped ones are ready.
    maxima(step_peak, scores, factor): the rows' largest.  weigh(weights, scores, factor, peak, total): weights, two to a word, and their sums as
    they are, of the lane's keys, for the lse.  add_rounded(rounded, weights): the sums as the value warps see them, of all keys of the step, to
    divide by. A weight of 100 may be rounded by 0.2: divided by the exact sum, a row of one large weight would be off by as much.
    add_lane_rounded: the same, of the lane's keys.
    """

    to_log2: Callable
    maxima: Callable
    weigh: Callable
    add_rounded: Callable
    add_lane_rounded: Callable


def softmax_of(lang: Any, config: MmaConfig) -> Softmax:
    """Build the functions in the vocabulary `lang`."""
    uint32, float32, unroll, maximum, shuffle = lang.uint32, lang.float32, lang.unroll, lang.max_f32, lang.shfl_sync_bfly_f32
    exp2, tanh, fma, uint16 = lang.ex2_approx_f32, lang.tanh_f32, lang.fma_f32, lang.uint16
    widen = lang.bf16_to_f32 if config.shape.dtype == "bfloat16" else lang.f16_to_f32
    pack = lang.f32_to_bf16x2 if config.shape.dtype == "bfloat16" else lang.f32_to_f16x2
    mma = lang.mma_m16n8k16_bf16 if config.shape.dtype == "bfloat16" else lang.mma_m16n8k16_f16
    ones = uint32(0x3F803F80 if config.shape.dtype == "bfloat16" else 0x3C003C00)
    rows_here, key_tiles = 2 * (config.tile.warp_rows // 16), config.tile.keys // 8
    log2e, minus_infinity = float32(LOG2_E), float32(-float("inf"))

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
    def weigh(weights, scores, factor, peak, total):
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
                total[i] = total[i] + (low + high)
                weights[j // 2] = pack(high, low)

    @lang.device
    def add_rounded(rounded, weights):
        # Summed by the tensor cores: weights times ones. Words of two neighbouring 16 x 8 tiles are just the fragment of a 16 x 16 one.
        for m in range(rows_here // 2):
            unroll()
            for n in range(key_tiles // 2):
                unroll()
                j = (m * key_tiles + 2 * n) * 2
                x = mma(weights[j], weights[j + 1], weights[j + 2], weights[j + 3], ones, ones, float32(0), float32(0), float32(0), float32(0))
                rounded[2 * m], rounded[2 * m + 1] = rounded[2 * m] + x[0], rounded[2 * m + 1] + x[2]

    @lang.device
    def add_lane_rounded(rounded, weights):
        for i in range(rows_here):
            unroll()
            for n in range(key_tiles):
                unroll()
                x = weights[(i // 2 * key_tiles + n) * 2 + i % 2]
                rounded[i] = rounded[i] + (widen(uint16(x)) + widen(uint16(x >> uint32(16))))

    return Softmax(to_log2, maxima, weigh, add_rounded, add_lane_rounded)
