// Which tile of mma a plan takes, and its launch. The kernel is in mma.cuh; mma_m64.cu, mma_m32.cu and mma_m16.cu compile it.
#include "mma_config.cuh"

namespace nvr {

namespace {

template <class Visit>
int for_mma_tile(int tile, Visit visit) {
    switch (tile) {
        case NVR_MMA_M64: return visit(Tag<MmaM64>{});
        case NVR_MMA_M32: return visit(Tag<MmaM32>{});
        case NVR_MMA_M32_MEDIUM: return visit(Tag<MmaM32Medium>{});
        case NVR_MMA_M32_SMALL: return visit(Tag<MmaM32Small>{});
        case NVR_MMA_M16: return visit(Tag<MmaM16>{});
        case NVR_MMA_M16_MEDIUM: return visit(Tag<MmaM16Medium>{});
        default: return visit(Tag<MmaM16Small>{});
    }
}

}  // namespace

TileSize size_of_mma_tile(const nvr_plan_config& config, int tile) {
    TileSize size = {};
    for_mma_tile(tile, [&](auto tag) {
        using Tile = typename decltype(tag)::type;
        return for_mma_dims(config, [&](auto dims) {
            size = {Tile::ROWS, Tile::KEYS, mma::Layout<Tile, typename decltype(dims)::type>::END, Tile::HANDS_OVER};
            return 0;
        });
    });
    return size;
}

// The fewest rows that hold a request: more would compute padding, fewer would fetch the KV rows again. Of the tiles with these rows, else
// with fewer, the first that fits.
int choose_mma_tile(const nvr_plan_config& config, const Device& device) {
    // Draft tokens of a request, on average; deterministic results must not depend on that.
    const int64_t tokens = ceil_div(config.max_total_q, max64(config.max_batch, 1));
    const int64_t rows = config.deterministic ? 64 : tokens * config.num_heads;
    const int32_t wanted = rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
    for (int tile = NVR_MMA_M64; tile < NVR_MMA_M16_SMALL; ++tile) {
        const TileSize size = size_of_mma_tile(config, tile);
        if (size.rows <= wanted && size.shared_bytes <= device.shared_per_block && (device.hands_over || !size.hands_over)) return tile;
    }
    return NVR_MMA_M16_SMALL;
}

int launch_mma(const Device& device, const VerifyParams& params, void* stream) {
    const int status = for_mma_tile(params.plan.tile, [&](auto tile) {
        return launch_mma_tile<typename decltype(tile)::type>(device, params, stream);
    });
    return status == NVR_OK ? launch_combine(device, params, stream, true) : status;
}

}  // namespace nvr
