// Score warps of wgmma: S = Q K^T, the mask, the online softmax, and the weights P for the value warpgroups.
//
//     warp w        rows 16 w ... of the tile, all keys of a step
//     lane l        rows g = l / 4 and g + 8 of them; of every 8 keys 2 (l % 4) and the next (see wgmma_ss in wgmma_ptx.cuh)
//
// Q is in registers, as fragments of A, as far as they go. A product then reads nothing but keys from shared memory, half of what it would read
// otherwise, and what Q leaves free is a third slot for keys: one is scored while the one before is multiplied and the next is fetched.
//
// The weights of a step take the place of its last 64 dims, which no value is made of.
#pragma once

#include "mma_mask.cuh"
#include "mma_softmax.cuh"
#include "wgmma_work.cuh"

namespace nvr {
namespace wgmma {

// The part of Q that registers hold: fragments of A, one a k step.
template <class S>
using Queries = uint32_t[S::HELD * SEGMENT_STEPS][4];

// Q from the slots it came in to registers, and what they cannot hold to its place in shared memory. number: of the first of its slots.
template <class S>
__device__ __forceinline__ void take_queries(uint32_t base, uint32_t number, uint32_t w, uint32_t lane, Queries<S>& q) {
    constexpr uint32_t SLOT_ROWS = S::ROWS / S::Q_SLOTS, ROW_WORDS = SEGMENT_BYTES / 4;
#pragma unroll
    for (int i = 0; i < S::Q_SLOTS; ++i) {
        // Q, copied by the producers, has landed.
        ptx::mbarrier_wait(barrier_at<S::FULL>(base, place_of<S::SLOTS>(number + i)), phase_of<S::SLOTS>(number + i));
    }
    const uint32_t first = w * S::WARP_ROWS, row = first % SLOT_ROWS, start = S::RING + block_offset<S>(number + first / SLOT_ROWS);
    const uint32_t lane_at = base + start + row_offset<S>(row + lane % 16, lane / 16);
#pragma unroll
    for (int s = 0; s < S::HELD; ++s) {
#pragma unroll
        // The swizzle makes step k of a segment the same address with bits 5 and 6 XOR k.
        for (int k = 0; k < SEGMENT_STEPS; ++k) ptx::ldmatrix_x4(q[s * SEGMENT_STEPS + k], (lane_at ^ k << 5) + s * S::SEGMENT_PITCH);
    }
#pragma unroll 1
    for (int s = S::HELD; s < S::SEGMENTS; ++s) {
        // Rows stay where they are modulo 8, so the swizzle stays.
        const uint32_t* source = shared_array<uint32_t>(start + s * S::SEGMENT_PITCH + row * S::ROW_PITCH) + lane;
        uint32_t* target = shared_array<uint32_t>(S::Q + ((s - S::HELD) * S::ROWS + first) * SEGMENT_BYTES) + lane;
        // All at once: the compiler would not move a load before the store that it cannot tell apart.
        uint32_t moved[S::WARP_ROWS];
#pragma unroll
        for (int i = 0; i < S::WARP_ROWS; ++i) moved[i] = source[i * ROW_WORDS];
#pragma unroll
        for (int i = 0; i < S::WARP_ROWS; ++i) target[i * ROW_WORDS] = moved[i];
    }
    // All lanes have read their part of Q; and, before this piece, the mark that is put down anew.
    __syncwarp();
    if (lane != 0) return;
    // Arrivals that value warps make at other slots: they have no use for Q.
    for (int i = 0; i < S::Q_SLOTS; ++i) {
        ptx::mbarrier_arrive_count(barrier_at<S::EMPTY>(base, place_of<S::SLOTS>(number + i)), VALUE_WARPS / SCORE_WARPS);
    }
}

// Rows of Q or keys. K-major, 128-byte swizzle: 8 rows are 1024 bytes; a k step is 32 bytes further.
using Rows = Operand<16, PATTERN_BYTES, 128>;

// scores = 64 rows times the keys of a step, over all of a row's dims, but for what wgmma_wait<0>(scores) waits for. q_rest: where that part of Q
// starts which is in shared memory; k: where the step's slot does. Returns when the last segment is left.
template <class S>
__device__ __forceinline__ void begin_products(const Queries<S>& q, const Rows& q_rest, const Rows& k, Scores<S>& scores) {
    // The last segment is a group of its own: when the others are done, whoever waits for the tensor cores may line up behind it. The scores of
    // the step before have been read: their registers are overwritten now.
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::SEGMENTS; ++s) {
        if (s == S::SEGMENTS - 1) ptx::wgmma_commit();
#pragma unroll
        for (int i = 0; i < SEGMENT_STEPS; ++i) {
            const uint64_t keys = k.at(s * S::SEGMENT_PITCH + 32 * i);
            if (s < S::HELD) {
                ptx::wgmma_rs<false, typename S::Element>(scores, q[s * SEGMENT_STEPS + i], keys, s != 0 || i != 0);
            } else {
                const uint64_t queries = q_rest.at((s - S::HELD) * S::ROWS * SEGMENT_BYTES + 32 * i);
                ptx::wgmma_ss<false, typename S::Element>(scores, queries, keys, true);
            }
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
}

// The peaks follow where a row outgrew them, and the sums the peaks. Whether a lane's output has to be rescaled.
template <class S>
__device__ __forceinline__ bool move_peaks(const RowFloats<S>& maxima, RowFloats<S>& peak, RowFloats<S>& total, RowFloats<S>& rounded,
                                           RowFloats<S>& alpha) {
    bool grew = false;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        alpha[i] = 1.0f;
        if (maxima[i] > peak[i] + GROWTH) {
            alpha[i] = ptx::ex2_approx_f32(peak[i] - maxima[i]);
            // What was seen at -inf weighs nothing: there is no output to rescale yet.
            grew |= peak[i] > -INFINITY;
            peak[i] = maxima[i];
            total[i] *= alpha[i];
            rounded[i] *= alpha[i];
        }
    }
    return grew;
}

// Weights, factors and flag of this warp to shared memory. Weights in core matrices of 8 rows x 16 bytes, one after the other along the keys: what
// a warp writes at once is 128 bytes in a row. grew: nonzero in all lanes or in none.
template <class S>
__device__ __forceinline__ void hand_over_weights(const Weights<S>& weights, const RowFloats<S>& alpha, uint32_t grew, uint32_t place, uint32_t w,
                                                  uint32_t lane) {
    uint32_t* words = shared_array<uint32_t>(S::WEIGHTS + place * S::WEIGHTS_PITCH) + w * (2 * S::KEY_TILES * WARP) + lane;
    float* factors = shared_array<float>(S::ALPHA) + place * S::ROWS + w * S::WARP_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) words[(i * S::KEY_TILES + n) * WARP] = weights[0][n][i];
        if (lane % 4 == 0) factors[8 * i] = alpha[i];
    }
    if (lane == 0) shared_array<uint32_t>(S::FLAGS)[place * SCORE_WARPS + w] = grew;
}

