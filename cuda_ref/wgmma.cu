// Which tile of wgmma a plan takes, and its launch. The kernel is in wgmma.cuh; wgmma_bf16.cu and wgmma_fp16.cu compile it.
#include "wgmma_config.cuh"

namespace nvr {

int count_wgmma_tiles() { return WgmmaTiles::COUNT; }

TileSize size_of_wgmma_tile(const nvr_plan_config& config, int tile) {
    TileSize size = {};
    WgmmaTiles::visit(tile, [&](auto tag) {
        using Tile = typename decltype(tag)::type;
        return for_mma_dims(config, [&](auto dims) {
            size = {Tile::ROWS, Tile::KEYS, wgmma::Layout<Tile, typename decltype(dims)::type>::END, true};
            return 0;
        });
    });
    return size;
}

int choose_wgmma_tile(const nvr_plan_config& config, const Device& device) {
    for (int tile = 1; tile < WgmmaTiles::COUNT; ++tile) {
        if (size_of_wgmma_tile(config, tile).shared_bytes <= device.shared_for_wgmma) return tile;
    }
    return WgmmaTiles::COUNT;
}

int launch_wgmma(const Device& device, const VerifyParams& params, void* stream) {
    const int status = params.plan.config.dtype == NVR_BFLOAT16 ? launch_wgmma_of<Bf16>(device, params, stream)
                                                                : launch_wgmma_of<Fp16>(device, params, stream);
    return status == NVR_OK ? launch_combine(device, params, stream, true) : status;
}

}  // namespace nvr
