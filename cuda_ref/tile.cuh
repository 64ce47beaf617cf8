// One query row x one tile of heads against a run of key tiles: the steps that flash and paged share.
//
//   shared memory, float32                                     256 threads = 8 warps
//     q      [HEADS][width]     the tile's heads                 load:    warp w brings keys w, w + 8, ... of the tile
//     kv     [KEYS][width]      one key tile, all heads use it   scores:  warp w, the keys it brought, all heads
//     p      [HEADS][KEYS + 4]  scores, then probabilities       softmax: warp w, head rows w, w + 8, ...; lanes over keys
//     alpha  [HEADS]            rescale factors                  P * V:   thread t owns columns t, t + 256 of all heads
//     piece                     what paged works on
//
// A hidden key is never fetched: its row is stored as 0 and its score is -inf, so that NaN or Inf in it cannot reach the result.
#pragma once

#include "keys.cuh"

namespace nvr {

constexpr int TILE_THREADS = 256;
constexpr int TILE_WARPS = TILE_THREADS / WARP;
// Padding of a row of p, in floats: keeps float4 alignment and spreads the HEADS rows, written in one step, over the banks.
constexpr int P_PADDING = 4;

__host__ __device__ constexpr int64_t tile_floats(int64_t heads, int64_t keys, int64_t width) {
    return (heads + keys) * width + heads * (keys + P_PADDING) + heads + static_cast<int64_t>(sizeof(Cursor) / sizeof(float));
}

template <class TileShape>
struct TileShared {
    static constexpr int P_STRIDE = TileShape::KEYS + P_PADDING;
    float *q, *kv, *p, *alpha;
    Cursor* piece;  // all extents above are multiples of 32 bytes
    __device__ explicit TileShared(int width) {
        q = shared_memory();
        kv = q + TileShape::HEADS * width;
        p = kv + TileShape::KEYS * width;
        alpha = p + TileShape::HEADS * P_STRIDE;
        piece = reinterpret_cast<Cursor*>(alpha + TileShape::HEADS);
    }
};

template <class TileShape, class RowDims>
struct TileState {
    static constexpr int ROWS = TileShape::HEADS / TILE_WARPS;                             // head rows of a warp
    static constexpr int COLUMNS = (RowDims::MAX_LATENT + TILE_THREADS - 1) / TILE_THREADS;  // of a thread
    static_assert(ROWS * TILE_WARPS == TileShape::HEADS, "every warp owns as many head rows");
    static_assert(TileShape::KEYS % TILE_WARPS == 0 && TileShape::KEYS <= WARP, "every warp brings as many keys; a lane a key");
    float out[COLUMNS][TileShape::HEADS] = {};  // thread t: column c * 256 + t
    float maximum[ROWS], weight[ROWS];          // warp w: head row w + i * 8; weight = sum of probabilities
    __device__ TileState() {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            maximum[i] = -INFINITY;
            weight[i] = 0.0f;
        }
    }
};

// The place of the tile in the problem.
struct TilePlace {
    int32_t row;
    int head;   // first head of the tile
    int heads;  // heads that exist, at most TileShape::HEADS
};

template <class TileShape>
__device__ __forceinline__ TilePlace place_of_tile(const Plan& plan, int32_t row, int head_tile) {
    const int head = head_tile * TileShape::HEADS;
    const int rest = plan.config.num_heads - head;
    return {row, head, rest < TileShape::HEADS ? rest : TileShape::HEADS};
}

template <class Element, class TileShape, class RowDims>
__device__ void load_q(const VerifyParams& params, const TilePlace& place, const RowDims& dims, const TileShared<TileShape>& shared) {
    using Bits = typename Element::Bits;
    const nvr_tensors& tensors = params.tensors;
    const Bits* q = static_cast<const Bits*>(tensors.q) + static_cast<int64_t>(place.row) * tensors.q_row_stride;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1  // once a piece: registers matter more here than speed
    for (int h = warp; h < TileShape::HEADS; h += TILE_WARPS) {
        float* target = shared.q + h * dims.width;
        const Bits* source = q + (place.head + h) * tensors.q_head_stride;
        for (int d = lane * Element::VECTOR; d < dims.width; d += WARP * Element::VECTOR) {
            if (h < place.heads) {
                copy_vector<Element>(source + d, target + d);
            } else {  // heads that do not exist score 0 and are not stored
                for (int i = 0; i < Element::VECTOR; ++i) target[d + i] = 0.0f;
            }
        }
    }
}

