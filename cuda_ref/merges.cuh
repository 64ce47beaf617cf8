// Which tiles are in pieces, for combine: merges[counts.few + counts.many].
#pragma once

#include "scans.cuh"
#include "work.cuh"

namespace nvr {

// `tiles` tiles of so many pieces, as a number that can be summed: few, or many << 32.
__device__ inline int64_t count_merges(int32_t pieces, int32_t tiles) {
    if (pieces <= 1) return 0;
    return pieces <= FEW_PIECES ? tiles : static_cast<int64_t>(tiles) << 32;
}

// before: the sum of the tiles in pieces before this one.
__device__ inline void write_merge(const Plan& plan, int64_t before, const Request& request, const Merge& merge) {
    const int64_t few = before & 0xffffffff, many = before >> 32;
    Merge* target = plan.workspace.merges + (merge.pieces <= FEW_PIECES ? few : plan.max_merges - 1 - many);
    *target = merge;
    target->row = static_cast<int32_t>(request.q_begin);
    target->tokens = static_cast<int32_t>(request.q_len);
}

// CTA p begins at most one tile that it does not finish: the one that CTA p + 1 finds itself in the middle of. Then its share is full, as are
// those of all CTAs that the tile runs through. Returns the sum of merges.
__device__ inline int64_t merge_shares(const Plan& plan, int64_t* of_warps) {
    int64_t sum = 0;
    for (int32_t base = 0; base < plan.ctas; base += SCHEDULE_THREADS) {
        const int32_t p = base + static_cast<int32_t>(threadIdx.x);
        Merge merge = {2 * p + 1, 0, 0, 0, 0};
        Request request = {};
        const Cursor next = p < plan.ctas ? plan.workspace.starts[p + 1] : Cursor{};
        const int64_t share = p < plan.ctas ? next.unit - plan.workspace.starts[p].unit : 0;
        if (next.block > 0 && next.block <= share) {
            request = plan.workspace.requests[next.request];
            merge.tile = next.tile;
            const int32_t rest = blocks_of(plan, request) - next.block;
            merge.pieces = share >= rest ? 2 : 1 + (rest + static_cast<int32_t>(share) - 1) / static_cast<int32_t>(share);
        }
        const int64_t before = block_scan(count_merges(merge.pieces, 1), &sum, of_warps);
        if (merge.pieces > 1) write_merge(plan, before, request, merge);
        __syncthreads();  // hazard: the next scan overwrites of_warps that slow warps still read
    }
    return sum;
}

// Deterministic plans: every tile of a request that is split.
__device__ inline int64_t merge_pieces(const Plan& plan, int64_t batch, int64_t* of_warps) {
    int64_t sum = 0;
    for (int64_t base = 0; base < batch; base += SCHEDULE_THREADS) {
        Request request = {};
        request.piece_begin = -1;
        if (base + threadIdx.x < batch) request = plan.workspace.requests[base + threadIdx.x];
        const int32_t pieces = split_of(plan, request).pieces, tiles = tiles_of(plan, request);
        int64_t before = block_scan(count_merges(pieces, tiles), &sum, of_warps);
        for (int32_t tile = 0; pieces > 1 && tile < tiles; ++tile, before += count_merges(pieces, 1)) {
            write_merge(plan, before, request, {static_cast<int32_t>(request.piece_begin) + tile * pieces, pieces, tile, 0, 0});
        }
        __syncthreads();  // hazard: the next scan overwrites of_warps that slow warps still read
    }
    return sum;
}

}  // namespace nvr
