// Value warps of mma: O += P V in registers.
//
//     warp w        all rows of the tile, columns w * latent / 8 ...
//     lane l        of every 16 x 8 tile of O: rows g = l / 4 and g + 8, columns 2 (l % 4) and the next (see mma in ptx.cuh)
//
// V is the latent part of the very rows that the scores were made of; ldmatrix.trans reads it column by column.
#pragma once

#include "mma_write.cuh"

namespace nvr {
namespace mma {

// What a value warp works on: 16 x 8 tiles of the output, and how a lane's share of them is laid out.
template <class C>
struct ValueShape : C {
    static constexpr int COLUMNS = C::latent / VALUE_WARPS;
    static constexpr int ROW_TILES = C::ROWS / 16, COLUMN_TILES = COLUMNS / 8, PAIRS = COLUMNS / 16;
    static constexpr int LANE_ROWS = 2 * ROW_TILES;  // row i: 8 i after the lane's first
    static constexpr int FRAGMENT = 4;
    static_assert(COLUMNS % 16 == 0, "ldmatrix brings the columns of two tiles");
};

// The weights of all rows and the 16 keys of a block.
template <class V>
__device__ __forceinline__ void load_weights(uint32_t address, uint32_t (&weights)[V::ROW_TILES][4]) {
#pragma unroll
    for (int m = 0; m < V::ROW_TILES; ++m) ptx::ldmatrix_x4(weights[m], address + m * 16 * V::KEYS * ITEM_BYTES);
}

// output += the weights of 16 keys times their values in 16 columns, the c-th of the warp.
template <class V>
__device__ __forceinline__ void multiply_values(const uint32_t (&weights)[V::ROW_TILES][4], const uint32_t (&values)[4], int c, Output<V>& output) {
#pragma unroll
    for (int m = 0; m < V::ROW_TILES; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            TensorCore<typename V::Element>::multiply(output[m * V::COLUMN_TILES + 2 * c + e], weights[m], values[2 * e], values[2 * e + 1]);
        }
    }
}

// output += P V for the keys of a step. number: running number of its first block. values_at: the lane's ldmatrix row in ring block 0; 16
// columns of the warp on it is the same address with bits 5 and 6 XOR 1. weights_at: in this group's weights; a block on it is the same
// with bit 5 XOR 1.
template <class V>
__device__ __forceinline__ void add_step(uint32_t base, uint32_t number, uint32_t values_at, uint32_t weights_at, uint32_t lane,
                                         Output<V>& output) {
    uint32_t weights[V::ROW_TILES][4], values[2][4];
    load_weights<V>(weights_at, weights);
    ptx::ldmatrix_x4_trans(values[0], values_at + block_offset<V>(number));
#pragma unroll
    for (int b = 0; b < V::KEY_BLOCKS; ++b) {
        const uint32_t here = values_at + block_offset<V>(number + b), following = values_at + block_offset<V>(number + b + 1);
#pragma unroll
        for (int c = 0; c < V::PAIRS; ++c) {
            const int i = b * V::PAIRS + c;
            // The next 16 columns are on their way while these are multiplied.
            if (c + 1 < V::PAIRS) {
                ptx::ldmatrix_x4_trans(values[(i + 1) % 2], here ^ (c + 1) << 5);
            } else if (b + 1 < V::KEY_BLOCKS) {
                ptx::ldmatrix_x4_trans(values[(i + 1) % 2], following);
            }
            multiply_values<V>(weights, values[i % 2], c, output);
            if (c == V::PAIRS - 1 && b + 1 < V::KEY_BLOCKS) load_weights<V>(weights_at ^ (b + 1) << 5, weights);
        }
        // This warp has fetched its columns of the block: the producers may refill it.
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty_at<V>(base, number + b));
    }
}