// At the last step of a piece: sums of the weights, exact and as rounded, and the peaks that they are measured from. row: the lane's first.
template <class S>
__device__ __forceinline__ void hand_over_sums(const RowFloats<S>& total, const RowFloats<S>& rounded, const RowFloats<S>& peak, uint32_t piece,
                                               uint32_t row, uint32_t lane) {
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        float x = total[i] + __shfl_xor_sync(ALL_LANES, total[i], 1);
        x += __shfl_xor_sync(ALL_LANES, x, 2);
        if (lane % 4 == 0) {
            const uint32_t at = piece % SUM_PLACES * S::ROWS + row + 8 * i;
            shared_array<float>(S::TOTALS)[at] = x;
            shared_array<float>(S::ROUNDED)[at] = rounded[i];
            shared_array<float>(S::REFERENCES)[at] = peak[i];
        }
    }
}

// Where a hidden score is not finite, the score warps zero the values behind it.
template <class S>
__device__ __forceinline__ void clear_poison(Scores<S>& scores, const Seen<S>& seen, uint32_t w, uint32_t lane, uint32_t number, uint32_t key0,
                                             uint32_t prefix) {
    uint32_t* poison = shared_array<uint32_t>(S::POISON);
    const uint32_t met = __ballot_sync(ALL_LANES, is_poisoned<S>(scores, seen));
    if (lane == 0) poison[w] = met;
    // The score warps have read the step's keys, and each has said whether it met a hidden score that is not finite. They say so again after the
    // barrier before the weights.
    score_sync();
    if ((poison[0] | poison[1] | poison[2] | poison[3]) != 0) zero_poisoned<S>(w * WARP + lane, number, key0, prefix);
}

