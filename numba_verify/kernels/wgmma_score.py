"""Score warps of `wgmma`: S = Q K^T, the mask, the online softmax, and the weights P for the value warpgroups.

    warp w        rows 16 w ... of the tile, all keys of a step
    lane l        rows g = l / 4 and g + 8 of them; of every 8 keys 2 (l % 4) and the next (PTX ISA, "wgmma.mma_async.m64nNk16", fragment of D)

Q is in registers, as fragments of A, as far as they go. A product then reads nothing but keys from shared memory, half of what it would read
otherwise, and what Q leaves free is a third slot for keys: one is scored while the one before is multiplied and the next is fetched.

The weights of a step have a place of their own or, where there is none, that of the last 64 dims of its keys, which no value is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import WARP
from .mma_config import CURSOR_WORDS, SEGMENT_BYTES
from .mma_mask import mask_of, poison_remover, seen_words
from .mma_softmax import GROWN_SUM, GROWTH, Softmax, softmax_of
from .mma_work import block_bytes
from .tile import LOG2_E
from .wgmma_config import PATTERN_BYTES, ROWS, SEGMENT_STEPS, SUM_PLACES, VALUE_GROUPS, WARPGROUP, WgmmaConfig
from .wgmma_work import Operand, Parts, operand
from .work import KV_LEN, PREFIX, Q_BEGIN, Q_LEN, REQUEST_FIELDS

WARPS = WARPGROUP // WARP
#: Of Q in shared memory: the descriptors of so many segments find room in uniform registers.
MANY_SEGMENTS = 3
#: Words of a score warp's cursor: the number after the piece's last step; that after its last plain one (see `_plain_steps`); and what its first
#: key would be if it began with step 0. They would live through all steps, in registers that Q wants.
END_WORD, PLAIN_WORD, KEY_WORD = 5, 6, 7


def _queries(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """take(...): Q from the slots it came in to registers, and what they cannot hold to its place in shared memory."""
    uint32, unroll, shared, u32 = lang.uint32, lang.unroll, lang.shared, lang.u32
    wait, ldmatrix, arrive_for = lang.mbarrier_wait(True), lang.ldmatrix_x4, lang.mbarrier_arrive_count
    place_of, phase_of, row_offset = parts.ring.place, parts.ring.phase, parts.swizzle.row
    at, size, slots = config.layout, uint32(block_bytes(config)), config.tile.q_slots
    held, segments, segment = min(config.tile.q_segments, config.segments), config.segments, config.segment_bytes
    slot_rows, row_words, all_row_words = uint32(ROWS // slots), SEGMENT_BYTES // 4, ROWS * SEGMENT_BYTES // 4
    ring_at, q_at, full_at, empty_at, steps = uint32(at.ring), at.q // 4, uint32(at.full), uint32(at.empty), SEGMENT_STEPS
    new_moved = lang.local_array(16, u32)
    # What the value threads make at other slots: they have no use for Q.
    arrivals = uint32(VALUE_GROUPS)

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
        # This lane has its part of Q.
        for i in range(slots):
            arrive_for(uint32(base + empty_at + (place_of(uint32(number + uint32(i))) << uint32(3))), arrivals)

    return take


class Products(NamedTuple):
    """S = Q K^T. rows: of Q or keys, an operand. begin(scores, q, ...): 64 rows times the keys of a step, over all of row_dim; wait_for_most():
    until only the last segment is left; end(scores): until the scores are there."""

    rows: Operand
    begin: Callable
    wait_for_most: Callable
    end: Callable


def _products(lang: Any, config: WgmmaConfig) -> Products:
    """Build them in the vocabulary `lang`."""
    uint32, unroll, keys, dtype = lang.uint32, lang.unroll, config.tile.keys, config.shape.dtype
    held, segments, segment = min(config.tile.q_segments, config.segments), config.segments, config.segment_bytes
    from_registers, from_shared = lang.wgmma_rs(keys, dtype, False), lang.wgmma_ss(keys, dtype, False)
    fence, set_apart, commit, wait, wait_for_most = (lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_commit, lang.wgmma_wait(0, keys // 2),
                                                     lang.wgmma_wait(1, 0))
    # K-major, 128-byte swizzle: 8 rows are 1024 bytes; a k step is 32 bytes further.
    rows, steps, q_segment = operand(lang, 16, PATTERN_BYTES, 128), SEGMENT_STEPS, ROWS * SEGMENT_BYTES
    at, uniform, opaque, many = rows.at, rows.uniform, lang.opaque, segments - held > MANY_SEGMENTS

    @lang.device
    def begin(scores, q, q_rest, k):
        """q_rest: where that part of Q starts which is in shared memory; k: where the step's slot does."""
        # The last segment is a group of its own: when the others are done, whoever waits for the tensor cores may line up behind it. The scores of
        # the step before have been read: their registers are overwritten now.
        fence()
        if many:
            # Worked out in every step: otherwise ptxas keeps the descriptors of all of them, in registers that are not there.
            q_rest = uniform(opaque(q_rest))
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

    return Products(rows, begin, wait_for_most, wait)


