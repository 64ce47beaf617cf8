// Score warps of wgmma: S = Q K^T, the mask, the online softmax, and the weights P for the value warpgroups.
//
//     warp w        rows 16 w ... of the tile, all keys of a step
//     lane l        rows g = l / 4 and g + 8 of them; of every 8 keys 2 (l % 4) and the next (see wgmma_ss in wgmma_ptx.cuh)
//
// Q is in registers, as fragments of A, as far as they go. A product then reads nothing but keys from shared memory, half of what it would read
// otherwise, and what Q leaves free is a third slot for keys: one is scored while the one before is multiplied and the next is fetched.
//
// The weights of a step have a place of their own or, where there is none, that of the last 64 dims of its keys, which no value is made of.
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
    // This lane has its part of Q. The arrivals that value threads make at other slots: they have no use for Q.
    for (int i = 0; i < S::Q_SLOTS; ++i) {
        ptx::mbarrier_arrive_count(barrier_at<S::EMPTY>(base, place_of<S::SLOTS>(number + i)), VALUE_GROUPS);
    }
}

// Rows of Q or keys. K-major, 128-byte swizzle: 8 rows are 1024 bytes; a k step is 32 bytes further.
using Rows = Operand<16, PATTERN_BYTES, 128>;

// Begins scores = 64 rows times the keys of a step, over all of a row's dims. After wgmma_wait<1> the last segment is left, after
// wgmma_wait<0>(scores) the scores are there. q_rest: where that part of Q starts which is in shared memory; k: where the step's slot does.
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
}

// Where a score warp is, like Mark; piece: a count. end: the number after the piece's last step; plain_end: that after its last plain one (see
// plain_steps); first_key: what its first key would be if it began with step 0. They would live through all steps, in registers that Q wants.
struct ScoreMark {
    Walk walk;
    uint32_t piece, end, plain_end, first_key;
};
static_assert(sizeof(ScoreMark) <= MARK_BYTES, "has room");

template <class C>
__device__ __forceinline__ ScoreMark* score_mark_of(uint32_t w) {
    return reinterpret_cast<ScoreMark*>(mark_of<C>(w));
}

// The peaks follow where a row outgrew them, and the sums the peaks. Whether the warp's output has to be rescaled: by factors that are put in place.
template <class S>
__device__ __forceinline__ uint32_t move_peaks(Scores<S>& scores, float factor, RowFloats<S>& peak, RowFloats<S>& total, RowFloats<S>& rounded,
                                               uint32_t place, uint32_t w, uint32_t lane) {
    bool grew = false;
    float* factors = shared_array<float>(S::ALPHA) + place * S::ROWS + w * S::WARP_ROWS + lane / 4;
    RowFloats<S> maxima;
    find_maxima<S>(scores, factor, maxima);
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        float alpha = 1.0f;
        if (maxima[i] > peak[i] + GROWTH) {
            alpha = ptx::ex2_approx_f32(peak[i] - maxima[i]);
            // What was seen at -inf weighs nothing: there is no output to rescale yet.
            grew |= peak[i] > -INFINITY;
            peak[i] = maxima[i];
            total[i] *= alpha;
            rounded[i] *= alpha;
        }
        if (lane % 4 == 0) factors[8 * i] = alpha;
    }
    return __ballot_sync(ALL_LANES, grew);
}

// Weights of this warp to shared memory, in core matrices of 8 rows x 16 bytes, one after the other along the keys: what a warp writes at once is
// 128 bytes in a row.
template <class S>
__device__ __forceinline__ void hand_over_weights(const Weights<S>& weights, uint32_t place, uint32_t w, uint32_t lane) {
    uint32_t* words = shared_array<uint32_t>(S::WEIGHTS + place * S::WEIGHTS_PITCH) + w * (2 * S::KEY_TILES * WARP) + lane;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) words[(i * S::KEY_TILES + n) * WARP] = weights[0][n][i];
    }
}

