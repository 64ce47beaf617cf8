// Producer warps of wgmma: a tile's queries, then its KV rows from anywhere in the pool, into the ring, a slot at a time.
//
//     thread t      rows t / 8, t / 8 + 16, ... of the slot; 16-byte chunk t % 8 of every segment: 8 neighbours copy 128 contiguous bytes a step
//
// A key at or past the end of the list becomes zeros: its weight is 0, and 0 * NaN from memory that nobody owns would not be. So do query rows past
// the request's last.
#pragma once

#include "mma_producer.cuh"
#include "wgmma_work.cuh"

namespace nvr {
namespace wgmma {

// The query rows of a tile into the next slots, the first of them `number`. target: where this thread's row of slot 0 goes; first: row of the request
// (draft token x head) that is the tile's first; rows: rows of the request that may be read.
template <class C>
__device__ __forceinline__ void fetch_queries(const VerifyParams& params, uint32_t base, uint32_t target, uint32_t number, uint32_t t, uint32_t first,
                                              uint32_t rows, int64_t q_begin) {
    constexpr int PASSES = C::ROWS / C::Q_SLOTS / PASS_ROWS;
    const nvr_tensors& tensors = params.tensors;
    const uint32_t heads = params.plan.row_heads, sub = t % THREADS_PER_ROW;
    uint32_t flat = first + t / THREADS_PER_ROW;
#pragma unroll 1
    for (int i = 0; i < C::Q_SLOTS; ++i) {
        const uint32_t place = place_of<C::SLOTS>(number + i);
        // The score or value warps have read what lay in this slot before; the first round finds it free.
        ptx::mbarrier_wait(barrier_at<C::EMPTY>(base, place), phase_of<C::SLOTS>(number + i) ^ 1);
#pragma unroll
        for (int j = 0; j < PASSES; ++j) {
            const uint32_t token = flat / heads, head = flat - token * heads;
            uintptr_t source = reinterpret_cast<uintptr_t>(tensors.q) + sub * CHUNK_BYTES;
            if (flat < rows) source += ((q_begin + token) * tensors.q_row_stride + head * tensors.q_head_stride) * ITEM_BYTES;
            copy_row<C>(target + place * C::BLOCK_BYTES + j * PASS_ROWS * C::ROW_PITCH, source, flat < rows);
            flat += PASS_ROWS;
        }
        ptx::cp_async_mbarrier_arrive_noinc(barrier_at<C::FULL>(base, place));
    }
}

// One producer thread from start to end. t: thread of the role.
template <class C>
__device__ __forceinline__ void produce(const VerifyParams& params, uint32_t base, uint32_t t) {
    constexpr int PASSES = C::KEYS / PASS_ROWS;
    const Plan& plan = params.plan;
    const uint32_t row = t / THREADS_PER_ROW, target = base + C::RING + row_offset<C>(row, t % THREADS_PER_ROW);
    uint32_t number = 0;  // of the next slot
    Walk walk = begin_share(plan);
    while (walk.left != 0) {
        find_tile<C>(plan, &walk);
        const Request& request = request_of(plan, walk);
        // Uniform what can be, worked out again what can be, and done with the request before the copies: a producer has 24 registers.
        const uint32_t rows = tokens_there(params, request) * plan.row_heads;
        const uint32_t kv_len = uniform(static_cast<uint32_t>(request.kv_len));
        const uint32_t pooled = plan.config.draft_in_cache ? kv_len : static_cast<uint32_t>(request.prefix);
        const uint32_t slot0 = uniform(static_cast<uint32_t>(request.slot_begin)), draft0 = uniform(static_cast<uint32_t>(request.q_begin));
        const uint32_t first = walk.tile * C::ROWS, steps = piece_length<C>(plan, walk), end = uniform(number + C::Q_SLOTS + steps);
        uint32_t key = walk.unit * C::KEYS + row;
        go_on<C>(plan, steps, &walk);
        uint32_t found[PASSES];
        find_slots(plan.workspace.slots, slot0, key, pooled, found);
        // While these are on their way.
        fetch_queries<C>(params, base, target, number, opaque(t), first, rows, draft0);
        number += C::Q_SLOTS;
#pragma unroll 1
        for (; number != end; ++number) {
            const uint32_t place = place_of<C::SLOTS>(number);
            // The value warps have read what lay in this slot before; the first round finds it free.
            ptx::mbarrier_wait(barrier_at<C::EMPTY>(base, place), phase_of<C::SLOTS>(number) ^ 1);
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                const uintptr_t source = key_row(params, found[i], key, pooled, kv_len, draft0) + opaque(t) % THREADS_PER_ROW * CHUNK_BYTES;
                copy_row<C>(target + place * C::BLOCK_BYTES + i * PASS_ROWS * C::ROW_PITCH, source, key < kv_len);
                found[i] = find_slot(plan.workspace.slots, slot0, key + C::KEYS, pooled);
                key += PASS_ROWS;
            }
            ptx::cp_async_mbarrier_arrive_noinc(barrier_at<C::FULL>(base, place));
        }
    }
    // No thread leaves with copies under way.
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
}

}  // namespace wgmma
}  // namespace nvr
