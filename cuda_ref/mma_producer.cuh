// Producer warps of mma: KV rows from anywhere in the pool into the ring, 16 keys a block, ahead of everybody else.
//
//     thread t      row t / 8 of the block; 16-byte chunks t % 8, t % 8 + 8, ...: 8 neighbours copy 128 contiguous bytes a step
//
// A key at or past the end of the list becomes zeros: its weight is 0, and 0 * NaN from memory that nobody owns would not be.
#pragma once

#include "mma_work.cuh"

namespace nvr {
namespace mma {

// Rows that the producers copy side by side; of mma a block.
constexpr int PASS_ROWS = PRODUCER_THREADS / THREADS_PER_ROW;
static_assert(PASS_ROWS == BLOCK_KEYS, "a row of each block a thread");

// Pool row of a key; read long before it is needed. pooled: keys that lie in the pool; slot0: of the request's first key (validate.cu sees to it
// that 32 bits are enough, and registers are scarce here).
__device__ __forceinline__ uint32_t find_slot(const uint32_t* slots, uint32_t slot0, uint32_t key, uint32_t pooled) {
    return key < pooled ? slots[slot0 + key] : 0;
}

// Pool rows of this thread's keys of one step, `key` its first.
template <int PASSES>
__device__ __forceinline__ void find_slots(const uint32_t* slots, uint32_t slot0, uint32_t key, uint32_t pooled, uint32_t (&found)[PASSES]) {
#pragma unroll
    for (int i = 0; i < PASSES; ++i) found[i] = find_slot(slots, slot0, key + i * PASS_ROWS, pooled);
}

// Address of pool row `slot`.
__device__ __forceinline__ uintptr_t pool_row(const VerifyParams& params, uint32_t slot) {
    const nvr_tensors& tensors = params.tensors;
    const int32_t page_size = params.plan.config.page_size;
    int64_t offset = slot * tensors.kv_token_stride;
    // Nonzero only when pages do not follow each other without a gap; spares the usual case the division.
    const int64_t gap = tensors.kv_page_stride - page_size * tensors.kv_token_stride;
    if (gap != 0) offset += slot / static_cast<uint32_t>(page_size) * gap;
    return reinterpret_cast<uintptr_t>(tensors.kv_cache) + offset * ITEM_BYTES;
}

// Address of the row of a key: pool row `slot`, or a draft row, of which the request's first is draft0.
__device__ __forceinline__ uintptr_t key_row(const VerifyParams& params, uint32_t slot, uint32_t key, uint32_t pooled, uint32_t kv_len,
                                             uint32_t draft0) {
    const nvr_tensors& tensors = params.tensors;
    uintptr_t row = pool_row(params, slot);
    if (key >= pooled && key < kv_len) {
        const int64_t draft_row = draft0 + (key - pooled);
        row = reinterpret_cast<uintptr_t>(tensors.draft_kv) + draft_row * tensors.draft_row_stride * ITEM_BYTES;
    }
    return row;
}

// Starts to copy a thread's chunks of one row, one of each segment; zeros if there is no such row.
template <class C>
__device__ __forceinline__ void copy_row(uint32_t target, uintptr_t source, bool valid) {
#pragma unroll
    for (uint32_t s = 0; s < C::SEGMENTS; ++s) {
        ptx::cp_async_16_zfill(target + s * C::SEGMENT_PITCH, reinterpret_cast<const void*>(source + s * SEGMENT_BYTES), valid ? CHUNK_BYTES : 0);
    }
}

// One producer thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void produce(const VerifyParams& params, uint32_t base, uint32_t t) {
    const Plan& plan = params.plan;
    const uint32_t row = t / THREADS_PER_ROW, sub = t % THREADS_PER_ROW;
    const uint32_t target = base + C::RING + row_offset<C>(row, sub);
    uint32_t number = 0;  // of the next block
    Walk walk = begin_walk(plan);
    while (walk.left != 0) {
        find_tile<C>(plan, &walk);
        const Request& request = request_of(plan, walk);
        const uint32_t kv_len = static_cast<uint32_t>(request.kv_len);
        const uint32_t pooled = plan.config.draft_in_cache ? kv_len : static_cast<uint32_t>(request.prefix);
        const uint32_t slot0 = static_cast<uint32_t>(request.slot_begin), draft0 = static_cast<uint32_t>(request.q_begin);
        uint32_t steps = piece_length<C>(plan, walk);
        uint32_t key = walk.unit * C::KEYS + row;
        uint32_t found[C::KEY_BLOCKS];
        find_slots(plan.workspace.slots, slot0, key, pooled, found);
        for (; steps != 0; --steps) {
            uint32_t sources[C::KEY_BLOCKS];
#pragma unroll
            for (int b = 0; b < C::KEY_BLOCKS; ++b) sources[b] = found[b];
            find_slots(plan.workspace.slots, slot0, key + C::KEYS, pooled, found);
#pragma unroll
            for (int b = 0; b < C::KEY_BLOCKS; ++b) {
                const uintptr_t source = key_row(params, sources[b], key, pooled, kv_len, draft0) + sub * CHUNK_BYTES;
                // The value warps have read what lay in this block before; the first round finds it free.
                ptx::mbarrier_wait(empty_at<C>(base, number), phase_of<C::BLOCKS>(number) ^ 1);
                copy_row<C>(target + block_offset<C>(number), source, key < kv_len);
                ptx::cp_async_mbarrier_arrive_noinc(full_at<C>(base, number));
                ++number;
                key += BLOCK_KEYS;
            }
        }
        // Worked out again: what lives through the steps takes registers from them.
        go_on<C>(plan, piece_length<C>(plan, walk), &walk);
    }
    // No thread leaves with copies under way.
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
}

}  // namespace mma
}  // namespace nvr