// Brings the warp's keys of the tile. row: the address of key `lane` of the tile; visible: bit k = key k is visible.
template <class Element, class TileShape, class RowDims>
__device__ __forceinline__ void load_keys(const typename Element::Bits* row, uint32_t visible, const RowDims& dims,
                                          const TileShared<TileShape>& shared) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < TileShape::KEYS / TILE_WARPS; ++i) {
        const int k = warp + i * TILE_WARPS;
        float* target = shared.kv + k * dims.width;
        const typename Element::Bits* source = shuffle_pointer(row, k);
        if (visible >> k & 1u) {
#pragma unroll
            for (int d = lane * Element::VECTOR; d < dims.width; d += WARP * Element::VECTOR) copy_vector<Element>(source + d, target + d);
        } else {
            for (int d = lane; d < dims.width; d += WARP) target[d] = 0.0f;
        }
    }
}

// Sums each of N accumulators over the warp; afterwards lane l holds the sum of accumulator l * N / 32.
// Each step hands half of the LIVE accumulators to the partner lane and keeps the other half: N - 1 shuffles instead of 5 N.
// A recursion, not a loop, so that every index is a constant before the compiler decides what stays in registers.
template <int LIVE, int MASK = WARP / 2, int N>
__device__ __forceinline__ float transpose_sum(float (&values)[N], int lane) {
    static_assert(N <= WARP && (N & (N - 1)) == 0, "one sum for each lane, or for each group of lanes");
    if constexpr (MASK == 0) {
        return values[0];
    } else if constexpr (LIVE == 1) {
        values[0] += __shfl_xor_sync(ALL_LANES, values[0], MASK);
        return transpose_sum<1, MASK / 2>(values, lane);
    } else {
        constexpr int HALF = LIVE / 2;
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float kept = upper ? values[i + HALF] : values[i];
            const float given = upper ? values[i] : values[i + HALF];
            values[i] = kept + __shfl_xor_sync(ALL_LANES, given, MASK);
        }
        return transpose_sum<HALF, MASK / 2>(values, lane);
    }
}

// Scores of the warp's keys and all heads. Lanes share out the dims: conflict-free reads, and each value read once serves HEADS (or
// KEYS / 8) multiply-adds.
template <class TileShape, class RowDims>
__device__ __forceinline__ void compute_scores(const nvr_tensors& tensors, uint32_t visible, const RowDims& dims,
                                               const TileShared<TileShape>& shared) {
    constexpr int KEYS = TileShape::KEYS / TILE_WARPS, HEADS = TileShape::HEADS, SUMS = KEYS * HEADS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sums[SUMS] = {};
#pragma unroll(16 / HEADS)  // about 18 loads in flight either way; more would spill
    for (int d = lane; d < dims.width; d += WARP) {
        float key[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; ++i) key[i] = shared.kv[(warp + i * TILE_WARPS) * dims.width + d];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float q = shared.q[h * dims.width + d];
#pragma unroll
            for (int i = 0; i < KEYS; ++i) sums[i * HEADS + h] += q * key[i];
        }
    }
    const float dot = transpose_sum<SUMS>(sums, lane);
    const int mine = lane * SUMS / WARP;
    const int k = warp + mine / HEADS * TILE_WARPS;
    const float score = finish_score(tensors, dot);
    // With 16 sums two lanes hold the same one and write the same value.
    shared.p[mine % HEADS * TileShared<TileShape>::P_STRIDE + k] = visible >> k & 1u ? score : -INFINITY;
}

// Online softmax of the warp's head rows: scores -> probabilities in place, rescale factor -> alpha.
template <class TileShape, class RowDims>
__device__ __forceinline__ void online_softmax(const TileShared<TileShape>& shared, TileState<TileShape, RowDims>* state) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < TileState<TileShape, RowDims>::ROWS; ++i) {
        const int h = warp + i * TILE_WARPS;
        float* p = shared.p + h * TileShared<TileShape>::P_STRIDE;
        const float score = lane < TileShape::KEYS ? p[lane] : -INFINITY;
        const float maximum = fmaxf(state->maximum[i], warp_max(score));
        const float probability = exp_below(score, maximum);
        const float alpha = exp_below(state->maximum[i], maximum);
        state->maximum[i] = maximum;
        state->weight[i] = state->weight[i] * alpha + warp_sum(probability);
        if (lane < TileShape::KEYS) p[lane] = probability;
        if (lane == 0) shared.alpha[h] = alpha;
    }
}

