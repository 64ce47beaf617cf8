// Value warps of mma: O += P V in registers, and the writing of a piece: a row of out, or a partial for combine.
//
//     warp w        all rows of the tile, columns w * latent / 8 ...
//     lane l        of every 16 x 8 tile of O: rows g = l / 4 and g + 8, columns 2 (l % 4) and the next (see mma in ptx.cuh)
//
// V is the latent part of the very rows that the scores were made of; ldmatrix.trans reads it column by column.
#pragma once

#include "mma_work.cuh"

namespace nvr {
namespace mma {

// What a value warp works on: 16 x 8 tiles of the output, and how a lane's share of them is laid out.
template <class C>
struct ValueShape : C {
    static constexpr int COLUMNS = C::latent / VALUE_WARPS;
    static constexpr int ROW_TILES = C::ROWS / 16, COLUMN_TILES = COLUMNS / 8, PAIRS = COLUMNS / 16;
    static constexpr int LANE_ROWS = 2 * ROW_TILES;  // row i: 8 i after the lane's first
    static_assert(COLUMNS % 16 == 0, "ldmatrix brings the columns of two tiles");
};

template <class V>
using Output = float[V::ROW_TILES][V::COLUMN_TILES][4];

// Column e of 8-column tile n of the lane's row i.
template <class V>
__device__ __forceinline__ float& output_at(Output<V>& output, int i, int n, int e) {
    return output[i / 2][n][2 * (i % 2) + e];
}

// row: of this lane in this group's factors.
template <class V>
__device__ __forceinline__ void rescale(Output<V>& output, uint32_t row) {
    const float* alpha = shared_array<float>(V::ALPHA) + row;
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) {
        const float factor = alpha[8 * i];
#pragma unroll
        for (int n = 0; n < V::COLUMN_TILES; ++n) {
            output_at<V>(output, i, n, 0) *= factor;
            output_at<V>(output, i, n, 1) *= factor;
        }
    }
}

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
            TensorCore<typename V::Element>::multiply(output[m][2 * c + e], weights[m], values[2 * e], values[2 * e + 1]);
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

// (peak, sum of the weights by that peak) of a row after `count` steps, which groups first, first + 1, ... took in turn. sums: where the exact
// sums are, or the rounded ones.
template <class V>
__device__ __forceinline__ float2 statistics_of(uint32_t sums, uint32_t row, uint32_t first, uint32_t count) {
    const float *totals = shared_array<float>(sums) + row, *references = shared_array<float>(V::REFERENCES) + row;
    float2 statistics = {references[(first + count - 1) % V::GROUPS * V::ROWS], 0.0f};
#pragma unroll
    for (uint32_t k = 0; k < V::GROUPS; ++k) {
        if (k >= count) break;
        const uint32_t entry = (first + k) % V::GROUPS * V::ROWS;
        float part = totals[entry];
        if (references[entry] < statistics.x) part *= ptx::ex2_approx_f32(references[entry] - statistics.x);
        statistics.y += part;
    }
    return statistics;
}

// What a piece was made of: its first step's group, its steps, and the row of the request that is the tile's first.
struct PieceAtHand {
    uint32_t start, count, first;
};

// 1 / sum of the rounded weights of a row; 0 for one that saw nothing.
template <class V>
__device__ __forceinline__ float inverse_of(const PieceAtHand& piece, uint32_t row) {
    const float total = statistics_of<V>(V::ROUNDED, row, piece.start, piece.count).y;
    return total != 0.0f ? 1.0f / total : 0.0f;
}

// Rows of out that are complete. column: the lane's first.
template <class V>
__device__ __forceinline__ void finish(const VerifyParams& params, const Request& request, const PieceAtHand& piece, uint32_t g, uint32_t column,
                                       Output<V>& output) {
    const nvr_tensors& tensors = params.tensors;
    const uint32_t heads = params.plan.row_heads, valid = tokens_there(params, request) * heads;
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) {
        const float inverse = inverse_of<V>(piece, g + 8 * i);
        const uint32_t flat = piece.first + g + 8 * i, token = flat / heads, head = flat - token * heads;
        if (flat >= valid) continue;
        uint16_t* out = static_cast<uint16_t*>(tensors.out) + (request.q_begin + token) * tensors.out_row_stride +
                        head * tensors.out_head_stride + column;
#pragma unroll
        for (int n = 0; n < V::COLUMN_TILES; ++n) {
            reinterpret_cast<uint32_t*>(out)[4 * n] = TensorCore<typename V::Element>::pack(output_at<V>(output, i, n, 1) * inverse,
                                                                                            output_at<V>(output, i, n, 0) * inverse);
        }
    }
}

