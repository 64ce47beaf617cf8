"""Score warps of `mma`: S = Q K^T, the mask, the online softmax, and the weights P for the value warps.

    warp w        rows (w % row_warps) * warp_rows ... of the tile, all keys of a step; group w / row_warps takes every groups-th step
    lane l        of every 16 x 8 tile: rows g = l / 4 and g + 8, keys 2 (l % 4) and the next (PTX ISA, "Matrix Fragments for mma.m16n8k16")

While one group is at its softmax another multiplies. The peaks that weights are measured from go from group to group like a baton, in the
order of the steps. Scores are kept in log2 units. A peak moves only when a row outgrows it: the value warps have to rescale 64 x 512 numbers
then; in between weights grow up to GROWN_SUM, which float32 sums do not mind. A step whose keys all rows see (nearly all steps) is a plain one:
it does not look for the rows' largest scores, only whether the sum of a lane's weights, measured from the peaks of before, stays small.

A draft row may hold NaN and yet be hidden from some rows of the tile, whose weight 0 would not save them: 0 * NaN is NaN. So where a
hidden score is not finite, the values of such keys are zeroed in the ring; rows that do see them have a NaN sum, and with it a NaN result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mma_config import ITEMSIZE, MmaConfig, layout
from .mma_mask import mask_of, poison_remover, seen_words
from .mma_products import products_of, queries
from .mma_softmax import GROWN_SUM, GROWTH, softmax_of
from .mma_work import Parts, block_bytes
from .tile import LOG2_E
from .work import CTA_COUNT, CTA_FIELDS, CTA_REQUEST, CTA_TILE, CTA_UNIT, KV_LEN, PREFIX, Q_BEGIN, Q_LEN, REQUEST_FIELDS

#: Words of the score warps' cursor: where the keys of plain steps end, and those of the prefix (see `put_down_keys`).
PLAIN_WORD, PREFIX_WORD = 6, 7


def _telling(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """tell_scored(base, step, row_warp, lane): this warp leaves the tensor cores to value warps that hold back (see mma_value)."""
    uint32, tell, scored_at, place_of = lang.uint32, lang.mbarrier_arrive, config.layout.scored, parts.scored.place
    holds_back, row_warps = config.tile.holds_back, config.tile.row_warps

    @lang.device
    def tell_scored(base, step, row_warp, lane):
        if holds_back and lane == uint32(0):
            tell(uint32(base + uint32(scored_at) + ((place_of(step) * uint32(row_warps) + row_warp) << uint32(3))))

    return tell_scored


def score_role(lang: Any, config: MmaConfig, parts: Parts) -> Callable:
    """Device function that one score thread runs from start to end."""
    uint32, uint64, int64, float32, unroll = lang.uint32, lang.uint64, lang.int64, lang.float32, lang.unroll
    shared, f32, u32, exp2 = lang.shared, lang.f32, lang.u32, lang.ex2_approx_f32
    opaque, any_lane, wait = lang.opaque, lang.vote_sync_any, lang.mbarrier_wait(config.sm_90)
    tile, at, fields = config.tile, layout(config.shape, config.tile), REQUEST_FIELDS
    steps, place, blocks, signal = parts.walk, parts.swizzle, parts.ring, parts.signals
    find, stop_of, units_of, row_offset, weight_offset = steps.find, steps.stop, steps.units, place.row, place.weight
    place_of, full_of, phase_of = blocks.place, parts.full.place, parts.full.phase
    load_queries, zero_poisoned = queries(lang, config, place), poison_remover(lang, config, place, blocks)
    masks, softmax = mask_of(lang, config), softmax_of(lang, config)
    look, poisoned, hide, to_log2, maxima = masks.look, masks.poisoned, masks.hide, softmax.to_log2, softmax.maxima
    weigh, hand_over_sums = softmax.weigh, softmax.hand_over_sums
    new_scores, products = products_of(lang, config)
    score_sync, group_sync, turn_sync, turn_arrive = signal.score_sync, signal.group_sync, signal.turn_sync, signal.turn_arrive
    ready_arrive, free_sync, bar_warp_sync = signal.ready_arrive, signal.free_sync, lang.bar_warp_sync
    tell_scored = _telling(lang, config, parts)
    row_tiles, key_tiles, key_blocks = tile.warp_rows // 16, tile.keys // 8, tile.key_blocks
    rows_here = 2 * row_tiles
    new_rows, new_seen = lang.local_array(rows_here, f32), lang.local_array(rows_here * seen_words(config), u32)
    new_blocks, new_weights = lang.local_array(key_blocks, u32), lang.local_array(row_tiles * key_tiles * 2, u32)
    row_warps, warp_rows, groups, rows, keys = tile.row_warps, uint32(tile.warp_rows), tile.groups, tile.rows, tile.keys
    size, growth, log2e, minus_infinity = uint32(block_bytes(config)), float32(GROWTH), float32(LOG2_E), float32(-float("inf"))
    most, maximum, to_bits, from_bits = float32(GROWN_SUM), lang.max_f32, lang.f32_to_b32, lang.b32_to_f32
    q_at, ring_at, weights_at, full_at = uint32(at.q), uint32(at.ring), uint32(at.weights), uint32(at.full)
    peaks_at, alpha_at, flags_at, poison_at = (uint32(x // 4) for x in (at.peaks, at.alpha, at.flags, at.poison))
    cursor_at, put_down, pick_up = uint32(at.cursors // 4), parts.cursor.put, parts.cursor.get
    weight_bytes, row_words = uint32(rows * keys * ITEMSIZE), 8 * keys * ITEMSIZE // 4

    @lang.device
    def put_down_keys(prefix, logit_cap):
        """Where the keys end that all rows see; those of plain steps are the same, unless scores are capped."""
        words = shared(uint32(0), u32)
        words[cursor_at + uint32(PLAIN_WORD)] = uint32(0) if logit_cap > float32(0) else prefix
        words[cursor_at + uint32(PREFIX_WORD)] = prefix

    @lang.device
    def measure(step_peak, scores, seen, key0, number, scale, sm_scale, logit_cap, requests, row_heads, visibility, words, w, lane, row_warp, group,
                g):
        """What plain steps leave out: the mask, the cap, and the rows' largest scores. Returns the factor of the scores."""
        # Looked up here, in the few steps that want it: it would live through all the others.
        marks = shared(uint32(0), u32)
        prefix = marks[cursor_at + uint32(PREFIX_WORD)]
        masked = uint32(key0 + uint32(keys)) > prefix
        if masked:
            r, tile, _, _, _ = pick_up(cursor_at)
            table = int64(r) * fields
            look(seen, key0, uint32(tile * uint32(rows) + g), uint32(uint32(requests[table + Q_LEN]) - uint32(1)), row_heads,
                 uint64(requests[table + Q_BEGIN]), visibility, words, prefix, uint32(requests[table + KV_LEN]), lane)
            met = any_lane(poisoned(scores, seen))
            if lane == uint32(0):
                marks[poison_at + w] = met
            # The group's warps have read the step's keys, and each has said whether it met a hidden score that is not finite. They say so again
            # after free_sync, which has all of them as well.
            group_sync(group)
            first = uint32(poison_at + group * uint32(row_warps))
            found = marks[first] | marks[first + uint32(row_warps - 1)]
            if found != uint32(0):
                # Opaque: or LLVM works out all its addresses in every step, between the scores and their softmax.
                zero_poisoned(opaque(uint32(row_warp * uint32(32) + lane)), opaque(number), key0, prefix)
        factor = to_log2(scores, scale, sm_scale, logit_cap)
        if masked:
            factor = hide(scores, seen, factor)
        maxima(step_peak, scores, factor)
        return factor

    @lang.device
    def large(exact, weighed):
        """1 where the sum of this lane's weights of a row is too large."""
        found = uint32(0)
        for i in range(rows_here):
            unroll()
            # Both sums: what only a settled step asks for, LLVM would add up there, and not between the exponentials.
            found = uint32(found | (maximum(exact[i], weighed[i]) > most))
        return found

    @lang.device
    def outgrown(found, peak, g):
        """1 where weights measured from `peak` do not do: a sum is large (`found`), or another group has moved the peak. In all lanes or none."""
        floats, before = shared(uint32(0), f32), new_rows()
        for i in range(rows_here):
            unroll()
            before[i] = floats[peaks_at + g + uint32(8 * i)]
        for i in range(rows_here):
            unroll()
            found = uint32(found | (before[i] != peak[i]) | (peak[i] == minus_infinity))
        return any_lane(found)

    @lang.device
    def move_peaks(step_peak, peak, total, rounded, alpha, opening, g, lane):
        """The peaks go on from those of the step before (none if `opening`), and the sums of this group's rows follow. 1 if the output has to be
        rescaled, in all lanes or none."""
        floats, grew = shared(uint32(0), f32), uint32(0)
        for i in range(rows_here):
            unroll()
            before = minus_infinity
            if not opening:
                before = floats[peaks_at + g + uint32(8 * i)]
            moved, factor = before, float32(1)
            if step_peak[i] > before + growth:
                # By way of its bits: the simulator has 64 of them, and peaks are compared with what was stored.
                moved, factor = from_bits(to_bits(step_peak[i])), exp2(before - step_peak[i])
                # What was seen at -inf weighs nothing: there is no output to rescale yet.
                grew = uint32(1) if before > minus_infinity else grew
            # The group's own sums still stand at its last peak; other groups may have raised it since.
            if moved > peak[i]:
                behind = exp2(peak[i] - moved)
                total[i], rounded[i] = total[i] * behind, rounded[i] * behind
            peak[i], alpha[i] = moved, factor
        # All four lanes of a row have read its peak before one of them replaces it.
        bar_warp_sync()
        for i in range(rows_here):
            unroll()
            if (lane & uint32(3)) == uint32(0):
                floats[peaks_at + g + uint32(8 * i)] = peak[i]
        return any_lane(grew)

    @lang.device
    def hand_over_weights(weights, alpha, grew, group, w, g, lane):
        """Weights, factors and flag of this warp to shared memory. Factors in every step: the value warps multiply all rows when one warp says so."""
        words, floats = shared(uint32(0), u32), shared(uint32(0), f32)
        for n in range(key_tiles):
            unroll()
            # Eight rows on, the swizzle is the same: one address and constants.
            word = uint32(weights_at + group * weight_bytes + weight_offset(g, uint32(n)) + ((lane & uint32(3)) << uint32(2))) >> uint32(2)
            for i in range(rows_here):
                unroll()
                words[word + uint32(i * row_words)] = weights[(i // 2 * key_tiles + n) * 2 + i % 2]
        for i in range(rows_here):
            unroll()
            if (lane & uint32(3)) == uint32(0):
                floats[alpha_at + group * uint32(rows) + g + uint32(8 * i)] = alpha[i]
        if lane == uint32(0):
            words[flags_at + w] = grew

    @lang.device
    def score(base, t, ctas, p, requests, q_address, q_row, q_head, row_heads, visibility, words, num_rows, sm_scale, logit_cap):
        w, lane = t >> uint32(5), t & uint32(31)
        row_warp, group = w % uint32(row_warps), w // uint32(row_warps)
        marks = shared(uint32(0), u32)
        # Where this lane's ldmatrix rows are: of Q 16 rows x 16 dims, of K 16 keys x 16 dims.
        a_row, b_key = uint32(row_warp * warp_rows + (lane & uint32(15))), uint32((lane & uint32(7)) + ((lane >> uint32(4)) << uint32(3)))
        q_lane = uint32(base + q_at + row_offset(a_row, lane >> uint32(4)))
        k_lane, k_at = uint32(base + ring_at + row_offset(b_key, (lane >> uint32(3)) & uint32(1))), new_blocks()
        g = uint32(row_warp * warp_rows + (lane >> uint32(2)))
        scores, peak, step_peak, alpha = new_scores(), new_rows(), new_rows(), new_rows()
        total, rounded, exact, weighed = new_rows(), new_rows(), new_rows(), new_rows()
        weights, seen, scale = new_weights(), new_seen(), float32(sm_scale * log2e)
        cta = p * CTA_FIELDS
        r, tile, unit, left = (uint32(ctas[cta + CTA_REQUEST]), uint32(ctas[cta + CTA_TILE]), uint32(ctas[cta + CTA_UNIT]),
                               uint32(ctas[cta + CTA_COUNT]))
        # Steps of this CTA before the piece at hand: its first is the turn of group done % groups.
        done = uint32(0)
        if left != uint32(0) and group == uint32(groups - 1):
            # Nobody has decided anything yet: the first group may begin.
            turn_arrive(row_warp, group)
        while left != uint32(0):
            r, tile = find(requests, r, tile, row_heads)
            count = uint32(stop_of(requests, r, unit, left, row_heads) - unit)
            last = left == count
            table = int64(r) * fields
            readable, q_begin = uint32(requests[table + Q_LEN]), uint64(requests[table + Q_BEGIN])
            if q_begin + uint64(readable) > uint64(num_rows):
                readable = uint32(uint64(num_rows) - q_begin) if q_begin < uint64(num_rows) else uint32(0)
            # All score warps are done with the Q of the piece before, and have picked up its cursor.
            score_sync()
            # By a copy of t: the addresses of the copies would live through the steps otherwise.
            load_queries(base, opaque(t), uint32(tile * uint32(rows)), row_heads, uint32(readable * row_heads), q_address, q_begin, q_row, q_head)
            if t == uint32(0):
                put_down(cursor_at, r, tile, unit, left, done)
                put_down_keys(uint32(requests[table + PREFIX]), logit_cap)
            # Q, copied by all score threads, is complete before any warp reads it.
            score_sync()
            for i in range(rows_here):
                unroll()
                peak[i], total[i], rounded[i] = minus_infinity, float32(0), float32(0)
            # This group's first step of the piece, as a key and as a block; steps of the piece from there on, other groups' among them.
            mine = uint32((group + uint32(groups) - done % uint32(groups)) % uint32(groups))
            opening = mine == uint32(0)
            key0, number = uint32((unit + mine) * uint32(keys)), uint32((done + mine) * uint32(key_blocks))
            # The group's first step gives it peaks: no plain one.
            ahead, plain_end = uint32(count - mine) if mine < count else uint32(0), uint32(0)
            while ahead != uint32(0):
                for b in range(key_blocks):
                    unroll()
                    block = uint32(number + uint32(b))
                    k_at[b] = uint32(k_lane + place_of(block) * size)
                    # The block's keys, copied by the producers, have landed.
                    wait(uint32(base + full_at + (full_of(block) << uint32(3))), phase_of(block))
                products(scores, q_lane, k_at)
                # Places of this thread, worked out again: what is known before the products takes registers from their fragments.
                here = opaque(t)
                w, lane = here >> uint32(5), here & uint32(31)
                row_warp, group = w % uint32(row_warps), w // uint32(row_warps)
                g = uint32(row_warp * warp_rows + (lane >> uint32(2)))
                tell_scored(base, uint32(number // uint32(key_blocks)), row_warp, lane)
                plain, factor, grew, settled = uint32(key0 + uint32(keys)) <= plain_end, scale, uint32(0), False
                tried = plain
                for i in range(rows_here):
                    unroll()
                    alpha[i] = float32(1)
                while not settled:
                    if not plain:
                        factor = measure(step_peak, scores, seen, key0, number, scale, sm_scale, logit_cap, requests, row_heads, visibility, words,
                                         w, lane, row_warp, group, g)
                        if not tried:
                            # The step before this one has decided its peaks, in another group.
                            turn_sync(row_warp, group)
                        grew, settled = move_peaks(step_peak, peak, total, rounded, alpha, opening, g, lane), True
                        if not last or ahead > uint32(1):
                            # The peaks are decided and written: the group of the next step may go on from them.
                            turn_arrive(row_warp, group)
                    for i in range(rows_here):
                        unroll()
                        exact[i], weighed[i] = float32(0), float32(0)
                    weigh(weights, exact, weighed, scores, factor, peak)
                    if plain:
                        found = opaque(large(exact, weighed))
                        # The step before this one has decided its peaks, in another group.
                        turn_sync(row_warp, group)
                        plain = outgrown(found, peak, g) == uint32(0)
                        settled = plain
                        if settled and (not last or ahead > uint32(1)):
                            # The peaks stay: the group of the next step may go on from them.
                            turn_arrive(row_warp, group)
                opening, plain_end = False, marks[cursor_at + uint32(PLAIN_WORD)]
                for i in range(rows_here):
                    unroll()
                    total[i], rounded[i] = total[i] + exact[i], rounded[i] + weighed[i]
                # The value warps are done with this group's weights, factors and sums of before, which are overwritten now.
                free_sync(group)
                hand_over_weights(weights, alpha, grew, group, w, g, lane)
                if ahead <= uint32(groups):
                    hand_over_sums(total, rounded, peak, uint32(group * uint32(rows) + g), lane)
                # Weights, factors and, at the end of a piece, sums are written: the value warps may read them.
                ready_arrive(base, group)
                ahead = uint32(ahead - uint32(groups)) if ahead > uint32(groups) else uint32(0)
                key0, number = uint32(key0 + uint32(groups * keys)), uint32(number + uint32(groups * key_blocks))
            r, tile, unit, left, done = pick_up(cursor_at)
            count = uint32(stop_of(requests, r, unit, left, row_heads) - unit)
            unit, left, done = uint32(unit + count), uint32(left - count), uint32(done + count)
            if unit == units_of(requests, r):
                tile, unit = uint32(tile + uint32(1)), uint32(0)

    return score
