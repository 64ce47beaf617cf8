// What a lane of a value warp holds of the output, for mma and wgmma, and how it ends a piece: the rows of a whole tile to out and lse, of a part
// of one to a partial slot for combine.
//
// V has ROW_TILES x COLUMN_TILES tiles of 16 x 8, of which an instruction takes FRAGMENT numbers at a time; COLUMNS of a row; and where the score
// warps leave the sums of a piece: TOTALS, ROUNDED and REFERENCES, floats [GROUPS][ROWS].
#pragma once

#include "mma_work.cuh"

namespace nvr {
namespace mma {

// Four numbers a tile, one tile after the other.
template <class V>
using Output = float[V::ROW_TILES * V::COLUMN_TILES * 4 / V::FRAGMENT][V::FRAGMENT];

// Column e of 8-column tile n of the lane's row i.
template <class V>
__device__ __forceinline__ float& output_at(Output<V>& output, int i, int n, int e) {
    const int at = (i / 2 * V::COLUMN_TILES + n) * 4 + 2 * (i % 2) + e;
    return output[at / V::FRAGMENT][at % V::FRAGMENT];
}

// row: of this lane in the step's factors.
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

// What a piece was made of: its first step's group, its steps, rows before its sums, and the row of the request that is the tile's first.
struct PieceAtHand {
    uint32_t start, count, place, first;
};

// (peak, sum of the weights by that peak) of a row after all steps of the piece, which groups start, start + 1, ... took in turn. sums: where the
// exact sums are, or the rounded ones.
template <class V>
__device__ __forceinline__ float2 statistics_of(uint32_t sums, const PieceAtHand& piece, uint32_t row) {
    const float *totals = shared_array<float>(sums) + piece.place + row, *references = shared_array<float>(V::REFERENCES) + piece.place + row;
    float2 statistics = {references[(piece.start + piece.count - 1) % V::GROUPS * V::ROWS], 0.0f};
#pragma unroll
    for (uint32_t k = 0; k < V::GROUPS; ++k) {
        if (k >= piece.count) break;
        const uint32_t entry = (piece.start + k) % V::GROUPS * V::ROWS;
        float part = totals[entry];
        if (references[entry] < statistics.x) part *= ptx::ex2_approx_f32(references[entry] - statistics.x);
        statistics.y += part;
    }
    return statistics;
}

// 1 / sum of the rounded weights of a row; 0 for one that saw nothing.
template <class V>
__device__ __forceinline__ float inverse_of(const PieceAtHand& piece, uint32_t row) {
    const float total = statistics_of<V>(V::ROUNDED, piece, row).y;
    return total != 0.0f ? 1.0f / total : 0.0f;
}

// All that the end of a piece reads from shared memory, which may then be used anew: of the lane's rows 1 / sum of the rounded weights, and of row
// t (peak, sum of the weights by that peak).
template <class V>
struct PieceSums {
    float inverses[V::LANE_ROWS];
    float2 statistics;
};

// t: thread of the role; g: the lane's first row in the tile.
template <class V>
__device__ __forceinline__ void read_sums(const PieceAtHand& piece, uint32_t t, uint32_t g, PieceSums<V>& sums) {
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) sums.inverses[i] = inverse_of<V>(piece, g + 8 * i);
    sums.statistics = {0.0f, 0.0f};
    if (t < V::ROWS) sums.statistics = statistics_of<V>(V::TOTALS, piece, t);
}

// Rows of out that are complete. column: the lane's first.
template <class V>
__device__ __forceinline__ void finish(const VerifyParams& params, const Request& request, const PieceAtHand& piece, const PieceSums<V>& sums,
                                       uint32_t g, uint32_t column, Output<V>& output) {
    const nvr_tensors& tensors = params.tensors;
    const uint32_t heads = params.plan.row_heads, valid = tokens_there(params, request) * heads;
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) {
        const float inverse = sums.inverses[i];
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
__device__ __forceinline__ void save(const Plan& plan, int64_t slot, const PieceSums<V>& sums, uint32_t g, uint32_t column, Output<V>& output) {
#pragma unroll
    for (int i = 0; i < V::LANE_ROWS; ++i) {
        const float inverse = sums.inverses[i];
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
                                                 const PieceAtHand& piece, float2 statistics, uint32_t row) {
    if (!whole) {
        params.plan.workspace.statistics[slot * V::ROWS + row] = statistics;
        return;
    }
    const uint32_t heads = params.plan.row_heads, flat = piece.first + row;
    if (params.tensors.lse == nullptr || flat >= tokens_there(params, request) * heads) return;
    params.tensors.lse[request.q_begin * heads + flat] =
        statistics.y != 0.0f ? (statistics.x + ptx::lg2_approx_f32(statistics.y)) * LN2 : -INFINITY;
}

// All of a piece. mark: where it began, and its partial slot, should it need one; t: thread of the role; g, column: the lane's first in the tile.
template <class V>
__device__ __forceinline__ void write_piece(const VerifyParams& params, const Mark& mark, const PieceAtHand& piece, const PieceSums<V>& sums,
                                            uint32_t t, uint32_t g, uint32_t column, Output<V>& output) {
    const Request& request = request_of(params.plan, mark.walk);
    const bool whole = mark.walk.unit == 0 && piece.count == units_of_tile<V>(request);
    if (t < V::ROWS) write_statistics<V>(params, request, whole, mark.slot, piece, sums.statistics, t);
    if (whole) {
        finish<V>(params, request, piece, sums, g, column, output);
    } else {
        save<V>(params.plan, mark.slot, sums, g, column, output);
    }
}

}  // namespace mma
}  // namespace nvr
