"""Score warps of `wgmma`: S = Q K^T, the mask, the online softmax, and the weights P for the value warpgroups.

    warp w        rows 16 w ... of the tile, all keys of a step
    lane l        rows g = l / 4 and g + 8 of them; of every 8 keys 2 (l % 4) and the next (PTX ISA, "wgmma.mma_async.m64nNk16", fragment of D)

Q is in registers, as fragments of A, as far as they go. A product then reads nothing but keys from shared memory, half of what it would read
otherwise, and what Q leaves free is a third slot for keys: one is scored while the one before is multiplied and the next is fetched.

The weights of a step take the place of its last 64 dims, which no value is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import WARP
from .mma_config import CURSOR_WORDS, SEGMENT_BYTES
from .mma_mask import mask_of, poison_remover, seen_words
from .mma_score import GROWTH
from .mma_softmax import softmax_of
from .mma_work import block_bytes
from .tile import LOG2_E
from .wgmma_config import PATTERN_BYTES, ROWS, SEGMENT_STEPS, SUM_PLACES, VALUE_WARPS, WARPGROUP, WgmmaConfig
from .wgmma_work import Parts, operand
from .work import KV_LEN, PREFIX, Q_BEGIN, Q_LEN, REQUEST_FIELDS

WARPS = WARPGROUP // WARP


def _queries(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """take(...): Q from the slots it came in to registers, and what they cannot hold to its place in shared memory."""
    uint32, unroll, shared, u32 = lang.uint32, lang.unroll, lang.shared, lang.u32
    wait, ldmatrix, arrive_for = lang.mbarrier_wait(True), lang.ldmatrix_x4, lang.mbarrier_arrive_count
    place_of, phase_of, row_offset = parts.ring.place, parts.ring.phase, parts.swizzle.row
    at, size, slots, warp_sync = config.layout, uint32(block_bytes(config)), config.tile.q_slots, lang.bar_warp_sync
    held, segments, segment = min(config.tile.q_segments, config.segments), config.segments, config.segment_bytes
    slot_rows, row_words, all_row_words = uint32(ROWS // slots), SEGMENT_BYTES // 4, ROWS * SEGMENT_BYTES // 4
    ring_at, q_at, full_at, empty_at, steps = uint32(at.ring), at.q // 4, uint32(at.full), uint32(at.empty), SEGMENT_STEPS
    new_moved = lang.local_array(16, u32)
    # Arrivals that value warps make at other slots: they have no use for Q.
    share = uint32(VALUE_WARPS // WARPS)

    @lang.device
    def take(q, base, number, w, lane):
        for i in range(slots):
            # Q, copied by the producers, has landed.
            wait(uint32(base + full_at + (place_of(uint32(number + uint32(i))) << uint32(3))), phase_of(uint32(number + uint32(i))))
        first = uint32(w * uint32(16))
        slot, row = first // slot_rows, first % slot_rows
        start = uint32(ring_at + place_of(uint32(number + slot)) * size)
        lane_at = uint32(base + start + row_offset(uint32(row + (lane & uint32(15))), lane >> uint32(4)))
        for s in range(held):
            unroll()
            for k in range(steps):
                unroll()
                # The swizzle makes step k of a segment the same address with bits 5 and 6 XOR k.
                x = ldmatrix(uint32((lane_at ^ uint32(k << 5)) + uint32(s * segment)))
                for i in range(4):
                    unroll()
                    q[(s * steps + k) * 4 + i] = x[i]
        words = shared(uint32(0), u32)
        for s in range(held, segments):
            # Rows stay where they are modulo 8, so the swizzle stays.
            source = uint32((start + row * uint32(SEGMENT_BYTES) + uint32(s * segment)) >> uint32(2)) + lane
            target = uint32(q_at + (s - held) * all_row_words) + first * uint32(row_words) + lane
            # All at once: the compiler would not move a load before the store that it cannot tell apart.
            moved = new_moved()
            for i in range(16):
                unroll()
                moved[i] = words[source + uint32(i * row_words)]
            for i in range(16):
                unroll()
                words[target + uint32(i * row_words)] = moved[i]
        # All lanes have read their part of Q; and, before this piece, the cursor that is put down anew.
        warp_sync()
        if lane == uint32(0):
            for i in range(slots):
                arrive_for(uint32(base + empty_at + (place_of(uint32(number + uint32(i))) << uint32(3))), share)

    return take


def _products(lang: Any, config: WgmmaConfig) -> tuple[Callable, ...]:
    """(start, begin, end): start(address) of an operand; begin(scores, q, ...): 64 rows times the keys of a step, over all of row_dim, but for what
    end(scores) waits for."""
    uint32, unroll, keys, dtype = lang.uint32, lang.unroll, config.tile.keys, config.shape.dtype
    held, segments, segment = min(config.tile.q_segments, config.segments), config.segments, config.segment_bytes
    from_registers, from_shared = lang.wgmma_rs(keys, dtype, False), lang.wgmma_ss(keys, dtype, False)
    fence, set_apart, commit, wait, wait_for_most = (lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_commit, lang.wgmma_wait(0, keys // 2),
                                                     lang.wgmma_wait(1, 0))
    # K-major, 128-byte swizzle: 8 rows are 1024 bytes; a k step is 32 bytes further.
    rows, steps, q_segment = operand(lang, 16, PATTERN_BYTES, 128), SEGMENT_STEPS, ROWS * SEGMENT_BYTES
    start, at = rows.start, rows.at

    @lang.device
    def begin(scores, q, q_rest, k):
        """q_rest: where that part of Q starts which is in shared memory; k: where the step's slot does. Returns when the last segment is left."""
        # The last segment is a group of its own: when the others are done, whoever waits for the tensor cores may line up behind it. The scores of
        # the step before have been read: their registers are overwritten now.
        fence()
        for s in range(held):
            unroll()
            if s == segments - 1:
                set_apart()
            for i in range(steps):
                unroll()
                j = (s * steps + i) * 4
                from_registers(scores, q[j], q[j + 1], q[j + 2], q[j + 3], at(k, uint32((s * segment + 32 * i) >> 4)),
                               uint32(0) if s == 0 and i == 0 else uint32(1))
        for s in range(held, segments):
            unroll()
            if s == segments - 1:
                set_apart()
            for i in range(steps):
                unroll()
                from_shared(scores, at(q_rest, uint32(((s - held) * q_segment + 32 * i) >> 4)), at(k, uint32((s * segment + 32 * i) >> 4)),
                            uint32(1))
        commit()
        wait_for_most()

    return start, begin, wait


