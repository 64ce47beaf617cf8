// combine: merges the partial results of tiles that paged computed in pieces.
//
//     grid (ctas, tile heads)        block (p, h): head row h of the tiles that CTA p of paged began and that are in several pieces
//     block 128 threads              thread t: columns 4t .. 4t + 3
//
//     out = sum_k w_k out_k / sum_k w_k        w_k = weight_k exp(maximum_k - maximum); pieces in order, so the bits do not vary
#include "work.cuh"

namespace nvr {

constexpr int COMBINE_COLUMNS = 4;  // of a thread: one float4 of a partial row
constexpr int COMBINE_THREADS = MAX_LATENT_DIM / COMBINE_COLUMNS;

// The pieces of one tile: slots first, second, second + step, ...
struct Pieces {
    int64_t first, second, step;
    int32_t count;
    __device__ int64_t slot(int32_t k) const { return k == 0 ? first : second + (k - 1) * step; }
};

template <class Element>
__device__ void merge_row(const VerifyParams& params, int64_t row, int head, int h, const Pieces& pieces) {
    const Plan& plan = params.plan;
    const nvr_tensors& tensors = params.tensors;
    const int column = threadIdx.x * COMBINE_COLUMNS;
    if (row >= params.rows || head >= plan.config.num_heads || column >= plan.config.latent_dim) return;
    float maximum = -INFINITY;
    for (int32_t k = 0; k < pieces.count; ++k) {
        maximum = fmaxf(maximum, plan.workspace.statistics[pieces.slot(k) * plan.tile_heads + h].x);
    }
    float weight = 0.0f, x = 0.0f, y = 0.0f, z = 0.0f, w = 0.0f;
#pragma unroll 4
    for (int32_t k = 0; k < pieces.count; ++k) {
        const int64_t line = pieces.slot(k) * plan.tile_heads + h;
        const float2 statistics = plan.workspace.statistics[line];
        const float factor = statistics.y * exp_below(statistics.x, maximum);
        const float4 part = *reinterpret_cast<const float4*>(plan.workspace.partial_out + line * plan.config.latent_dim + column);
        weight += factor;
        x += factor * part.x;
        y += factor * part.y;
        z += factor * part.z;
        w += factor * part.w;
    }
    const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
    typename Element::Bits* out =
        static_cast<typename Element::Bits*>(tensors.out) + row * tensors.out_row_stride + head * tensors.out_head_stride + column;
    out[0] = Element::from_float(x * scale);
    out[1] = Element::from_float(y * scale);
    out[2] = Element::from_float(z * scale);
    out[3] = Element::from_float(w * scale);
    if (tensors.lse != nullptr && threadIdx.x == 0) {
        tensors.lse[row * plan.config.num_heads + head] = weight == 0.0f ? -INFINITY : maximum + logf(weight);
    }
}

// The tile that CTA p began and did not finish: the one that CTA p + 1 finds itself in the middle of.
template <class Element>
__device__ void combine_cut_tile(const VerifyParams& params, const Counts& counts, int64_t p, int h) {
    const Plan& plan = params.plan;
    const Cursor next = plan.workspace.starts[p + 1];
    const int64_t tile_begin = next.unit - next.block;
    if (next.unit >= counts.units || next.block == 0 || tile_begin < p * counts.payload) return;
    const Request request = plan.workspace.requests[next.request];
    const int64_t tile_end = tile_begin + blocks_of(plan, request);
    int32_t count = 1;  // CTAs from p on that begin before the tile ends
    for (int64_t begin = (p + 1) * counts.payload; begin < tile_end; begin += counts.payload) ++count;
    const Pieces pieces = {2 * p + 1, 2 * (p + 1), 2, count};
    const int head = next.tile % plan.head_tiles * plan.tile_heads + h;
    merge_row<Element>(params, request.q_begin + next.tile / plan.head_tiles, head, h, pieces);
}

// Deterministic plans: all tiles whose first piece lies in CTA p's range.
template <class Element>
__device__ void combine_split_tiles(const VerifyParams& params, const Counts& counts, int64_t p, int h) {
    const Plan& plan = params.plan;
    const int64_t end = min64((p + 1) * counts.payload, counts.units);
    Cursor cursor = plan.workspace.starts[p];
    while (cursor.unit < end) {
        const Request request = plan.workspace.requests[cursor.request];
        const Split split = split_of(plan, request);
        if (cursor.block == 0 && split.pieces > 1) {
            const int64_t first = request.piece_begin + static_cast<int64_t>(cursor.tile) * split.pieces;
            const int head = cursor.tile % plan.head_tiles * plan.tile_heads + h;
            merge_row<Element>(params, request.q_begin + cursor.tile / plan.head_tiles, head, h, {first, first + 1, 1, split.pieces});
        }
        advance(plan, request, blocks_of(plan, request) - cursor.block, &cursor);
    }
}

template <class Element>
__global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(VerifyParams params) {
    const Counts counts = *params.plan.workspace.counts;
    if (params.plan.config.deterministic) {
        combine_split_tiles<Element>(params, counts, blockIdx.x, blockIdx.y);
    } else {
        combine_cut_tile<Element>(params, counts, blockIdx.x, blockIdx.y);
    }
}

int launch_combine(const Device& device, const VerifyParams& params, void* stream) {
    const dim3 grid(static_cast<unsigned>(params.plan.ctas), static_cast<unsigned>(params.plan.tile_heads));
    return for_dtype(params.plan, [&](auto element) {
        return launch<combine_kernel<decltype(element)>>(device, "combine", grid, COMBINE_THREADS, 0, stream, params);
    });
}

}  // namespace nvr
