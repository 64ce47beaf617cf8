// Score warps of mma: S = Q K^T, the mask, the online softmax, and the weights P for the value warps.
//
//     warp w        rows w % ROW_WARPS * WARP_ROWS ... of the tile, all keys of a step; group w / ROW_WARPS takes every GROUPS-th step
//     lane l        of every 16 x 8 tile: rows g = l / 4 and g + 8, keys 2 (l % 4) and the next (see mma in ptx.cuh)
//
// While one group is at its softmax another multiplies. The peaks that weights are measured from go from group to group like a baton, in
// the order of the steps. Scores are kept in log2 units. A peak moves only when a row outgrows it: the value warps have to rescale 64 x 512
// numbers then; in between weights grow up to GROWN_SUM, which float32 sums do not mind. A step whose keys all rows see (nearly all steps) is a
// plain one: it does not look for the rows' largest scores, only whether the sum of a lane's weights, measured from the peaks of before, stays small.
//
// A draft row may hold NaN and yet be hidden from some rows of the tile, whose weight 0 would not save them: 0 * NaN is NaN. So where a
// hidden score is not finite, the values of such keys are zeroed in the ring; rows that do see them have a NaN sum, and with it a NaN
// result.
#pragma once

#include "mma_mask.cuh"
#include "mma_products.cuh"
#include "mma_softmax.cuh"

namespace nvr {
namespace mma {

// Where the score warps are, like Mark; done: steps of this CTA before the piece. prefix, plain_end: where the keys end that all rows see, and of
// those the plain steps (the same, unless scores are capped).
struct ScoreMark {
    Walk walk;
    uint32_t done, prefix, plain_end;
};
static_assert(sizeof(ScoreMark) <= MARK_BYTES, "has room");

template <class C>
__device__ __forceinline__ ScoreMark* score_mark() {
    return reinterpret_cast<ScoreMark*>(shared_array<unsigned char>(C::MARKS));
}

// Whether the sum of this lane's weights of a row is too large.
template <class S>
__device__ __forceinline__ bool is_large(const RowFloats<S>& exact, const RowFloats<S>& weighed) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        // Both sums: what only a settled step asks for would be added up there, and not between the exponentials.
        found |= fmaxf(exact[i], weighed[i]) > GROWN_SUM;
    }
    return found;
}

// Whether weights measured from `peak` do not do: a sum is large (`found`), or another group has moved the peak. In all lanes or none.
// peaks: of the tile, from the lane's first row on.
template <class S>
__device__ __forceinline__ bool is_outgrown(bool found, const RowFloats<S>& peak, const float* peaks) {
    RowFloats<S> before;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) before[i] = peaks[8 * i];
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) found |= before[i] != peak[i] || peak[i] == -INFINITY;
    return __ballot_sync(ALL_LANES, found) != 0;
}

// The peaks go on from those of the step before (none if `opening`), and the sums of this group's rows follow. Nonzero if the output has to be
// rescaled, in all lanes or none. peaks: of the tile, from the lane's first row on.
template <class S>
__device__ __forceinline__ uint32_t move_peaks(const RowFloats<S>& maxima, float* peaks, bool opening, uint32_t lane, RowFloats<S>& peak,
                                               RowFloats<S>& total, RowFloats<S>& rounded, RowFloats<S>& alpha) {
    bool grew = false;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        const float before = opening ? -INFINITY : peaks[8 * i];
        float moved = before;
        alpha[i] = 1.0f;
        if (maxima[i] > before + GROWTH) {
            moved = maxima[i];
            alpha[i] = ptx::ex2_approx_f32(before - moved);
            // What was seen at -inf weighs nothing: there is no output to rescale yet.
            grew |= before > -INFINITY;
        }
        // The group's own sums still stand at its last peak; other groups may have raised it since.
        if (moved > peak[i]) {
            const float behind = ptx::ex2_approx_f32(peak[i] - moved);
            total[i] *= behind;
            rounded[i] *= behind;
        }
        peak[i] = moved;
    }
    // All four lanes of a row have read its peak before one of them replaces it.
    __syncwarp();
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) peaks[8 * i] = peak[i];
    }
    return __ballot_sync(ALL_LANES, grew);
}

