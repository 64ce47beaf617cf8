// paged: flash's tile steps on a persistent grid over the work list of work.cuh, split along the keys.
//
//     grid (ctas)                    CTA p walks the line of work from starts[p] to starts[p + 1]
//     block 256 threads              piece after piece: load q, run the piece's key tiles, write
//
// A piece that is a whole tile writes out and lse; any other writes a partial result (normalised by its own weight) and its statistics:
//     not deterministic   slot 2p      the piece does not begin at its tile's first block: at most one, CTA p's first
//                         slot 2p + 1  it begins there and is not finished: at most one, CTA p's last
//     deterministic       slot piece_begin + tile * pieces + piece
#include "tile.cuh"
#include "work.cuh"

namespace nvr {

// finish() into a partial slot.
template <class TileShape, class RowDims>
__device__ __forceinline__ void finish_partial(const Plan& plan, int64_t slot, const TilePlace& place, const RowDims& dims,
                                               const TileShared<TileShape>& shared, const TileState<TileShape, RowDims>& state) {
    float2* statistics = plan.workspace.statistics + slot * TileShape::HEADS;
    float* out = plan.workspace.partial_out + slot * TileShape::HEADS * dims.latent;
    finish<Fp32>(place.heads, dims, shared, state, out, dims.latent, nullptr, statistics);
}

// Units of the piece at the cursor.
__device__ int32_t piece_length(const Plan& plan, const Request& request, const Cursor& cursor, int64_t end) {
    const int64_t most = plan.config.deterministic ? split_of(plan, request).length : end - cursor.unit;
    return static_cast<int32_t>(min64(blocks_of(plan, request) - cursor.block, most));
}

// One thread's work: puts the CTA's next piece into shared memory; length 0 = there is none.
__device__ void next_piece(const Plan& plan, bool first, Cursor* piece) {
    const int64_t end = plan.workspace.starts[blockIdx.x + 1].unit;
    Cursor cursor = first ? plan.workspace.starts[blockIdx.x] : *piece;
    if (!first) advance(plan, plan.workspace.requests[cursor.request], cursor.length, &cursor);
    cursor.length = cursor.unit < end ? piece_length(plan, plan.workspace.requests[cursor.request], cursor, end) : 0;
    *piece = cursor;
}

__device__ __forceinline__ int64_t slot_of_cursor(const Plan& plan, const Request& request, const Cursor& piece) {
    if (!plan.config.deterministic) return 2 * blockIdx.x + (piece.block == 0 ? 1u : 0u);
    const Split split = split_of(plan, request);
    return request.piece_begin + static_cast<int64_t>(piece.tile) * split.pieces + piece.block / split.length;
}

template <class TileShape>
__device__ __forceinline__ TilePlace place_of_piece(const Plan& plan, const Cursor& piece) {
    const int32_t row = static_cast<int32_t>(plan.workspace.requests[piece.request].q_begin) + piece.tile / plan.head_tiles;
    return place_of_tile<TileShape>(plan, row, piece.tile % plan.head_tiles);
}

// A piece, from loading q to writing the result.
template <class Element, class TileShape, class RowDims>
__device__ __forceinline__ void run_piece(const VerifyParams& params, const Cursor* piece, const RowDims& dims,
                                          const TileShared<TileShape>& shared) {
    const Plan& plan = params.plan;
    const TilePlace place = place_of_piece<TileShape>(plan, *piece);
    if (place.row >= params.rows) return;
    TileState<TileShape, RowDims> state;
    const RowKeys keys = keys_of_row(plan.workspace.requests[piece->request], place.row);
    attend<Element>(params, keys, place, piece->block, piece->block + piece->length, dims, shared, &state);

    // Worked out again: what lives through attend() takes registers from it.
    const TilePlace target = place_of_piece<TileShape>(plan, *piece);
    const Request request = plan.workspace.requests[piece->request];
    if (piece->length == blocks_of(plan, request)) {
        finish_row<Element>(params, target, dims, shared, state);
    } else {
        finish_partial(plan, slot_of_cursor(plan, request, *piece), target, dims, shared, state);
    }
}

template <class Element, class TileShape, class RowDims>
__global__ void __launch_bounds__(TILE_THREADS, RowDims::BLOCKS_PER_SM) paged_kernel(VerifyParams params) {
    const RowDims dims(params.plan.config);
    const TileShared<TileShape> shared(dims.width);
    Cursor* piece = shared.piece;  // in shared memory: its registers would spill
    for (bool first = true;; first = false) {
        __syncthreads();  // hazard: thread 0 moves the piece that slow threads still read
        if (threadIdx.x == 0) next_piece(params.plan, first, piece);
        __syncthreads();  // hazard: all threads read the piece that thread 0 wrote
        if (piece->length == 0) return;
        run_piece<Element>(params, piece, dims, shared);
    }
}

int launch_paged(const Device& device, const VerifyParams& params, void* stream) {
    const dim3 grid(static_cast<unsigned>(params.plan.ctas));
    const int status = for_dtype(params.plan, [&](auto element) {
        return for_tile(params.plan, [&](auto tile) {
            return for_dims(params.plan.config, [&](auto dims) {
                return launch<paged_kernel<decltype(element), decltype(tile), typename decltype(dims)::type>>(
                    device, "paged", grid, TILE_THREADS, tile_shared_bytes(params.plan), stream, params);
            });
        });
    });
    return status == NVR_OK ? launch_combine(device, params, stream, false) : status;
}

}  // namespace nvr
