// combine: merges the partial results of tiles in pieces, by the list of merges that schedule made. A tile that was not cut costs nothing.
//
//     grid as fills the GPU, block 128 threads; each warp by itself takes item after item:
//       tile of few pieces     one row, all columns     lane l: columns 4l .. 4l + 3 of every 128, all pieces
//       tile of many pieces    one row, 32 columns      lane l: columns 4 (l % 8) .. + 3, pieces l / 8, l / 8 + 4, l / 8 + 8, ...
//
//     out = sum_k w_k out_k / sum_k w_k        w_k = weight_k exp(maximum_k - maximum)
//
// The order of summation depends on the number of pieces alone: few are added in key order; of many, every fourth one, then the four sums.
//
//     shared memory of a warp   ring [2][8][32 lanes] of 16 bytes: while 8 loads are added up, the next 8 are on their way
//                               a lane reads only what it fetched itself, so there is no barrier
//
// Two trips to memory: the merge; then statistics and the first 16 loads of partials at once.
#include "ptx.cuh"
#include "work.cuh"

namespace nvr {

constexpr int COMBINE_WARPS = 4;
constexpr int COMBINE_THREADS = COMBINE_WARPS * WARP;
constexpr int COLUMNS = 4;  // of a lane: one float4 of a partial row
constexpr int WIDTH = COLUMNS * WARP;
constexpr int MAX_PARTS = MAX_LATENT_DIM / WIDTH;
constexpr int GROUPS = 4;  // of lanes that share the pieces of a tile of many: 8 lanes fetch a whole cache line of a piece
constexpr int STRIP = WIDTH / GROUPS;
constexpr int BATCH = 8, BATCHES = 2;           // loads of a batch, and batches on their way
constexpr int SLOT_FLOATS = WARP * COLUMNS;     // a load of a warp
constexpr int RING_FLOATS = BATCHES * BATCH * SLOT_FLOATS;
constexpr int COMBINE_BLOCKS_PER_SM = 6;  // their rings take 192 KB of the 228 KB of an H200

// What a warp merges: strip `strip` of row h of a tile.
struct MergedRow {
    int32_t first, pieces;  // see Merge
    int32_t h, strip;
    int64_t row;
    int32_t head;
};

// Line of piece k in statistics and partial_out.
__device__ __forceinline__ int64_t line_of_piece(const Plan& plan, const MergedRow& item, int32_t k) {
    return static_cast<int64_t>(slot_of_piece(plan, item.first, k)) * plan.tile_rows + item.h;
}

// How the lanes of a warp share a strip: in groups that share the pieces; a lane has 4 columns PARTS times.
template <int PARTS_, int GROUPS_>
struct Lanes {
    static constexpr int PARTS = PARTS_, GROUPS = GROUPS_;
    static constexpr int IN_GROUP = WARP / GROUPS;
    static constexpr int OWN = BATCH / PARTS;         // pieces of a batch that a lane has
    static constexpr int PIECES = OWN * GROUPS;       // of a batch
    static constexpr int COLUMNS_OF_STRIP = PARTS * IN_GROUP * COLUMNS;
};

// Starts to bring the lane's pieces of the batch that begins with piece `base` into their half of the ring. Pieces and columns that do not
// exist become zeros. Always one commit group, empty for a batch behind the last piece.
template <class Lanes>
__device__ __forceinline__ void fetch(const Plan& plan, const MergedRow& item, int32_t base, int group, int column, float* ring) {
    float* half = ring + base / Lanes::PIECES % BATCHES * BATCH * SLOT_FLOATS;
    if (base < item.pieces) {
#pragma unroll
        for (int u = 0; u < Lanes::OWN; ++u) {
            const int32_t k = base + u * Lanes::GROUPS + group;
            const float* source = plan.workspace.partial_out + line_of_piece(plan, item, k) * plan.config.latent_dim + column;
#pragma unroll
            for (int s = 0; s < Lanes::PARTS; ++s) {
                const bool there = k < item.pieces && column + s * WIDTH < plan.config.latent_dim;
                ptx::cp_async_16_zfill(ptx::shared_address(half + (u * Lanes::PARTS + s) * SLOT_FLOATS), source + s * WIDTH, there ? 16 : 0);
            }
        }
    }
    ptx::cp_async_commit();
}

__device__ __forceinline__ float weight_of(const Plan& plan, float2 statistics, float base) {
    const float difference = statistics.x - base;
    return statistics.y * exp2f(plan.base2 ? difference : difference * LOG2E);
}

// The sum over the groups of lanes, the same bits in every lane.
template <int GROUPS>
__device__ __forceinline__ float add_up(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask >= WARP / GROUPS; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

template <class Bits>
struct alignas(COLUMNS * sizeof(Bits)) Four {
    Bits values[COLUMNS];
};

template <class Element, class Lanes>
__device__ __forceinline__ void merge(const VerifyParams& params, const MergedRow& item, float* ring) {
    using Bits = typename Element::Bits;
    constexpr int PARTS = Lanes::PARTS;
    const Plan& plan = params.plan;
    const int lane = threadIdx.x % WARP, group = lane / Lanes::IN_GROUP;
    const int column = item.strip * Lanes::COLUMNS_OF_STRIP + lane % Lanes::IN_GROUP * COLUMNS;
#pragma unroll
    for (int b = 0; b < BATCHES; ++b) fetch<Lanes>(plan, item, b * Lanes::PIECES, group, column, ring);
    // Lane l has the statistics of piece l, then of l + 32, ...
    float2 own = {-INFINITY, 0.0f};
    if (lane < item.pieces) own = plan.workspace.statistics[line_of_piece(plan, item, lane)];
    float maximum = own.x;
    for (int32_t k = lane + WARP; k < item.pieces; k += WARP) {
        maximum = fmaxf(maximum, plan.workspace.statistics[line_of_piece(plan, item, k)].x);
    }
    maximum = warp_max(maximum);
    const float base = maximum == -INFINITY ? 0.0f : maximum;  // nobody saw anything: -inf - -inf would be NaN
    float weight = weight_of(plan, own, base), total = 0.0f;
    float values[PARTS][COLUMNS] = {};
    for (int32_t k = 0; k < item.pieces; k += Lanes::PIECES) {
        if (k > 0 && k % WARP == 0) {
            const bool mine = k + lane < item.pieces;
            weight = mine ? weight_of(plan, plan.workspace.statistics[line_of_piece(plan, item, k + lane)], base) : 0.0f;
        }
        ptx::cp_async_wait_group<BATCHES - 1>();
        const float* half = ring + k / Lanes::PIECES % BATCHES * BATCH * SLOT_FLOATS;
#pragma unroll
        for (int u = 0; u < Lanes::OWN; ++u) {
            const float share = __shfl_sync(ALL_LANES, weight, (k + u * Lanes::GROUPS + group) % WARP);
            total += share;
#pragma unroll
            for (int s = 0; s < PARTS; ++s) {
                const float4 part = *reinterpret_cast<const float4*>(half + (u * PARTS + s) * SLOT_FLOATS);
                values[s][0] += share * part.x;
                values[s][1] += share * part.y;
                values[s][2] += share * part.z;
                values[s][3] += share * part.w;
            }
        }
        fetch<Lanes>(plan, item, k + BATCHES * Lanes::PIECES, group, column, ring);
    }
    total = add_up<Lanes::GROUPS>(total);
    const float scale = total == 0.0f ? 0.0f : 1.0f / total;
    const nvr_tensors& tensors = params.tensors;
    Bits* out = static_cast<Bits*>(tensors.out) + item.row * tensors.out_row_stride + item.head * tensors.out_head_stride + column;
#pragma unroll
    for (int s = 0; s < PARTS; ++s) {
        Four<Bits> four;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) four.values[c] = Element::from_float(add_up<Lanes::GROUPS>(values[s][c]) * scale);
        if (group == 0 && column + s * WIDTH < plan.config.latent_dim) *reinterpret_cast<Four<Bits>*>(out + s * WIDTH) = four;
    }
    if (tensors.lse != nullptr && lane == 0 && item.strip == 0) {
        const float peak = plan.base2 ? base * LN2 : base;
        tensors.lse[item.row * plan.config.num_heads + item.head] = total == 0.0f ? -INFINITY : peak + logf(total);
    }
}

// PARTS: times 128 columns of a row.
template <class Element, int PARTS>
__global__ void __launch_bounds__(COMBINE_THREADS, COMBINE_BLOCKS_PER_SM) combine_kernel(VerifyParams params) {
    const Plan& plan = params.plan;
    const int strips = plan.config.latent_dim / STRIP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* ring = shared_memory() + warp * RING_FLOATS + lane * COLUMNS;
    const int32_t few = plan.workspace.counts->few, many = plan.workspace.counts->many;
    const int32_t of_many = many * plan.tile_rows * strips, items = of_many + few * plan.tile_rows;
    // Neighbouring items go to different blocks: when there are few, they spread over the SMs.
    for (int32_t i = warp * gridDim.x + blockIdx.x; i < items; i += COMBINE_WARPS * gridDim.x) {
        const bool whole = i >= of_many;
        const int32_t index = whole ? i - of_many : i / strips;
        const int32_t tile = index / plan.tile_rows, h = index % plan.tile_rows;
        const Merge merged = plan.workspace.merges[whole ? tile : plan.max_merges - 1 - tile];
        const int32_t flat = merged.tile * plan.tile_rows + h, token = flat / plan.row_heads, head = flat % plan.row_heads;
        const int64_t row = merged.row + token;
        if (token >= merged.tokens || head >= plan.config.num_heads || row >= params.rows) continue;
        // The list is older than the kernel before; partials and statistics are its work. Asked again for each item, which costs nothing.
        ptx::griddepcontrol_wait();
        const MergedRow item = {merged.slot, merged.pieces, h, whole ? 0 : i % strips, row, head};
        if (whole) {
            merge<Element, Lanes<PARTS, 1>>(params, item, ring);
        } else {
            merge<Element, Lanes<1, GROUPS>>(params, item, ring);
        }
    }
    // Also with nothing to merge: whatever comes next in the stream waits for this grid alone, which may not end before the other.
    ptx::griddepcontrol_wait();
}

// Calls visit with the lanes' shares of a whole row.
template <class Visit>
int for_parts(const nvr_plan_config& config, Visit visit) {
    static_assert(MAX_PARTS == 4, "a case for each");
    switch (ceil_div(config.latent_dim, WIDTH)) {
        case 1: return visit(Lanes<1, 1>{});
        case 2: return visit(Lanes<2, 1>{});
        case 3: return visit(Lanes<3, 1>{});
        default: return visit(Lanes<4, 1>{});
    }
}

int launch_combine(const Device& device, const VerifyParams& params, void* stream, bool overlap) {
    const Plan& plan = params.plan;
    const int64_t rows = static_cast<int64_t>(plan.max_merges) * plan.tile_rows;
    const int64_t needed = ceil_div(rows * plan.config.latent_dim / STRIP, COMBINE_WARPS);
    const dim3 grid(static_cast<unsigned>(min64(needed, device.sms * COMBINE_BLOCKS_PER_SM)));
    if (grid.x == 0) return NVR_OK;
    constexpr int64_t SHARED = COMBINE_WARPS * RING_FLOATS * static_cast<int64_t>(sizeof(float));
    return for_dtype(plan, [&](auto element) {
        return for_parts(plan.config, [&](auto lanes) {
            return launch<combine_kernel<decltype(element), decltype(lanes)::PARTS>>(device, "combine", grid, COMBINE_THREADS, SHARED, stream,
                                                                                     params, overlap);
        });
    });
}

}  // namespace nvr
