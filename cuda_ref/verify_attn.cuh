// The kernels of the library, their parameters, and the workspace they share. capi.cu checks the arguments and calls launch_*.
#pragma once

#include "common.cuh"
#include "device.cuh"
#include "verify_attn.h"

namespace nvr {

// One request of the batch, as schedule leaves it in the workspace.
struct Request {
    int64_t q_begin;      // first row of q
    int64_t q_len;        // n: draft tokens
    int64_t prefix;       // L: keys every row sees
    int64_t kv_len;       // all keys: key j >= L is draft token j - L
    int64_t slot_begin;   // first entry in slots
    int64_t mask_begin;   // first byte in a FULL_MASK array
    int64_t unit_begin;   // first unit of work on the line of all requests
    int64_t piece_begin;  // deterministic: first partial slot, -1 when no tile of the request is split; else its first CTA, if tiles have some
};

// A place on the line of work: unit = key block `block` of tile `tile` of request `request`; at the line's end only unit says anything.
struct Cursor {
    int64_t unit;
    int32_t request;
    int32_t tile;  // of the request
    int32_t block;
    int32_t length;  // paged: units of the piece that begins here
};

// A tile in pieces, for combine.
struct Merge {
    int32_t slot;    // partial slot of the first piece; the others: slot_of_piece
    int32_t pieces;
    int32_t tile;    // of the request
    int32_t row;     // first query row of the request
    int32_t tokens;  // draft tokens of the request
};

struct Counts {
    int64_t batch;
    int64_t entries;  // used entries of kv_indices
    int32_t few, many;  // tiles of at most FEW_PIECES pieces, and of more
};

struct Workspace {
    Counts* counts;
    Request* requests;     // [max_batch]
    Cursor* starts;        // [ctas + 1] where each CTA of paged, mma and wgmma begins, and so where the one before it ends
    int32_t* row_request;  // [max_total_q] request of a row, -1 = padding
    uint32_t* visibility;  // [max_total_q, words] bit j: the row sees draft token j
    uint32_t* slots;       // [max_kv_entries * page_size] pool row (page * page_size + offset) of every listed token
    Merge* merges;         // [max_merges] tiles in pieces: of few pieces from the first element on, of many from the last one down
    float2* statistics;    // [partial_slots, tile_rows] maximum and weight of a partial; their lse alone is coarse by 0.008 at 1e5
    float* partial_out;    // [partial_slots, tile_rows, latent_dim]
};

// The plan as the kernels see it.
struct Plan {
    nvr_plan_config config;
    int32_t tile;        // nvr_mma_tile or number of WgmmaTiles, chosen; of a plan for mma or wgmma
    int32_t tile_rows, tile_keys;  // query rows (draft token, head) and keys of a tile; of flash and paged, the rows are heads of one token
    int32_t row_heads;   // heads from token to token in the line of query rows: num_heads, or filled up to whole tiles (flash and paged)
    int32_t head_tiles;  // flash and paged: row_heads / tile_rows
    int32_t min_keys;    // shortest share of a CTA: below that, loading q and merging a partial cost more than they spread
    int32_t merge_keys;  // keys that a CTA does in the time by which each piece delays all others
    int32_t base2;       // maxima of partials are in units of log2(e)
    int32_t words;       // uint32 words of one visibility row
    int32_t ctas;        // grid of paged, mma and wgmma
    int32_t max_merges;
    int64_t partial_slots;
    Workspace workspace;
};

struct UpdateParams {
    Plan plan;
    nvr_indices indices;
};

struct VerifyParams {
    Plan plan;
    nvr_tensors tensors;
    int64_t rows;  // rows that q, out and the plan all have
};

// Head and key extents of a tile: the three configurations of nvr_tile_config.
template <int HEADS_, int KEYS_>
struct Tile {
    static constexpr int HEADS = HEADS_;
    static constexpr int KEYS = KEYS_;
};

// Row extents, compiled in; <0, 0> reads them from the plan.
template <int LATENT, int ROPE>
struct Dims {
    // Of a flash or paged block. Two hide each other's barriers; that caps registers at 128, and extents at run time need more.
    static constexpr int BLOCKS_PER_SM = 2;
    static constexpr int MAX_WIDTH = LATENT + ROPE;
    static constexpr int MAX_LATENT = LATENT;
    static constexpr int latent = LATENT;
    static constexpr int width = LATENT + ROPE;
    __device__ explicit Dims(const nvr_plan_config&) {}
};

constexpr int MAX_LATENT_DIM = 512;  // two columns for each of 256 threads
constexpr int MAX_ROPE_DIM = 128;

template <>
struct Dims<0, 0> {
    static constexpr int BLOCKS_PER_SM = 1;
    static constexpr int MAX_WIDTH = MAX_LATENT_DIM + MAX_ROPE_DIM;
    static constexpr int MAX_LATENT = MAX_LATENT_DIM;
    const int latent, width;
    __device__ explicit Dims(const nvr_plan_config& config) : latent(config.latent_dim), width(config.latent_dim + config.rope_dim) {}
};

__global__ void schedule_kernel(UpdateParams params);
__global__ void expand_kernel(UpdateParams params);
template <class Element, class RowDims> __global__ void naive_kernel(VerifyParams params);
template <class Element, class TileShape, class RowDims> __global__ void flash_kernel(VerifyParams params);
template <class Element, class TileShape, class RowDims> __global__ void paged_kernel(VerifyParams params);
template <class Element, class Tile, class RowDims> __global__ void mma_kernel(VerifyParams params);
template <class Element, class Tile, class RowDims> __global__ void wgmma_kernel(VerifyParams params);
template <class Element, int STRIPS> __global__ void combine_kernel(VerifyParams params);

// Bytes of dynamic shared memory of a flash or paged block.
int64_t tile_shared_bytes(const Plan& plan);

// A tile of mma or wgmma, for rows that they are compiled for.
struct TileSize {
    int32_t rows, keys;
    int64_t shared_bytes;
    bool hands_over;  // registers: wants an sm_90a GPU
};
TileSize size_of_mma_tile(const nvr_plan_config& config, int tile);

// The nvr_mma_tile that NVR_MMA_DEFAULT stands for; NVR_MMA_M16_SMALL when the device has no room for any.
int choose_mma_tile(const nvr_plan_config& config, const Device& device);

// The tiles of wgmma are numbered from 1 on; 0 stands for the first that fits, and for the last when none does.
int count_wgmma_tiles();
TileSize size_of_wgmma_tile(const nvr_plan_config& config, int tile);
int choose_wgmma_tile(const nvr_plan_config& config, const Device& device);

int launch_update(const Device& device, const UpdateParams& params, void* stream);
int launch_naive(const Device& device, const VerifyParams& params, void* stream);
int launch_flash(const Device& device, const VerifyParams& params, void* stream);
int launch_paged(const Device& device, const VerifyParams& params, void* stream);
int launch_mma(const Device& device, const VerifyParams& params, void* stream);
int launch_wgmma(const Device& device, const VerifyParams& params, void* stream);
// overlap: the kernel before lets it start early.
int launch_combine(const Device& device, const VerifyParams& params, void* stream, bool overlap);

// Calls visit(Element{}) or visit(Element{}, TileShape{}, RowDims tag) with the types that the plan names.
template <class Visit>
int for_dtype(const Plan& plan, Visit visit) {
    if (plan.config.dtype == NVR_BFLOAT16) return visit(Bf16{});
    if (plan.config.dtype == NVR_FLOAT16) return visit(Fp16{});
    return visit(Fp32{});
}

template <class T>
struct Tag {
    using type = T;
};

template <class... Types>
struct TypeList {
    static constexpr int COUNT = sizeof...(Types);