class Weighing(NamedTuple):
    """Device functions around the step's weights; see `_weighing`."""

    move_peaks: Callable
    hand_over: Callable


def _weighing(lang: Any, config: WgmmaConfig, softmax: Softmax) -> Weighing:
    """Build them in the vocabulary `lang`."""
    uint32, float32, unroll, shared, f32, u32 = lang.uint32, lang.float32, lang.unroll, lang.shared, lang.f32, lang.u32
    exp2, any_lane, maxima = lang.ex2_approx_f32, lang.vote_sync_any, softmax.maxima
    at, chunks, new_rows = config.layout, config.tile.keys // 8, lang.local_array(2, f32)
    growth, minus_infinity = float32(GROWTH), float32(-float("inf"))
    alpha_at, (weights_at, weights_size) = uint32(at.alpha // 4), (uint32(x // 4) for x in config.weights)

    @lang.device
    def move_peaks(scores, factor, peak, total, rounded, place, w, lane):
        """The peaks follow where a row outgrew them, and the sums the peaks. 1 if the output has to be rescaled: by factors that are put in place."""
        floats, step_peak, alpha, grew = shared(uint32(0), f32), new_rows(), float32(1), uint32(0)
        maxima(step_peak, scores, factor)
        for i in range(2):
            unroll()
            alpha = float32(1)
            if step_peak[i] > peak[i] + growth:
                alpha = exp2(peak[i] - step_peak[i])
                # What was seen at -inf weighs nothing: there is no output to rescale yet.
                grew = uint32(1) if peak[i] > minus_infinity else grew
                peak[i], total[i], rounded[i] = step_peak[i], total[i] * alpha, rounded[i] * alpha
            if (lane & uint32(3)) == uint32(0):
                floats[alpha_at + place * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2)) + uint32(8 * i)] = alpha
        return any_lane(grew)

    @lang.device
    def hand_over(weights, place, w, lane):
        """Weights of this warp to shared memory, in core matrices of 8 rows x 16 bytes, one after the other along the keys: what a warp writes at
        once is 128 bytes in a row."""
        words = shared(uint32(0), u32)
        word = uint32(weights_at + place * weights_size + w * uint32(2 * chunks * 32) + lane)
        for i in range(2):
            unroll()
            for n in range(chunks):
                unroll()
                words[word + uint32((i * chunks + n) * 32)] = weights[2 * n + i]

    return Weighing(move_peaks, hand_over)