// A part of a tile, to its partial slot.
template <class V>
__device__ __forceinline__ void save(const Plan& plan, int64_t slot, const PieceAtHand& piece, uint32_t g, uint32_t column, Output<V>& output) {
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) {
        const float inverse = inverse_of<V>(piece, g + 8 * i);
        float2* out = reinterpret_cast<float2*>(plan.workspace.partial_out + (slot * V::ROWS + g + 8 * i) * V::latent + column);
#pragma unroll
        for (int n = 0; n < V::COLUMN_TILES; ++n) {
            out[4 * n] = {output_at<V>(output, i, n, 0) * inverse, output_at<V>(output, i, n, 1) * inverse};
        }
    }
}

// Partial slot of the piece; see paged.cu.
template <class V>
__device__ __forceinline__ uint32_t slot_of_walk(const Plan& plan, const Walk& walk) {
    if (!plan.config.deterministic) return 2 * blockIdx.x + (walk.unit == 0 ? 1 : 0);
    const Request& request = request_of(plan, walk);
    const Split split = split_of_request<V>(plan, request);
    return static_cast<uint32_t>(request.piece_begin) + walk.tile * split.pieces + walk.unit / static_cast<uint32_t>(split.length);
}

// One thread's row of the piece: its sum and peak to lse, or to the statistics of the partial.
template <class V>
__device__ __forceinline__ void write_statistics(const VerifyParams& params, const Request& request, bool whole, int64_t slot,
                                                 const PieceAtHand& piece, uint32_t row) {
    const float2 statistics = statistics_of<V>(V::TOTALS, row, piece.start, piece.count);
    if (!whole) {
        params.plan.workspace.statistics[slot * V::ROWS + row] = statistics;
        return;
    }
    const uint32_t heads = params.plan.row_heads, flat = piece.first + row;
    if (params.tensors.lse == nullptr || flat >= tokens_there(params, request) * heads) return;
    params.tensors.lse[request.q_begin * heads + flat] =
        statistics.y != 0.0f ? (statistics.x + ptx::lg2_approx_f32(statistics.y)) * LN2 : -INFINITY;
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
    uint32_t number = 0, piece = 0;  // number: of the next block
    Walk walk = begin_walk(plan);
    // Nothing has been written yet: the groups that have a step may begin.
    for (uint32_t k = 0; k < V::GROUPS && k < walk.left; ++k) Signal::free_arrive(k);
    while (walk.left != 0) {
        find_tile<V>(plan, &walk);
        const uint32_t end = number + piece_length<V>(plan, walk) * V::KEY_BLOCKS;
        // Picked up after the last step, long after the barrier of the first. And so is the partial slot, should one be needed.
        if (t == 0) *value_mark<V>(piece) = {walk, number, slot_of_walk<V>(plan, walk)};
        Output<V> output = {};
#pragma unroll 1
        while (number != end) {
            const uint32_t turn = number / V::KEY_BLOCKS % V::GROUPS;
            // The weights of this step, and with them the keys they belong to, are there.
            Signal::ready_sync(turn);
            if ((flags[turn * V::ROW_WARPS] | flags[turn * V::ROW_WARPS + V::ROW_WARPS - 1]) != 0) rescale<V>(output, turn * V::ROWS + g);
            add_step<V>(base, number, values_at, weights_at + turn * V::GROUP_WEIGHT_BYTES, lane, output);
            number += V::KEY_BLOCKS;
            // This thread has read weights and factors, and the group has another step in this piece: it may write its next.
            if (end - number >= V::GROUPS * V::KEY_BLOCKS) Signal::free_arrive(turn);
        }
        const Mark mark = *value_mark<V>(piece++);
        walk = mark.walk;
        const PieceAtHand at_hand = {mark.number / V::KEY_BLOCKS % V::GROUPS, (end - mark.number) / V::KEY_BLOCKS, walk.tile * V::ROWS};
        const Request& request = request_of(plan, walk);
        const bool whole = walk.unit == 0 && at_hand.count == units_of_tile<V>(request);
        if (t < V::ROWS) write_statistics<V>(params, request, whole, mark.slot, at_hand, t);
        if (whole) {
            finish<V>(params, request, at_hand, g, column, output);
        } else {
            save<V>(plan, mark.slot, at_hand, g, column, output);
        }
        // Sums and peaks are read as well now: the groups of the last steps may write those of the next piece, as far as it goes.
        for (uint32_t step = at_hand.count > V::GROUPS ? at_hand.count - V::GROUPS : 0; step < at_hand.count; ++step) {
            if (step + V::GROUPS < walk.left) Signal::free_arrive((at_hand.start + step) % V::GROUPS);
        }
        go_on<V>(plan, at_hand.count, &walk);
    }
}

}  // namespace mma
}  // namespace nvr
