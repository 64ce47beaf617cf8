// flash: shared-memory head tiling + online softmax. One block per (query row, tile of heads).
//
//     grid (rows, head tiles)        a key row is fetched once per head tile: 1 / HEADS of naive's traffic
//     block 256 threads              all keys of the row, tile after tile (tile.cuh)
#include "tile.cuh"

namespace nvr {

template <class Element, class TileShape, class RowDims>
__global__ void __launch_bounds__(TILE_THREADS, RowDims::BLOCKS_PER_SM) flash_kernel(VerifyParams params) {
    const RowDims dims(params.plan.config);
    const TileShared<TileShape> shared(dims.width);
    const int32_t row = static_cast<int32_t>(blockIdx.x);
    const int32_t r = params.plan.workspace.row_request[row];
    if (r < 0) return;
    const RowKeys keys = keys_of_row(params.plan.workspace.requests[r], row);
    const TilePlace place = place_of_tile<TileShape>(params.plan, row, blockIdx.y);
    TileState<TileShape, RowDims> state;
    attend<Element>(params, keys, place, 0, (keys.kv_len + TileShape::KEYS - 1) / TileShape::KEYS, dims, shared, &state);
    finish_row<Element>(params, place, dims, shared, state);
}

int64_t tile_shared_bytes(const Plan& plan) {
    const int64_t width = plan.config.latent_dim + plan.config.rope_dim;
    return tile_floats(plan.tile_rows, plan.tile_keys, width) * static_cast<int64_t>(sizeof(float));
}

int launch_flash(const Device& device, const VerifyParams& params, void* stream) {
    const dim3 grid(static_cast<unsigned>(params.rows), static_cast<unsigned>(params.plan.head_tiles));
    return for_dtype(params.plan, [&](auto element) {
        return for_tile(params.plan, [&](auto tile) {
            return for_dims(params.plan.config, [&](auto dims) {
                return launch<flash_kernel<decltype(element), decltype(tile), typename decltype(dims)::type>>(
                    device, "flash", grid, TILE_THREADS, tile_shared_bytes(params.plan), stream, params);
            });
        });
    });
}

}  // namespace nvr
