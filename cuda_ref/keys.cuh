// Which keys a row sees and where they lie: shared by all verify kernels.
#pragma once

#include "verify_attn.cuh"

namespace nvr {

// What a warp needs to walk the keys of one query row. Keys, rows and slots count in 32 bits (validate.cu sees to it), and pointers are
// made where they are used: registers are scarce.
struct RowKeys {
    int32_t prefix, kv_len;
    int32_t q_begin;     // row of the request's first draft token
    int32_t slot_begin;  // of the request's first token
    int32_t row;
};

__device__ __forceinline__ RowKeys keys_of_row(const Request& request, int32_t row) {
    return {static_cast<int32_t>(request.prefix), static_cast<int32_t>(request.kv_len), static_cast<int32_t>(request.q_begin),
            static_cast<int32_t>(request.slot_begin), row};
}

__device__ __forceinline__ bool is_visible(const Plan& plan, const RowKeys& keys, int32_t key) {
    if (key < keys.prefix) return true;
    if (key >= keys.kv_len) return false;
    const int32_t draft = key - keys.prefix;
    const uint32_t* words = plan.workspace.visibility + static_cast<int64_t>(keys.row) * plan.words;
    return (words[draft / WARP] >> (draft % WARP)) & 1u;
}

// Address of the row of a visible key.
template <class Element>
__device__ __forceinline__ const typename Element::Bits* key_row(const VerifyParams& params, const RowKeys& keys, int32_t key) {
    using Bits = typename Element::Bits;
    const nvr_tensors& tensors = params.tensors;
    const nvr_plan_config& config = params.plan.config;
    if (key >= keys.prefix && !config.draft_in_cache) {
        const int64_t draft_row = keys.q_begin + key - keys.prefix;
        return static_cast<const Bits*>(tensors.draft_kv) + draft_row * tensors.draft_row_stride;
    }
    const uint32_t slot = params.plan.workspace.slots[keys.slot_begin + key];
    int64_t offset = slot * tensors.kv_token_stride;
    // Nonzero only when pages do not follow each other without a gap; spares the usual case the division.
    const int64_t gap = tensors.kv_page_stride - config.page_size * tensors.kv_token_stride;
    if (gap != 0) offset += slot / static_cast<uint32_t>(config.page_size) * gap;
    return static_cast<const Bits*>(tensors.kv_cache) + offset;
}

// The row address that another lane holds.
template <class T>
__device__ __forceinline__ const T* shuffle_pointer(const T* pointer, int lane) {
    const unsigned long long address = reinterpret_cast<uintptr_t>(pointer);
    return reinterpret_cast<const T*>(static_cast<uintptr_t>(__shfl_sync(ALL_LANES, address, lane)));
}

__device__ __forceinline__ float finish_score(const nvr_tensors& tensors, float dot) {
    const float score = tensors.sm_scale * dot;
    return tensors.logit_cap > 0.0f ? tensors.logit_cap * tanhf(score / tensors.logit_cap) : score;
}

}  // namespace nvr