// out = out * alpha + P * V. The tile is summed by itself first: a single float32 sum over 100k keys would lose two more digits.
template <class TileShape, class RowDims>
__device__ __forceinline__ void add_values(const RowDims& dims, const TileShared<TileShape>& shared,
                                           TileState<TileShape, RowDims>* state) {
    constexpr int COLUMNS = TileState<TileShape, RowDims>::COLUMNS, HEADS = TileShape::HEADS;
    constexpr int STEP = 4;  // keys: one float4 of p
    const int column = threadIdx.x;
    if (column >= dims.latent) return;  // whole warps: latent is a multiple of 32
    float sums[COLUMNS][HEADS] = {};
#pragma unroll 1  // unrolled, the loads of several steps would be in flight and spill
    for (int k = 0; k < TileShape::KEYS; k += STEP) {
        float v[COLUMNS][STEP];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int own = column + c * TILE_THREADS;
#pragma unroll
            for (int i = 0; i < STEP; ++i) v[c][i] = own < dims.latent ? shared.kv[(k + i) * dims.width + own] : 0.0f;
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float4 p = *reinterpret_cast<const float4*>(shared.p + h * TileShared<TileShape>::P_STRIDE + k);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                sums[c][h] += p.x * v[c][0];
                sums[c][h] += p.y * v[c][1];
                sums[c][h] += p.z * v[c][2];
                sums[c][h] += p.w * v[c][3];
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const float alpha = shared.alpha[h];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) state->out[c][h] = state->out[c][h] * alpha + sums[c][h];
    }
}

// Runs blocks [begin, end) of the row's keys through the state.
template <class Element, class TileShape, class RowDims>
__device__ __forceinline__ void attend(const VerifyParams& params, const RowKeys& keys, const TilePlace& place, int begin, int end,
                                       const RowDims& dims, const TileShared<TileShape>& shared, TileState<TileShape, RowDims>* state) {
    const int lane = threadIdx.x % WARP;
    load_q<Element>(params, place, dims, shared);
    __syncthreads();  // hazard: every warp's scores read the q rows that other warps wrote
    for (int block = begin; block < end; ++block) {
        const int32_t key = block * TileShape::KEYS + lane;
        const bool mine = lane < TileShape::KEYS && is_visible(params.plan, keys, key);
        const uint32_t visible = __ballot_sync(ALL_LANES, mine);
        if (visible == 0) continue;  // the same in every warp
        load_keys<Element>(mine ? key_row<Element>(params, keys, key) : nullptr, visible, dims, shared);
        __syncwarp();  // hazard: the warp's scores read the key rows that its other lanes wrote
        compute_scores(params.tensors, visible, dims, shared);
        __syncthreads();  // hazard: softmax reads scores in p that other warps wrote
        online_softmax(shared, state);
        __syncthreads();  // hazard: P * V reads p, alpha and kv that other warps wrote
        add_values(dims, shared, state);
        __syncthreads();  // hazard: the next tile overwrites kv and p, the caller alpha, that slow warps still read in P * V
    }
}

// Normalises the state and writes it: head row h to out + h * stride, and lse[h] or statistics[h] = (maximum, weight), where those are not
// NULL. Heads that do not exist are left out.
template <class Element, class TileShape, class RowDims>
__device__ __forceinline__ void finish(int heads, const RowDims& dims, const TileShared<TileShape>& shared,
                                       const TileState<TileShape, RowDims>& state, typename Element::Bits* out, int64_t stride,
                                       float* lse, float2* statistics) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < TileState<TileShape, RowDims>::ROWS; ++i) {
        const int h = warp + i * TILE_WARPS;
        const float weight = state.weight[i];
        if (lane != 0) continue;
        shared.alpha[h] = weight == 0.0f ? 0.0f : 1.0f / weight;
        if (h < heads && lse != nullptr) lse[h] = weight == 0.0f ? -INFINITY : state.maximum[i] + logf(weight);
        if (h < heads && statistics != nullptr) statistics[h] = {state.maximum[i], weight};
    }
    __syncthreads();  // hazard: every thread reads the factors in alpha that the owning warps wrote
    out += threadIdx.x;
#pragma unroll
    for (int h = 0; h < TileShape::HEADS; ++h) {
        if (h >= heads) break;
        const float scale = shared.alpha[h];
#pragma unroll
        for (int c = 0; c < TileState<TileShape, RowDims>::COLUMNS; ++c) {
            const int column = threadIdx.x + c * TILE_THREADS;
            if (column < dims.latent) out[c * TILE_THREADS] = Element::from_float(state.out[c][h] * scale);
        }
        out += stride;
    }
}

// finish() into out and lse.
template <class Element, class TileShape, class RowDims>
__device__ __forceinline__ void finish_row(const VerifyParams& params, const TilePlace& place, const RowDims& dims,
                                           const TileShared<TileShape>& shared, const TileState<TileShape, RowDims>& state) {
    const nvr_tensors& tensors = params.tensors;
    const int64_t row = place.row;
    typename Element::Bits* out =
        static_cast<typename Element::Bits*>(tensors.out) + row * tensors.out_row_stride + place.head * tensors.out_head_stride;
    float* lse = tensors.lse == nullptr ? nullptr : tensors.lse + row * params.plan.config.num_heads + place.head;
    finish<Element>(place.heads, dims, shared, state, out, tensors.out_head_stride, lse, nullptr);
}

}  // namespace nvr