// grew: nonzero in all lanes or in none.
template <class S>
__device__ __forceinline__ void hand_over_flag(uint32_t grew, uint32_t place, uint32_t w, uint32_t lane) {
    if (lane == 0) shared_array<uint32_t>(S::FLAGS)[place * SCORE_WARPS + w] = grew;
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

// Begins the step's products. keys: Rows::low of the slot at `place`; turn: parity of its phase; landed: whether the keys are known to be there.
template <class S>
__device__ __forceinline__ void multiply(const Queries<S>& q, const Rows& q_rest, uint32_t keys, uint32_t base, uint32_t place, uint32_t turn,
                                         bool landed, Scores<S>& scores) {
    // The step's keys, copied by the producers, have landed; products read them, and Q, by the other proxy.
    if (!landed) ptx::mbarrier_wait(barrier_at<S::FULL>(base, place), turn);
    ptx::fence_proxy_async();
    begin_products<S>(q, q_rest, Rows::at_low(keys), scores);
}

// Returns when the scores are there.
template <class S>
__device__ __forceinline__ void finish_products(uint32_t base, uint32_t place, uint32_t lane, Scores<S>& scores) {
    ptx::wgmma_wait<1>();
    // All but the last products of this warp are done: value warps that wait for it may use the tensor cores after those.
    if (S::DELAYED > 0 && lane == 0) ptx::mbarrier_arrive(barrier_at<S::SCORED>(base, place));
    ptx::wgmma_wait<0>(scores);
}

// Steps `number` to `end` of a piece, whose keys all rows see, without logit_cap: nearly all steps. Returns
// whether the scores of the step it ended at are made.
//
// A loop of their own, so that what they do not need does not lie between: each jump over code costs a fetch of instructions, and all else waits
// for the score warps. It does not look for the rows' largest scores either, only whether the sum of a lane's weights stays small. A step where
// it does not ends the loop, with its scores made and nothing else done.
template <class S>
__device__ __forceinline__ bool plain_steps(uint32_t end, uint32_t base, uint32_t t, uint32_t& number, const Queries<S>& q, const Rows& q_rest,
                                            Scores<S>& scores, float scale, const RowFloats<S>& peak, RowFloats<S>& total, RowFloats<S>& rounded) {
    uint32_t place = place_of<S::SLOTS>(number), turn = phase_of<S::SLOTS>(number), keys = Rows::low(base + S::RING + place * S::BLOCK_BYTES);
    bool landed = false;
#pragma unroll 1
    while (number < end) {
        multiply<S>(q, q_rest, keys, base, place, turn, landed, scores);
        // While the tensor cores are busy: places, worked out again, since what is known before the products takes registers from Q; and those of the
        // next step (a copy stays where it is made).
        const uint32_t here = opaque(t), w = here / WARP, lane = here % WARP, now = place, following = opaque(number + 1);
        place = opaque(place_of<S::SLOTS>(following));
        turn = opaque(phase_of<S::SLOTS>(following));
        keys = opaque(Rows::low(base + S::RING + place * S::BLOCK_BYTES));
        finish_products<S>(base, now, lane, scores);
        // All score warps have read the step's keys: the weights may take the place of the last of their dims.
        if constexpr (!S::WEIGHTS_APART) score_sync();
        Weights<S> weights;
        RowFloats<S> exact, weighed;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) exact[i] = weighed[i] = 0.0f;
        weigh<S>(scores, scale, peak, weights, exact, weighed);
        hand_over_weights<S>(weights, now, w, lane);
        // Asked early, since the answer takes its time.
        landed = ptx::mbarrier_test(barrier_at<S::FULL>(base, place), turn);
        bool outgrown = false;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) outgrown |= exact[i] > GROWN_SUM || peak[i] == -INFINITY;
        if (__ballot_sync(ALL_LANES, outgrown) != 0) return true;
        add_rows<S>(exact, weighed, total, rounded);
        hand_over_flag<S>(0, now, w, lane);
        // The value warps may read this lane's weights and lane 0's flag, when all lanes have arrived.
        ptx::mbarrier_arrive(barrier_at<S::READY>(base, now));
        number = following;
    }
    return false;
}