def score_role(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """Device function that one score thread runs from start to end."""
    uint32, uint64, int64, float32, unroll = lang.uint32, lang.uint64, lang.int64, lang.float32, lang.unroll
    shared, f32, u32, exp2, opaque, pointer, i64 = lang.shared, lang.f32, lang.u32, lang.ex2_approx_f32, lang.opaque, lang.pointer, lang.i64
    shuffle, any_lane, wait, arrive = lang.shfl_sync_bfly_f32, lang.vote_sync_any, lang.mbarrier_wait(True), lang.mbarrier_arrive
    warp_sync, proxy_fence, score_sync = lang.bar_warp_sync, lang.fence_proxy_async, lang.named_barrier(1, WARPGROUP).sync
    tile, at, fields = config.tile, config.layout, REQUEST_FIELDS
    find, stop_of, units_of, place_of, phase_of = parts.walk.find, parts.walk.stop, parts.walk.units, parts.ring.place, parts.ring.phase
    share_begin, put_down, pick_up, take_queries = parts.share_begin, parts.cursor.put, parts.cursor.get, _queries(lang, config, parts)
    start, begin_products, end_products = _products(lang, config)
    zero_poisoned, masks, softmax = poison_remover(lang, config, parts.swizzle, parts.ring), mask_of(lang, config), softmax_of(lang, config)
    look, poisoned, hide, to_log2, maxima, weigh = masks.look, masks.poisoned, masks.hide, softmax.to_log2, softmax.maxima, softmax.weigh
    add_rounded = softmax.add_rounded
    keys, chunks, q_slots, delayed = tile.keys, tile.keys // 8, tile.q_slots, tile.delayed > 0
    new_q, new_scores, new_weights = (lang.local_array(16 * min(tile.q_segments, config.segments), u32), lang.local_array(keys // 2, f32),
                                      lang.local_array(keys // 4, u32))
    new_rows, new_seen = lang.local_array(2, f32), lang.local_array(2 * seen_words(config), u32)
    size, growth, log2e, minus_infinity = uint32(block_bytes(config)), float32(GROWTH), float32(LOG2_E), float32(-float("inf"))
    ring_at, q_at, cursors_at = uint32(at.ring), uint32(at.q), uint32(at.cursors // 4)
    full_at, ready_at, scored_at = uint32(at.full), uint32(at.ready), uint32(at.scored)
    alpha_at, totals_at, rounded_at, references_at, flags_at, poison_at = (
        uint32(x // 4) for x in (at.alpha, at.totals, at.rounded, at.references, at.flags, at.poison))
    weights_at, weights_size = (uint32(x // 4) for x in config.weights)

    @lang.device
    def move_peaks(step_peak, peak, total, rounded, alpha):
        """The peaks follow where a row outgrew them, and the sums the peaks. 1 if the output has to be rescaled."""
        grew = uint32(0)
        for i in range(2):
            unroll()
            alpha[i] = float32(1)
            if step_peak[i] > peak[i] + growth:
                alpha[i] = exp2(peak[i] - step_peak[i])
                # What was seen at -inf weighs nothing: there is no output to rescale yet.
                grew = uint32(1) if peak[i] > minus_infinity else grew
                peak[i], total[i], rounded[i] = step_peak[i], total[i] * alpha[i], rounded[i] * alpha[i]
        return any_lane(grew)

    @lang.device
    def hand_over_weights(weights, alpha, grew, place, w, lane):
        """Weights, factors and flag of this warp to shared memory. Weights in core matrices of 8 rows x 16 bytes, one after the other along the
        keys: what a warp writes at once is 128 bytes in a row."""
        words, floats = shared(uint32(0), u32), shared(uint32(0), f32)
        word = uint32(weights_at + place * weights_size + w * uint32(2 * chunks * 32) + lane)
        for i in range(2):
            unroll()
            for n in range(chunks):
                unroll()
                words[word + uint32((i * chunks + n) * 32)] = weights[2 * n + i]
            if (lane & uint32(3)) == uint32(0):
                floats[alpha_at + place * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2)) + uint32(8 * i)] = alpha[i]
        if lane == uint32(0):
            words[flags_at + place * uint32(WARPS) + w] = grew

    @lang.device
    def hand_over_sums(total, rounded, peak, piece, w, lane):
        """At the last step of a piece: sums of the weights, exact and as rounded, and the peaks that they are measured from."""
        floats = shared(uint32(0), f32)
        for i in range(2):
            unroll()
            x = total[i] + shuffle(total[i], uint32(1))
            x = x + shuffle(x, uint32(2))
            if (lane & uint32(3)) == uint32(0):
                row = uint32((piece % uint32(SUM_PLACES)) * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2)) + uint32(8 * i))
                floats[totals_at + row], floats[rounded_at + row], floats[references_at + row] = x, rounded[i], peak[i]

    @lang.device
    def score(base, t, ctas, p, requests_address, row_heads, visibility, words, sm_scale, logit_cap):
        w, lane, marks = t >> uint32(5), t & uint32(31), shared(uint32(0), u32)
        q, scores, weights, seen = new_q(), new_scores(), new_weights(), new_seen()
        peak, step_peak, alpha, total, rounded = new_rows(), new_rows(), new_rows(), new_rows(), new_rows()
        scale, piece, number, q_rest = float32(sm_scale * log2e), uint32(0), uint32(0), start(uint32(base + q_at))
        (r, tile, unit, left), requests = share_begin(ctas, p, requests_address), pointer(requests_address, i64)
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            count = uint32(stop_of(requests, r, unit, left, row_heads) - unit)
            prefix = uint32(requests[int64(r) * fields + PREFIX])
            take_queries(q, base, number, w, lane)
            number = uint32(number + uint32(q_slots))
            if lane == uint32(0):
                put_down(uint32(cursors_at + w * uint32(CURSOR_WORDS)), r, tile, unit, left, number)
            # Q is where it belongs, the part of every warp: a product belongs to all four.
            score_sync()
            for i in range(2):
                unroll()
                peak[i], total[i], rounded[i] = minus_infinity, float32(0), float32(0)
            key0 = uint32(unit * uint32(keys))
            while count != uint32(0):
                masked = uint32(key0 + uint32(keys)) > prefix
                if masked:
                    # Where the request is, is looked up in the few steps that want it: it would live through all the others.
                    r, tile, _, _, _ = pick_up(uint32(cursors_at + w * uint32(CURSOR_WORDS)))
                    table = int64(r) * fields
                    look(seen, key0, uint32(tile * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2))),
                         uint32(uint32(requests[table + Q_LEN]) - uint32(1)), row_heads, uint64(requests[table + Q_BEGIN]), visibility, words,
                         prefix, uint32(requests[table + KV_LEN]), lane)
                place = place_of(number)
                k = start(uint32(base + ring_at + place * size))
                # The step's keys, copied by the producers, have landed; products read them, and Q, by the other proxy.
                wait(uint32(base + full_at + (place << uint32(3))), phase_of(number))
                proxy_fence()
                begin_products(scores, q, q_rest, k)
                # Worked out again: what is known before the products takes registers from Q.
                here = opaque(t)
                w, lane, place = here >> uint32(5), here & uint32(31), place_of(opaque(number))
                if delayed and lane == uint32(0):
                    # All but the last products of this warp are done: value warps that wait for it may use the tensor cores after those.
                    arrive(uint32(base + scored_at + (place << uint32(3))))
                end_products(scores)
                if masked:
                    met = any_lane(poisoned(scores, seen))
                    if lane == uint32(0):
                        marks[poison_at + w] = met
                    # The score warps have read the step's keys, and each has said whether it met a hidden score that is not finite. They say so
                    # again after the barrier below.
                    score_sync()
                    found = marks[poison_at] | marks[poison_at + uint32(1)] | marks[poison_at + uint32(2)] | marks[poison_at + uint32(3)]
                    if found != uint32(0):
                        zero_poisoned(here, number, key0, prefix)
                factor = to_log2(scores, scale, sm_scale, logit_cap)
                if masked:
                    factor = hide(scores, seen, factor)
                maxima(step_peak, scores, factor)
                grew = move_peaks(step_peak, peak, total, rounded, alpha)
                weigh(weights, scores, factor, peak, total)
                # All score warps have read the step's keys: the weights may take the place of the last of their dims.
                score_sync()
                hand_over_weights(weights, alpha, grew, place, w, lane)
                last = count == uint32(1)
                if last:
                    add_rounded(rounded, weights)
                    hand_over_sums(total, rounded, peak, piece, w, lane)
                # All lanes have written their weights, factors and, at the end of a piece, sums.
                warp_sync()
                if lane == uint32(0):
                    # The value warps may read them, when those of all warps are there.
                    arrive(uint32(base + ready_at + (place << uint32(3))))
                if not last:
                    # After the value warps were told: nobody waits for these products.
                    add_rounded(rounded, weights)
                key0, number, count = uint32(key0 + uint32(keys)), uint32(number + uint32(1)), uint32(count - uint32(1))
            r, tile, unit, left, _ = pick_up(uint32(cursors_at + w * uint32(CURSOR_WORDS)))
            count = uint32(stop_of(requests, r, unit, left, row_heads) - unit)
            unit, left, piece = uint32(unit + count), uint32(left - count), uint32(piece + uint32(1))
            if unit == units_of(requests, r):
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return score