// Value warp `w` may wait with the step (of the CTA, at hand; `end`: of the piece).
//
// The score warp of the same quarter of the SM has the tensor cores first: it is what all wait for. What it is at when a step is ready: of its own
// group's steps, the next product, which may last as long as the ring; of another group's, often a product about to end, after which it is at
// its softmax and leaves the tensor cores alone.
template <class V>
__device__ __forceinline__ void hold_back(uint32_t base, uint32_t w, uint32_t step, uint32_t end) {
    // The warp numbers of both roles begin at a multiple of 4, so the score warp of this quarter has the number w % 4.
    const uint32_t row_warp = w % V::ROW_WARPS, group = w / V::ROW_WARPS % V::GROUPS;
    const uint32_t scored = step % V::GROUPS == group ? step : step + 1;
    // Of its own group's steps too, which are scored since long: no phase of an mbarrier passes without a wait.
    if (scored % V::GROUPS == group && scored != end) {
        ptx::mbarrier_wait(scored_at<V>(base, scored, row_warp), phase_of<V::SCORED_STEPS>(scored));
    }
}

// One value thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void value(const VerifyParams& params, uint32_t base, uint32_t t) {
    using V = ValueShape<C>;
    using Signal = Signals<C>;
    const Plan& plan = params.plan;
    const uint32_t w = t / WARP, lane = t % WARP, g = lane / 4, column = w * V::COLUMNS + 2 * (lane % 4);
    const uint32_t values_at = base + V::RING + row_offset<V>(lane % 16, w * (V::COLUMNS / 8) + lane / 16);
    const uint32_t weights_at = base + V::WEIGHTS + weight_offset<V>(lane % 16, lane / 16);
    const uint32_t* flags = shared_array<uint32_t>(V::FLAGS);
    uint32_t number = 0;  // of the next block
    Walk walk = begin_walk(plan);
    // Nothing has been written yet: the groups that have a step may begin.
    for (uint32_t k = 0; k < V::GROUPS && k < walk.left; ++k) Signal::free_arrive(k);
    while (walk.left != 0) {
        find_tile<V>(plan, &walk);
        const uint32_t end = number + piece_length<V>(plan, walk) * V::KEY_BLOCKS;
        Mark* at = value_mark<V>(w);
        __syncwarp();  // all lanes have picked up the mark of the piece before
        // Picked up after the last step: the lanes have met since, handing back blocks. And so is the partial slot, should one be needed.
        if (lane == 0) *at = {walk, number, slot_of_walk<V>(plan, walk)};
        Output<V> output = {};
#pragma unroll 1
        while (number != end) {
            const uint32_t turn = number / V::KEY_BLOCKS % V::GROUPS;
            // The weights of this step, and with them the keys they belong to, are there.
            Signal::ready_sync(base, number / V::KEY_BLOCKS);
            if constexpr (V::HOLDS_BACK) hold_back<V>(base, w, number / V::KEY_BLOCKS, end / V::KEY_BLOCKS);
            if ((flags[turn * V::ROW_WARPS] | flags[turn * V::ROW_WARPS + V::ROW_WARPS - 1]) != 0) rescale<V>(output, turn * V::ROWS + g);
            add_step<V>(base, number, values_at, weights_at + turn * V::GROUP_WEIGHT_BYTES, lane, output);
            number += V::KEY_BLOCKS;
            // This thread has read weights and factors, and the group has another step in this piece: it may write its next.
            if (end - number >= V::GROUPS * V::KEY_BLOCKS) Signal::free_arrive(turn);
        }
        const Mark mark = *value_mark<V>(w);
        walk = mark.walk;
        const PieceAtHand at_hand = {mark.number / V::KEY_BLOCKS % V::GROUPS, (end - mark.number) / V::KEY_BLOCKS, 0, walk.tile * V::ROWS};
        PieceSums<V> sums;
        read_sums<V>(at_hand, t, g, sums);
        write_piece<V>(params, mark, at_hand, sums, t, g, column, output);
        // Sums and peaks are read as well now: the groups of the last steps may write those of the next piece, as far as it goes.
        for (uint32_t step = at_hand.count > V::GROUPS ? at_hand.count - V::GROUPS : 0; step < at_hand.count; ++step) {
            if (step + V::GROUPS < walk.left) Signal::free_arrive((at_hand.start + step) % V::GROUPS);
        }
        go_on<V>(plan, at_hand.count, &walk);
    }
}

}  // namespace mma
}  // namespace nvr