// Weights, factors and flag of this warp to shared memory. Factors in every step: the value warps multiply all rows when one warp says so. g: the lane's
// first row in the tile; grew: nonzero in all lanes or in none.
template <class S>
__device__ __forceinline__ void hand_over_weights(const Weights<S>& weights, const RowFloats<S>& alpha, uint32_t grew, uint32_t group, uint32_t w,
                                                  uint32_t g, uint32_t lane) {
#pragma unroll
    for (int n = 0; n < S::KEY_TILES; ++n) {
        // Eight rows on, the swizzle is the same: one address and constants.
        uint32_t* words = shared_array<uint32_t>(S::WEIGHTS + group * S::GROUP_WEIGHT_BYTES + weight_offset<S>(g, n)) + lane % 4;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) words[i * 8 * S::KEYS / 2] = weights[i / 2][n][i % 2];
    }
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) shared_array<float>(S::ALPHA)[group * S::ROWS + g + 8 * i] = alpha[i];
    }
    if (lane == 0) shared_array<uint32_t>(S::FLAGS)[w] = grew;
}

// Where a hidden score is not finite, the group zeroes the values behind it.
template <class S>
__device__ __forceinline__ void clear_poison(Scores<S>& scores, const Seen<S>& seen, uint32_t w, uint32_t lane, uint32_t number, uint32_t key0,
                                             uint32_t prefix) {
    const uint32_t group = w / S::ROW_WARPS, first = group * S::ROW_WARPS;
    uint32_t* poison = shared_array<uint32_t>(S::POISON);
    const uint32_t met = __ballot_sync(ALL_LANES, is_poisoned<S>(scores, seen));
    if (lane == 0) poison[w] = met;
    // The group's warps have read the step's keys, and each has said whether it met a hidden score that is not finite. They say so again after
    // free_sync, which has all of them as well.
    Signals<S>::group_sync(group);
    if ((poison[first] | poison[first + S::ROW_WARPS - 1]) != 0) zero_poisoned<S>(w % S::ROW_WARPS * WARP + lane, number, key0, prefix);
}

// What plain steps leave out: the mask, the cap, and the rows' largest scores. Returns the factor of the scores.
template <class S>
__device__ __forceinline__ float measure(const VerifyParams& params, uint32_t w, uint32_t lane, uint32_t number, uint32_t key0, Scores<S>& scores,
                                         RowFloats<S>& maxima) {
    // Looked up here, in the few steps that want it: it would live through all the others.
    const ScoreMark& mark = *score_mark<S>();
    const uint32_t prefix = mark.prefix, first = mark.walk.tile * S::ROWS + w % S::ROW_WARPS * S::WARP_ROWS + lane / 4;
    const bool masked = key0 + S::KEYS > prefix;
    Seen<S> seen;
    if (masked) {
        look<S>(params.plan, request_of(params.plan, mark.walk), key0, first, lane, seen);
        clear_poison<S>(scores, seen, w, lane, number, key0, prefix);
    }
    float factor = to_log2<S>(params.tensors, scores);
    if (masked) factor = hide<S>(scores, seen, factor);
    find_maxima<S>(scores, factor, maxima);
    return factor;
}

// One score thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void score(const VerifyParams& params, uint32_t base, uint32_t t) {
    using S = ScoreShape<C>;
    using Signal = Signals<C>;
    const Plan& plan = params.plan;
    const uint32_t w = t / WARP, lane = t % WARP, row_warp = w % S::ROW_WARPS, group = w / S::ROW_WARPS;
    // Where this lane's ldmatrix rows are: of Q 16 rows x 16 dims, of K 16 keys x 16 dims.
    const uint32_t q_at = base + S::Q + row_offset<S>(row_warp * S::WARP_ROWS + lane % 16, lane / 16);
    const uint32_t k_lane = base + S::RING + row_offset<S>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t g = row_warp * S::WARP_ROWS + lane / 4;
    float* peaks = shared_array<float>(S::PEAKS);
    Walk walk = begin_walk(plan);
    // Steps of this CTA before the piece at hand: its first is the turn of group done % GROUPS.
    uint32_t done = 0;
    // Nobody has decided anything yet: the first group may begin.
    if (walk.left != 0 && group == S::GROUPS - 1) Signal::turn_arrive(row_warp, group);
    while (walk.left != 0) {
        find_tile<S>(plan, &walk);
        const uint32_t count = piece_length<S>(plan, walk);
        const bool last = count == walk.left;  // piece of the share
        const Request& request = request_of(plan, walk);
        const uint32_t prefix = static_cast<uint32_t>(request.prefix);
        // All score warps are done with the Q of the piece before, and have picked up its mark.
        Signal::score_sync();
        load_queries<S>(params, base, t, request.q_begin, walk.tile * S::ROWS, tokens_there(params, request) * plan.row_heads);
        if (t == 0) *score_mark<S>() = {walk, done, prefix, params.tensors.logit_cap > 0.0f ? 0 : prefix};
        // Q, copied by all score threads, is complete before any warp reads it.
        Signal::score_sync();
        RowFloats<S> peak, total, rounded;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) {
            peak[i] = -INFINITY;
            total[i] = rounded[i] = 0.0f;
        }
        // This group's first step of the piece, as a key and as a block; steps of the piece from there on, other groups' among them.
        const uint32_t mine = (group + S::GROUPS - done % S::GROUPS) % S::GROUPS;
        bool opening = mine == 0;
        uint32_t key0 = (walk.unit + mine) * S::KEYS, number = (done + mine) * S::KEY_BLOCKS;
        // The group's first step gives it peaks: no plain one.
        uint32_t ahead = mine < count ? count - mine : 0, plain_end = 0;