// A score warp's mark, of a piece whose steps begin with `number`.
template <class S>
__device__ __forceinline__ ScoreMark piece_mark(const VerifyParams& params, const Walk& walk, uint32_t piece, uint32_t number) {
    const Plan& plan = params.plan;
    const uint32_t count = piece_length<S>(plan, walk), key0 = walk.unit * S::KEYS, prefix = static_cast<uint32_t>(request_of(plan, walk).prefix);
    const uint32_t whole = key0 < prefix && !(params.tensors.logit_cap > 0.0f) ? (prefix - key0) / S::KEYS : 0;
    // The last step of a piece has more to do.
    return {walk, piece, number + count, number + (whole < count ? whole : count - 1), key0 - number * S::KEYS};
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
        // All lanes have picked up the mark that is put down anew.
        __syncwarp();
        const uint32_t thread = opaque(t);
        if (thread % WARP == 0) *score_mark_of<S>(thread / WARP) = piece_mark<S>(params, walk, piece, number + S::Q_SLOTS);
        Queries<S> q;
        take_queries<S>(opaque(base), number, thread / WARP, thread % WARP, q);
        number += S::Q_SLOTS;
        // Q is where it belongs, the part of every warp: a product belongs to all four. And the mark is there.
        score_sync();
        RowFloats<S> peak, total, rounded;
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) {
            peak[i] = -INFINITY;
            total[i] = rounded[i] = 0.0f;
        }
        // The first step gives the peaks: no plain one.
        bool more = true;
        uint32_t plain_end = number;
#pragma unroll 1
        while (more) {
            Scores<S> scores;
            const bool scored = plain_steps<S>(plain_end, base, t, number, q, q_rest, scores, params.tensors.sm_scale * LOG2E, peak, total, rounded);
            const uint32_t before = opaque(t), slot = place_of<S::SLOTS>(number);
            const ScoreMark& at = *score_mark_of<S>(before / WARP);
            const Request& request = request_of(plan, at.walk);
            const uint32_t key0 = at.first_key + number * S::KEYS;
            const bool masked = key0 + S::KEYS > static_cast<uint32_t>(request.prefix);
            Seen<S> seen;
            if (!scored) {
                if (masked) {
                    look<S>(plan, request, key0, at.walk.tile * S::ROWS + before / WARP * S::WARP_ROWS + before % WARP / 4, before % WARP, seen);
                }
                // As in plain_steps; what is said there goes for here.
                multiply<S>(q, q_rest, Rows::low(base + S::RING + slot * S::BLOCK_BYTES), base, slot, phase_of<S::SLOTS>(number), false, scores);
                finish_products<S>(base, slot, opaque(t) % WARP, scores);
            }
            const uint32_t here = opaque(t), w = here / WARP, lane = here % WARP, place = place_of<S::SLOTS>(opaque(number));
            const ScoreMark& mark = *score_mark_of<S>(w);
            if (masked) {
                clear_poison<S>(scores, seen, w, lane, number, mark.first_key + number * S::KEYS,
                                static_cast<uint32_t>(request_of(plan, mark.walk).prefix));
            }
            float factor = to_log2<S>(params.tensors, scores);
            if (masked) factor = hide<S>(scores, seen, factor);
            hand_over_flag<S>(move_peaks<S>(scores, factor, peak, total, rounded, place, w, lane), place, w, lane);
            // If scored it is said; and other warps, whose weights stayed small, may be at the next step.
            if (!scored) score_sync();
            Weights<S> weights;
            weigh<S>(scores, factor, peak, weights, total, rounded);
            hand_over_weights<S>(weights, place, w, lane);
            more = ++number != mark.end;
            plain_end = mark.plain_end;
            if (!more) hand_over_sums<S>(total, rounded, peak, mark.piece % SUM_PLACES * S::ROWS + w * S::WARP_ROWS + lane / 4, lane);
            // This lane has written its weights, factors and, at the end of a piece, sums.
            ptx::mbarrier_arrive(barrier_at<S::READY>(base, place));
        }
        const ScoreMark mark = *score_mark_of<S>(opaque(t) / WARP);
        walk = mark.walk;
        go_on<S>(plan, piece_length<S>(plan, walk), &walk);
        piece = mark.piece + 1;
    }
}

}  // namespace wgmma
}  // namespace nvr