def _plain_steps(lang: Any, config: WgmmaConfig, parts: Parts, products: Products, weigh: Callable, hand_over: Callable) -> Callable:
    """run(...): steps of a piece whose keys all rows see, without logit_cap: nearly all steps.

    A loop of their own, so that what they do not need does not lie between: each jump over code costs a fetch of instructions, and all else
    waits for the score warps. It does not look for the rows' largest scores either, only whether the sum of a lane's weights stays small. A step
    where it does not ends the loop, with its scores made and nothing else done.
    """
    uint32, float32, opaque, wait, arrive = lang.uint32, lang.float32, lang.opaque, lang.mbarrier_wait(True), lang.mbarrier_arrive
    unroll, shared, u32, f32, test, any_lane = lang.unroll, lang.shared, lang.u32, lang.f32, lang.mbarrier_test, lang.vote_sync_any
    proxy_fence, score_sync = lang.fence_proxy_async, lang.named_barrier(1, WARPGROUP).sync
    rows, begin_products, wait_for_most, end_products = products
    low, uniform = rows.low, rows.uniform
    place_of, phase_of = parts.ring.place, parts.ring.phase
    at, size, delayed, new_rows = config.layout, uint32(block_bytes(config)), config.tile.delayed > 0, lang.local_array(2, f32)
    in_slot, ring_at, full_at, ready_at, scored_at = not config.weights_apart, uint32(at.ring), uint32(at.full), uint32(at.ready), uint32(at.scored)
    flags_at, most, minus_infinity = uint32(at.flags // 4), float32(GROWN_SUM), float32(-float("inf"))

    @lang.device
    def run(end, base, t, number, q, q_rest, scores, weights, peak, total, rounded, scale):
        """Steps `number` to `end`. Returns the step it ended at, and 1 if the scores of that are made."""
        marks, exact, weighed = shared(uint32(0), u32), new_rows(), new_rows()
        place, turn, landed, scored = place_of(number), phase_of(number), uint32(0), uint32(0)
        keys = low(uint32(base + ring_at + place * size))
        while number < end and scored == uint32(0):
            k = uniform(keys)
            # The step's keys, copied by the producers, have landed; products read them, and Q, by the other proxy.
            if landed == uint32(0):
                wait(uint32(base + full_at + (place << uint32(3))), turn)
            proxy_fence()
            begin_products(scores, q, q_rest, k)
            # While the tensor cores are busy: places, worked out again, since what is known before the products takes registers from Q; and those of
            # the next step (a copy stays where it is made).
            here, now, following = opaque(t), place, opaque(uint32(number + uint32(1)))
            w, lane, place, turn = here >> uint32(5), here & uint32(31), opaque(place_of(following)), opaque(phase_of(following))
            keys = opaque(low(uint32(base + ring_at + place * size)))
            wait_for_most()
            if delayed and lane == uint32(0):
                # All but the last products of this warp are done: value warps that wait for it may use the tensor cores after those.
                arrive(uint32(base + scored_at + (now << uint32(3))))
            end_products(scores)
            if in_slot:
                # All score warps have read the step's keys: the weights may take the place of the last of their dims.
                score_sync()
            for i in range(2):
                unroll()
                exact[i], weighed[i] = float32(0), float32(0)
            weigh(weights, exact, weighed, scores, scale, peak)
            hand_over(weights, now, w, lane)
            # Asked early, since the answer takes its time.
            landed, outgrown = test(uint32(base + full_at + (place << uint32(3))), turn), uint32(0)
            for i in range(2):
                unroll()
                if exact[i] > most or peak[i] == minus_infinity:
                    outgrown = uint32(1)
            scored = any_lane(outgrown)
            if scored == uint32(0):
                for i in range(2):
                    unroll()
                    total[i], rounded[i] = total[i] + exact[i], rounded[i] + weighed[i]
                if lane == uint32(0):
                    marks[flags_at + now * uint32(WARPS) + w] = uint32(0)
                # The value warps may read this lane's weights and lane 0's flag, when all lanes have arrived.
                arrive(uint32(base + ready_at + (now << uint32(3))))
                number = following
        return number, scored

    return run


def score_role(lang: Any, config: WgmmaConfig, parts: Parts) -> Callable:
    """Device function that one score thread runs from start to end."""
    uint32, uint64, int64, float32, unroll, opaque = lang.uint32, lang.uint64, lang.int64, lang.float32, lang.unroll, lang.opaque
    shared, f32, u32, pointer, i64, any_lane = lang.shared, lang.f32, lang.u32, lang.pointer, lang.i64, lang.vote_sync_any
    to_bits, from_bits = lang.f32_to_b32, lang.b32_to_f32
    warp_sync, proxy_fence, score_sync = lang.bar_warp_sync, lang.fence_proxy_async, lang.named_barrier(1, WARPGROUP).sync
    wait, arrive, tile, at, fields = lang.mbarrier_wait(True), lang.mbarrier_arrive, config.tile, config.layout, REQUEST_FIELDS
    find, stop_of, units_of, place_of, phase_of = parts.walk.find, parts.walk.stop, parts.walk.units, parts.ring.place, parts.ring.phase
    share_begin, put_down, pick_up, take_queries = parts.share_begin, parts.cursor.put, parts.cursor.get, _queries(lang, config, parts)
    products, masks, softmax = _products(lang, config), mask_of(lang, config), softmax_of(lang, config)
    zero_poisoned, weigh, weighing = poison_remover(lang, config, parts.swizzle, parts.ring), softmax.weigh, _weighing(lang, config, softmax)
    move_peaks, hand_over, hand_over_sums = weighing.move_peaks, weighing.hand_over, softmax.hand_over_sums
    plain_steps = _plain_steps(lang, config, parts, products, weigh, hand_over)
    start, begin_products, wait_for_most, end_products = products.rows.start, products.begin, products.wait_for_most, products.end
    look, poisoned, hide, to_log2 = masks.look, masks.poisoned, masks.hide, softmax.to_log2
    keys, q_slots, delayed = tile.keys, tile.q_slots, tile.delayed > 0
    new_q, new_scores, new_weights = (lang.local_array(16 * min(tile.q_segments, config.segments), u32), lang.local_array(keys // 2, f32),
                                      lang.local_array(keys // 4, u32))
    new_rows, new_seen = lang.local_array(2, f32), lang.local_array(2 * seen_words(config), u32)
    size, log2e, minus_infinity = uint32(block_bytes(config)), float32(LOG2_E), float32(-float("inf"))
    ring_at, q_at, cursors_at = uint32(at.ring), uint32(at.q), uint32(at.cursors // 4)
    full_at, ready_at, scored_at, poison_at, flags_at = (uint32(at.full), uint32(at.ready), uint32(at.scored), uint32(at.poison // 4),
                                                         uint32(at.flags // 4))

    @lang.device
    def cursor_of(w):
        return uint32(cursors_at + w * uint32(CURSOR_WORDS))

    @lang.device
    def put_down_steps(cursor, number, count, key0, prefix, logit_cap):
        """Of a piece whose `count` steps begin with `number`, at key `key0`."""
        marks, last, whole = shared(uint32(0), u32), uint32(count - uint32(1)), uint32(0)
        if key0 < prefix and not logit_cap > float32(0):
            whole = uint32(uint32(prefix - key0) // uint32(keys))
        marks[cursor + uint32(END_WORD)] = uint32(number + count)
        # The last step of a piece has more to do.
        marks[cursor + uint32(PLAIN_WORD)] = uint32(number + (whole if whole < last else last))
        marks[cursor + uint32(KEY_WORD)] = uint32(key0 - number * uint32(keys))

    @lang.device
    def score(base, t, ctas, p, requests_address, row_heads, visibility, words, sm_scale, logit_cap):
        marks, q, scores, weights, seen = shared(uint32(0), u32), new_q(), new_scores(), new_weights(), new_seen()
        peak, total, rounded = new_rows(), new_rows(), new_rows()
        scale, piece, number, q_rest = float32(sm_scale * log2e), uint32(0), uint32(0), start(uint32(base + q_at))
        (r, tile, unit, left), requests = share_begin(ctas, p, requests_address), pointer(requests_address, i64)
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            here, origin = opaque(t), opaque(base)
            w, lane = here >> uint32(5), here & uint32(31)
            # All lanes have picked up the cursor that is put down anew.
            warp_sync()
            if lane == uint32(0):
                put_down(cursor_of(w), r, tile, unit, left, piece)
                put_down_steps(cursor_of(w), uint32(number + uint32(q_slots)), uint32(stop_of(requests, r, unit, left, row_heads) - unit),
                               uint32(unit * uint32(keys)), uint32(requests[int64(r) * fields + PREFIX]),
                               from_bits(opaque(to_bits(logit_cap))))
            take_queries(q, origin, number, w, lane)
            number = uint32(number + uint32(q_slots))
            # Q is where it belongs, the part of every warp: a product belongs to all four. And the cursor is there.
            score_sync()
            for i in range(2):
                unroll()
                peak[i], total[i], rounded[i] = minus_infinity, float32(0), float32(0)
            # The first step gives the peaks: no plain one.
            more, end = True, number
            while more:
                number, scored = plain_steps(end, base, t, number, q, q_rest, scores, weights, peak, total, rounded, scale)
                here, place = opaque(t), place_of(number)
                w, lane, cursor = here >> uint32(5), here & uint32(31), cursor_of(here >> uint32(5))
                r, tile, _, _, _ = pick_up(cursor)
                table, key0 = int64(r) * fields, uint32(marks[cursor + uint32(KEY_WORD)] + number * uint32(keys))
                masked = uint32(key0 + uint32(keys)) > uint32(requests[table + PREFIX])
                if scored == uint32(0):
                    if masked:
                        look(seen, key0, uint32(tile * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2))),
                             uint32(uint32(requests[table + Q_LEN]) - uint32(1)), row_heads, uint64(requests[table + Q_BEGIN]), visibility, words,
                             uint32(requests[table + PREFIX]), uint32(requests[table + KV_LEN]), lane)
                    # As in `plain_steps`; what is said there goes for here.
                    k = start(uint32(base + ring_at + place * size))
                    wait(uint32(base + full_at + (place << uint32(3))), phase_of(number))
                    proxy_fence()
                    begin_products(scores, q, q_rest, k)
                    here, place = opaque(t), place_of(opaque(number))
                    w, lane, cursor = here >> uint32(5), here & uint32(31), cursor_of(here >> uint32(5))
                    wait_for_most()
                    if delayed and lane == uint32(0):
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
                        r, _, _, _, _ = pick_up(cursor)
                        zero_poisoned(here, number, uint32(marks[cursor + uint32(KEY_WORD)] + number * uint32(keys)),
                                      uint32(requests[int64(r) * fields + PREFIX]))
                factor = to_log2(scores, scale, sm_scale, logit_cap)
                if masked:
                    factor = hide(scores, seen, factor)
                grew = move_peaks(scores, factor, peak, total, rounded, place, w, lane)
                if lane == uint32(0):
                    marks[flags_at + place * uint32(WARPS) + w] = grew
                if scored == uint32(0):
                    # Otherwise it is said; and other warps, whose weights stayed small, may be at the next step.
                    score_sync()
                weigh(weights, total, rounded, scores, factor, peak)
                hand_over(weights, place, w, lane)
                number = uint32(number + uint32(1))
                more, end = number != marks[cursor + uint32(END_WORD)], marks[cursor + uint32(PLAIN_WORD)]
                if not more:
                    _, _, _, _, piece = pick_up(cursor)
                    row = uint32((piece % uint32(SUM_PLACES)) * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2)))
                    hand_over_sums(total, rounded, peak, row, lane)
                # This lane has written its weights, factors and, at the end of a piece, sums.
                arrive(uint32(base + ready_at + (place << uint32(3))))
            r, tile, unit, left, piece = pick_up(cursor_of(opaque(t) >> uint32(5)))
            count = uint32(stop_of(requests, r, unit, left, row_heads) - unit)
            unit, left, piece = uint32(unit + count), uint32(left - count), uint32(piece + uint32(1))
            if unit == units_of(requests, r):
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return score