#pragma unroll 1
        while (ahead != 0) {
            uint32_t k_at[S::KEY_BLOCKS];
#pragma unroll
            for (int b = 0; b < S::KEY_BLOCKS; ++b) {
                k_at[b] = k_lane + block_offset<S>(number + b);
                // The block's keys, copied by the producers, have landed.
                ptx::mbarrier_wait(full_at<S>(base, number + b), phase_of<S::FULL_BARRIERS>(number + b));
            }
            Scores<S> scores;
            multiply_keys<S>(q_at, k_at, scores);
            if constexpr (S::HOLDS_BACK) {
                // This warp leaves the tensor cores to the value warps of its quarter of the SM. No data goes with it.
                if (lane == 0) ptx::mbarrier_arrive(scored_at<S>(base, number / S::KEY_BLOCKS, row_warp));
            }
            RowFloats<S> alpha, exact, weighed;
#pragma unroll
            for (int i = 0; i < S::LANE_ROWS; ++i) alpha[i] = 1.0f;
            Weights<S> weights;
            uint32_t grew = 0;
            float factor = params.tensors.sm_scale * LOG2E;
            bool plain = key0 + S::KEYS <= plain_end, settled = false;
            const bool tried = plain;
#pragma unroll 1
            while (!settled) {
                if (!plain) {
                    RowFloats<S> maxima;
                    factor = measure<S>(params, w, lane, number, key0, scores, maxima);
                    // The step before this one has decided its peaks, in another group.
                    if (!tried) Signal::turn_sync(row_warp, group);
                    grew = move_peaks<S>(maxima, peaks + g, opening, lane, peak, total, rounded, alpha);
                    settled = true;
                    // The peaks are decided and written: the group of the next step may go on from them.
                    if (!last || ahead > 1) Signal::turn_arrive(row_warp, group);
                }
#pragma unroll
                for (int i = 0; i < S::LANE_ROWS; ++i) exact[i] = weighed[i] = 0.0f;
                weigh<S>(scores, factor, peak, weights, exact, weighed);
                const bool found = is_large<S>(exact, weighed);
                if (plain) {
                    // The step before this one has decided its peaks, in another group.
                    Signal::turn_sync(row_warp, group);
                    plain = settled = !is_outgrown<S>(found, peak, peaks + g);
                    // The peaks stay: the group of the next step may go on from them.
                    if (settled && (!last || ahead > 1)) Signal::turn_arrive(row_warp, group);
                }
            }
            opening = false;
            plain_end = score_mark<S>()->plain_end;
            add_rows<S>(exact, weighed, total, rounded);
            // The value warps are done with this group's weights, factors and sums of before, which are overwritten now.
            Signal::free_sync(group);
            hand_over_weights<S>(weights, alpha, grew, group, w, g, lane);
            if (ahead <= S::GROUPS) hand_over_sums<S>(total, rounded, peak, group * S::ROWS + g, lane);
            // Weights, factors and, at the end of a piece, sums are written: the value warps may read them.
            Signal::ready_arrive(base, group);
            ahead = ahead > S::GROUPS ? ahead - S::GROUPS : 0;
            key0 += S::GROUPS * S::KEYS;
            number += S::GROUPS * S::KEY_BLOCKS;
        }
        const ScoreMark mark = *score_mark<S>();
        walk = mark.walk;
        const uint32_t length = piece_length<S>(plan, walk);
        done = mark.done + length;
        go_on<S>(plan, length, &walk);
    }
}

}  // namespace mma
}  // namespace nvr