    // Calls visit with the tag of type `number`, from 1 on, and returns its answer; 0 for other numbers.
    template <class Visit>
    static int visit(int number, Visit visit) {
        int at = 0, answer = 0;
        (void)((++at == number ? (answer = visit(Tag<Types>{}), true) : false) || ...);
        return answer;
    }
};

// The four pairs that models use have their own code; any other multiple of 32 runs the one that reads its extents.
template <class Visit>
int for_dims(const nvr_plan_config& config, Visit visit) {
    if (config.latent_dim == 512 && config.rope_dim == 64) return visit(Tag<Dims<512, 64>>{});
    if (config.latent_dim == 512 && config.rope_dim == 0) return visit(Tag<Dims<512, 0>>{});
    if (config.latent_dim == 256 && config.rope_dim == 64) return visit(Tag<Dims<256, 64>>{});
    if (config.latent_dim == 128 && config.rope_dim == 64) return visit(Tag<Dims<128, 64>>{});
    return visit(Tag<Dims<0, 0>>{});
}

// Calls visit with the rows that mma and wgmma are compiled for and returns its answer; 0 for other rows.
template <class Visit>
int for_mma_dims(const nvr_plan_config& config, Visit visit) {
    if (config.latent_dim == 512 && config.rope_dim == 64) return visit(Tag<Dims<512, 64>>{});
    if (config.latent_dim == 512 && config.rope_dim == 0) return visit(Tag<Dims<512, 0>>{});
    if (config.latent_dim == 256 && config.rope_dim == 64) return visit(Tag<Dims<256, 64>>{});
    if (config.latent_dim == 128 && config.rope_dim == 64) return visit(Tag<Dims<128, 64>>{});
    return 0;
}

template <class Visit>
int for_tile(const Plan& plan, Visit visit) {
    if (plan.tile_rows == 16) return visit(Tile<16, 16>{});
    if (plan.tile_keys == 32) return visit(Tile<8, 32>{});
    return visit(Tile<8, 16>{});
}

}  // namespace nvr
