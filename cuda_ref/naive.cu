// naive: the oracle. One warp per (row, head), no shared memory, no barrier; every head fetches every key again.
//
//     q    [width]   registers: lane holds dims lane, lane + 32, ...
//     key  [width]   registers, the same; score = butterfly sum over the warp
//     out  [latent]  registers: lane holds columns lane, lane + 32, ... which are the key dims it already has
//
// Online softmax, one key at a time. Sums run over 32 keys first and over the groups then: a single float32 sum over 100k keys would lose
// two more digits.
#include "keys.cuh"

namespace nvr {

constexpr int NAIVE_WARPS = 4;

// One lane's share of a (row, head).
template <class RowDims>
struct NaiveState {
    static constexpr int DIMS = RowDims::MAX_WIDTH / WARP;      // of a key
    static constexpr int COLUMNS = RowDims::MAX_LATENT / WARP;  // of the output
    float q[DIMS];
    float total[COLUMNS] = {}, group[COLUMNS] = {};  // finished groups of 32 keys; the group at work
    float total_weight = 0.0f, group_weight = 0.0f;
    float maximum = -INFINITY;
};

template <class Element, class RowDims>
__device__ __forceinline__ void load_row(const typename Element::Bits* row, const RowDims& dims, int lane,
                                         float (&values)[NaiveState<RowDims>::DIMS]) {
#pragma unroll
    for (int d = 0; d < NaiveState<RowDims>::DIMS; ++d) {
        values[d] = d * WARP < dims.width ? Element::to_float(row[d * WARP + lane]) : 0.0f;
    }
}

template <class Element, class RowDims>
__device__ __forceinline__ void add_key(const nvr_tensors& tensors, const typename Element::Bits* row, const RowDims& dims, int lane,
                                        NaiveState<RowDims>* state) {
    float key[NaiveState<RowDims>::DIMS], dot = 0.0f;
    load_row<Element>(row, dims, lane, key);
#pragma unroll
    for (int d = 0; d < NaiveState<RowDims>::DIMS; ++d) dot += state->q[d] * key[d];
    const float score = finish_score(tensors, warp_sum(dot));
    if (score > state->maximum) {  // the same in every lane
        const float alpha = exp_below(state->maximum, score);
        state->maximum = score;
        state->total_weight *= alpha;
        state->group_weight *= alpha;
#pragma unroll
        for (int c = 0; c < NaiveState<RowDims>::COLUMNS; ++c) {
            state->total[c] *= alpha;
            state->group[c] *= alpha;
        }
    }
    const float weight = exp_below(score, state->maximum);
    state->group_weight += weight;
#pragma unroll
    for (int c = 0; c < NaiveState<RowDims>::COLUMNS; ++c) state->group[c] += weight * key[c];
}

template <class RowDims>
__device__ __forceinline__ void close_group(NaiveState<RowDims>* state) {
    state->total_weight += state->group_weight;
    state->group_weight = 0.0f;
#pragma unroll
    for (int c = 0; c < NaiveState<RowDims>::COLUMNS; ++c) {
        state->total[c] += state->group[c];
        state->group[c] = 0.0f;
    }
}

template <class Element, class RowDims>
__global__ void __launch_bounds__(NAIVE_WARPS * WARP) naive_kernel(VerifyParams params) {
    using Bits = typename Element::Bits;
    const RowDims dims(params.plan.config);
    const nvr_tensors& tensors = params.tensors;
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x % WARP;
    const int head = blockIdx.y * NAIVE_WARPS + threadIdx.x / WARP;
    const int32_t r = params.plan.workspace.row_request[row];
    if (r < 0 || head >= params.plan.config.num_heads) return;
    const RowKeys keys = keys_of_row(params.plan.workspace.requests[r], static_cast<int32_t>(row));

    NaiveState<RowDims> state;
    load_row<Element>(static_cast<const Bits*>(tensors.q) + row * tensors.q_row_stride + head * tensors.q_head_stride, dims, lane, state.q);
    for (int32_t first = 0; first < keys.kv_len; first += WARP) {
        const bool visible = is_visible(params.plan, keys, first + lane);
        const Bits* my_row = visible ? key_row<Element>(params, keys, first + lane) : nullptr;
        for (uint32_t rest = __ballot_sync(ALL_LANES, visible); rest != 0; rest &= rest - 1) {
            add_key<Element>(tensors, shuffle_pointer(my_row, __ffs(rest) - 1), dims, lane, &state);
        }
        close_group(&state);
    }

    const bool empty = state.total_weight == 0.0f;
    const float scale = empty ? 0.0f : 1.0f / state.total_weight;
    Bits* out = static_cast<Bits*>(tensors.out) + row * tensors.out_row_stride + head * tensors.out_head_stride;
#pragma unroll
    for (int c = 0; c < NaiveState<RowDims>::COLUMNS; ++c) {
        if (c * WARP < dims.latent) out[c * WARP + lane] = Element::from_float(state.total[c] * scale);
    }
    if (tensors.lse != nullptr && lane == 0) {
        tensors.lse[row * params.plan.config.num_heads + head] = empty ? -INFINITY : state.maximum + logf(state.total_weight);
    }
}

int launch_naive(const Device& device, const VerifyParams& params, void* stream) {
    const dim3 grid(static_cast<unsigned>(params.rows), static_cast<unsigned>(ceil_div(params.plan.config.num_heads, NAIVE_WARPS)));
    return for_dtype(params.plan, [&](auto element) {
        return for_dims(params.plan.config, [&](auto dims) {
            return launch<naive_kernel<decltype(element), typename decltype(dims)::type>>(device, "naive", grid, NAIVE_WARPS * WARP, 0,
                                                                                          stream, params);
        });
    });
}

}  // namespace nvr