// One score thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void score(const VerifyParams& params, uint32_t base, uint32_t t) {
    using S = ScoreShape<C>;
    const Plan& plan = params.plan;
    uint32_t number = 0, piece = 0;  // number: of the next slot
    const Rows q_rest(base + S::Q);
    Walk walk = begin_share(plan);
    while (walk.left != 0) {
        find_tile<S>(plan, &walk);
        uint32_t count = piece_length<S>(plan, walk);
        const uint32_t prefix = static_cast<uint32_t>(request_of(plan, walk).prefix);
        Queries<S> q;
        take_queries<S>(base, number, t / WARP, t % WARP, q);
        number += S::Q_SLOTS;
        if (t % WARP == 0) *mark_of<S>(t / WARP) = {walk, number, 0};
        // Q is where it belongs, the part of every warp: a product belongs to all four.
        score_sync();
        RowFloats<S> peak, total, rounded;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) {
            peak[i] = -INFINITY;
            total[i] = rounded[i] = 0.0f;
        }
        uint32_t key0 = walk.unit * S::KEYS;
#pragma unroll 1
        for (; count != 0; --count) {
            const bool masked = key0 + S::KEYS > prefix;
            Seen<S> seen;
            if (masked) {
                // Where the request is, is looked up in the few steps that want it: it would live through all the others.
                const Walk at = mark_of<S>(t / WARP)->walk;
                look<S>(plan, request_of(plan, at), key0, at.tile * S::ROWS + t / WARP * S::WARP_ROWS + t % WARP / 4, t % WARP, seen);
            }
            const uint32_t slot = place_of<S::SLOTS>(number);
            const Rows k(base + S::RING + slot * S::BLOCK_BYTES);
            // The step's keys, copied by the producers, have landed; products read them, and Q, by the other proxy.
            ptx::mbarrier_wait(barrier_at<S::FULL>(base, slot), phase_of<S::SLOTS>(number));
            ptx::fence_proxy_async();
            Scores<S> scores;
            begin_products<S>(q, q_rest, k, scores);
            // Worked out again: what is known before the products takes registers from Q.
            const uint32_t here = opaque(t), w = here / WARP, lane = here % WARP, place = place_of<S::SLOTS>(opaque(number));
            // All but the last products of this warp are done: value warps that wait for it may use the tensor cores after those.
            if (S::DELAYED > 0 && lane == 0) ptx::mbarrier_arrive(barrier_at<S::SCORED>(base, place));
            ptx::wgmma_wait<0>(scores);
            if (masked) clear_poison<S>(scores, seen, w, lane, number, key0, prefix);
            float factor = to_log2<S>(params.tensors, scores);
            if (masked) factor = hide<S>(scores, seen, factor);
            RowFloats<S> maxima, alpha;
            find_maxima<S>(scores, factor, maxima);
            const uint32_t grew = __ballot_sync(ALL_LANES, move_peaks<S>(maxima, peak, total, rounded, alpha));
            Weights<S> weights;
            weigh<S>(scores, factor, peak, total, weights);
            // All score warps have read the step's keys: the weights may take the place of the last of their dims.
            score_sync();
            hand_over_weights<S>(weights, alpha, grew, place, w, lane);
            const bool last = count == 1;
            if (last) {
                add_rounded<S>(weights, rounded);
                hand_over_sums<S>(total, rounded, peak, piece, w * S::WARP_ROWS + lane / 4, lane);
            }
            // All lanes have written their weights, factors and, at the end of a piece, sums.
            __syncwarp();
            // The value warps may read them, when those of all warps are there.
            if (lane == 0) ptx::mbarrier_arrive(barrier_at<S::READY>(base, place));
            // After the value warps were told: nobody waits for these products.
            if (!last) add_rounded<S>(weights, rounded);
            key0 += S::KEYS;
            ++number;
        }
        walk = mark_of<S>(t / WARP)->walk;
        go_on<S>(plan, piece_length<S>(plan, walk), &walk);
        ++piece;
    }
}

}  // namespace wgmma
}  // namespace nvr
