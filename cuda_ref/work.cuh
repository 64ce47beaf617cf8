// The line of work that schedule cuts, paged walks and combine merges.
//
// The query rows of a request are numbered token by token, head by head: row rr is head rr % row_heads of token rr / row_heads. tile_rows
// of them are a tile; its work is `blocks` units of tile_keys keys each. All tiles of all requests, in order, form one line of units:
//
//     request 0                     request 1 ...
//     | tile 0    | tile 1    |     | tile 0 | tile 1 | ...
//     ^CTA 0         ^CTA 1           ^CTA 2     cuts.cuh says where
//
// A tile cut by a CTA's border is computed in pieces, each a partial result in its own slot; combine merges them.
// Deterministic plans cut each tile into pieces that depend on its request alone, and a CTA takes the pieces that start in its share.
#pragma once

#include "verify_attn.cuh"

namespace nvr {

// Deterministic split: this many keys a piece at least, less what is no whole unit, and at most this many pieces a request. 128 is about the
// number of SMs, so one request alone still fills a GPU.
constexpr int32_t PIECE_KEYS = 1024;
constexpr int32_t MAX_PIECES = 128;

// Pieces up to which combine merges a whole row of a tile at a time, and not 32 columns of it.
constexpr int32_t FEW_PIECES = 16;

struct Split {
    int32_t pieces;  // of one tile
    int32_t length;  // units of a piece; the last may be shorter
};

// At most NVR_MAX_DRAFT tokens x (NVR_MAX_HEADS + 15) heads: 32 bits are enough (for keys, too). 64-bit divisions would be function calls,
// and those cost registers.
__host__ __device__ inline int32_t tiles_of(const Plan& plan, const Request& request) {
    return (static_cast<int32_t>(request.q_len) * plan.row_heads + plan.tile_rows - 1) / plan.tile_rows;
}

// At least one unit: a tile without keys still has to write its zeros.
__host__ __device__ inline int32_t blocks_of(const Plan& plan, const Request& request) {
    const int32_t blocks = (static_cast<int32_t>(request.kv_len) + plan.tile_keys - 1) / plan.tile_keys;
    return blocks > 1 ? blocks : 1;
}

// tile_keys: of a unit.
__host__ __device__ inline Split split_by_length(int32_t tile_keys, int32_t tiles, int32_t blocks) {
    const int32_t piece_blocks = PIECE_KEYS / tile_keys, pieces = (blocks + piece_blocks - 1) / piece_blocks;
    const int32_t most = tiles > 1 ? MAX_PIECES / tiles : MAX_PIECES, fewer = pieces < most ? pieces : most, wanted = fewer > 1 ? fewer : 1;
    const int32_t length = (blocks + wanted - 1) / wanted;
    return {(blocks + length - 1) / length, length};
}

// The deterministic split of a request that schedule has written.
__device__ inline Split split_of(const Plan& plan, const Request& request) {
    const int32_t blocks = blocks_of(plan, request);
    if (request.piece_begin < 0) return {1, blocks};
    return split_by_length(plan.tile_keys, tiles_of(plan, request), blocks);
}

// Slot of piece k of a tile whose piece 0 is in slot `first`. Not deterministic: CTA p has slot 2p for the end of a tile that others began
// and 2p + 1 for the beginning of one that others end, so the pieces are in 2p + 1, 2p + 2, 2p + 4, ...
__host__ __device__ inline int32_t slot_of_piece(const Plan& plan, int32_t first, int32_t k) {
    if (plan.config.deterministic) return first + k;
    return k == 0 ? first : first + 2 * k - 1;
}

// Moves `length` units on, not beyond the end of the tile. Requests without tiles are stepped over.
__device__ inline void advance(const Plan& plan, const Request& request, int32_t length, Cursor* cursor) {
    cursor->unit += length;
    cursor->block += length;
    if (cursor->block < blocks_of(plan, request)) return;
    cursor->block = 0;
    if (++cursor->tile < tiles_of(plan, request)) return;
    cursor->tile = 0;
    const Workspace& workspace = plan.workspace;
    do {
        ++cursor->request;
    } while (cursor->request < workspace.counts->batch && workspace.requests[cursor->request].q_len == 0);
}

// Last request whose first unit (first row) is at or before a position; of several that begin together, the one that is not empty.
template <int64_t Request::*begin>
__device__ inline int32_t find_request(const Request* requests, int64_t batch, int64_t position) {
    int64_t low = 0, high = batch;  // requests[low].begin <= position < requests[high].begin
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (requests[middle].*begin <= position) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return static_cast<int32_t>(low);
}

}  // namespace nvr
