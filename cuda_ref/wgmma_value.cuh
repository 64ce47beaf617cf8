// Value warpgroups of wgmma: O += P V in registers.
//
//     warpgroup v   all 64 rows of the tile, columns v * latent / 2 ...
//     warp w of it  rows 16 w ...; lane l: rows g = l / 4 and g + 8 of them, of every 8 columns 2 (l % 4) and the next
//
// V is the latent part of the very rows that the scores were made of, read along the other dimension (MN-major).
#pragma once

#include "mma_write.cuh"
#include "wgmma_work.cuh"

namespace nvr {
namespace wgmma {

// What a value warpgroup works on, and how a lane's share of it is laid out.
template <class C>
struct ValueShape : C {
    static constexpr int COLUMNS = C::latent / VALUE_GROUPS;
    static constexpr int ROW_TILES = 1, COLUMN_TILES = COLUMNS / 8, LANE_ROWS = 2;
    // Columns of one product: 256 take more registers than ptxas allows a kernel that starts with 128 a thread, whatever they are raised to later.
    static constexpr int WIDTH = COLUMNS < 128 ? COLUMNS : 128;
    static constexpr int PRODUCTS = COLUMNS / WIDTH, FRAGMENT = WIDTH / 2;
    static_assert(COLUMNS % WIDTH == 0 && WIDTH % SEGMENT_DIMS == 0, "whole segments");
};

// Weights: core matrices of 8 rows x 8 keys, 128 bytes each, one after the other along the keys.
template <class V>
using WeightRows = Operand<128, V::KEYS / 8 * 128, 0>;

// Values: MN-major, 64 columns are a segment of the slot, 8 keys are 1024 bytes.
template <class V>
using ValueColumns = Operand<V::SEGMENT_PITCH, PATTERN_BYTES, 128>;

// Begins output += P V for the keys of a step. values: from the warpgroup's first column on.
template <class V>
__device__ __forceinline__ void begin_step(const WeightRows<V>& weights, const ValueColumns<V>& values, Output<V>& output) {
    // The output was cleared or rescaled.
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < V::KEYS / 16; ++k) {
#pragma unroll
        for (int n = 0; n < V::PRODUCTS; ++n) {
            const uint64_t columns = values.at(k * 2 * PATTERN_BYTES + n * (V::WIDTH / SEGMENT_DIMS) * V::SEGMENT_PITCH);
            ptx::wgmma_ss<true, typename V::Element>(output[n], weights.at(k * 2 * 128), columns, true);
        }
    }
    ptx::wgmma_commit();
}

template <class V>
__device__ __forceinline__ void end_step(Output<V>& output) {
#pragma unroll
    for (int n = 0; n < V::PRODUCTS; ++n) ptx::wgmma_wait<0>(output[n]);
}

template <class V>
__device__ __forceinline__ void release(uint32_t base, uint32_t place) {
    // This thread has read what it wants of the slot's factors and sums, and its weights and values are multiplied: it may be filled again.
    ptx::mbarrier_arrive(barrier_at<V::EMPTY>(base, place));
}

// One value thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void value(const VerifyParams& params, uint32_t base, uint32_t t) {
    using V = ValueShape<C>;
    const Plan& plan = params.plan;
    // number: of the next slot. parities: bit k is that of the phase of slot k's barrier `ready` that comes next. Q passes through slots without one.
    uint32_t number = 0, piece = 0, parities = 0;
    Walk walk = begin_share(plan);
    while (walk.left != 0) {
        find_tile<V>(plan, &walk);
        const uint32_t end = number + V::Q_SLOTS + piece_length<V>(plan, walk);
        // Picked up after the last step. And so is the partial slot, should one be needed.
        if (t % WARP == 0) *mark_of<V>(SCORE_WARPS + t / WARP) = {walk, number, slot_of_walk<V>(plan, walk)};
        number += V::Q_SLOTS;
        Output<V> output = {};
#pragma unroll 1
        while (number != end) {
            // Worked out in every step: what lives through them takes registers from the output.
            const uint32_t here = opaque(t), lane = here % WARP, part = here / WARPGROUP, w = here / WARP % SCORE_WARPS;
            const bool holds_back = part + V::DELAYED >= VALUE_GROUPS;
            const uint32_t place = place_of<V::SLOTS>(number);
            // The weights of this step, and with them the keys they belong to, are there; products read both by the other proxy.
            ptx::mbarrier_wait(barrier_at<V::READY>(base, place), parities >> place & 1);
            ptx::fence_proxy_async();
            parities ^= 1u << place;
            if (shared_array<uint32_t>(V::FLAGS)[place * SCORE_WARPS + w] != 0) rescale<V>(output, place * V::ROWS + w * 16 + lane / 4);
            const WeightRows<V> weights(base + V::WEIGHTS + place * V::WEIGHTS_PITCH);
            const ValueColumns<V> values(base + V::RING + place * V::BLOCK_BYTES + part * (V::COLUMNS / SEGMENT_DIMS) * V::SEGMENT_PITCH);
            if (holds_back && number + 1 != end) {
                // The next step of the piece is scored first, so that the tensor cores have work while its softmax is made; but only if its keys are
                // there, or they would have none until then. (A step of another piece might wait for the slot that is held here.)
                const uint32_t there = place_of<V::SLOTS>(number + 1);
                if (ptx::mbarrier_test(barrier_at<V::FULL>(base, there), phase_of<V::SLOTS>(number + 1))) {
                    // Its barrier was in the phase before when its slot was ready last, which this warp has seen.
                    ptx::mbarrier_wait(barrier_at<V::SCORED>(base, there), parities >> there & 1);
                }
            }
            begin_step<V>(weights, values, output);
            // Complete since long before `ready` was, and waited for already if the step before held back; but no phase of a barrier should pass without
            // a wait. While the products run, since then it costs nothing. (`ready` has gone on: the parity of before.)
            if (holds_back) ptx::mbarrier_wait(barrier_at<V::SCORED>(base, place), ~parities >> place & 1);
            end_step<V>(output);
            ++number;
            if (number != end) release<V>(base, place);
        }
        // The mark, written by one lane, is there for all.
        __syncwarp();
        const uint32_t here = opaque(t), lane = here % WARP;
        const Mark mark = *mark_of<V>(SCORE_WARPS + here / WARP);
        walk = mark.walk;
        const PieceAtHand at_hand = {0, end - mark.number - V::Q_SLOTS, piece % SUM_PLACES * V::ROWS, walk.tile * V::ROWS};
        const uint32_t row = here / WARP % SCORE_WARPS * 16 + lane / 4, column = here / WARPGROUP * V::COLUMNS + 2 * (lane % 4);
        PieceSums<V> sums;
        read_sums<V>(at_hand, here, row, sums);
        // Only now, with the sums read: see Layout.
        release<V>(base, place_of<V::SLOTS>(end - 1));
        __syncwarp();  // hazard: all lanes have read the mark, which is put down anew for the next piece
        write_piece<V>(params, mark, at_hand, sums, here, row, column, output);
        go_on<V>(plan, at_hand.count, &walk);
        ++piece;
    }
}

}  // namespace wgmma
}  // namespace nvr
