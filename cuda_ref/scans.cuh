// Scans over the block of schedule, a value a thread.
#pragma once

#include "common.cuh"

namespace nvr {

constexpr int SCHEDULE_THREADS = 256;
constexpr int SCHEDULE_WARPS = SCHEDULE_THREADS / WARP;

// What schedule sums up over the requests; of `longest` the maximum.
struct Line {
    int64_t mask_bytes;
    int64_t units;
    int64_t slots;  // deterministic: partials; otherwise one a tile, for a CTA each
    int64_t longest;  // units of a tile
};

__device__ inline int64_t join(int64_t a, int64_t b) { return a + b; }
__device__ inline Line join(const Line& a, const Line& b) {
    return {a.mask_bytes + b.mask_bytes, a.units + b.units, a.slots + b.slots, max64(a.longest, b.longest)};
}

__device__ inline int64_t shuffle_up(int64_t x, int distance) { return __shfl_up_sync(ALL_LANES, x, distance); }
__device__ inline Line shuffle_up(const Line& x, int distance) {
    return {shuffle_up(x.mask_bytes, distance), shuffle_up(x.units, distance), shuffle_up(x.slots, distance), shuffle_up(x.longest, distance)};
}

// Joins the values of the lanes of the warp up to this one, its own included.
template <class Value>
__device__ Value warp_scan(const Value& own, int lane) {
    Value inclusive = own;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const Value other = shuffle_up(inclusive, distance);
        if (lane >= distance) inclusive = join(inclusive, other);
    }
    return inclusive;
}

// Returns *carry joined with the values of the threads before this one; *carry, the same in every thread, takes those of the whole block in.
// One barrier is inside; the caller puts another between two calls with the same of_warps [SCHEDULE_WARPS].
template <class Value>
__device__ Value block_scan(const Value& own, Value* carry, Value* of_warps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Value inclusive = warp_scan(own, lane);
    if (lane == WARP - 1) of_warps[warp] = inclusive;
    const Value others = shuffle_up(inclusive, 1);
    __syncthreads();  // hazard: every thread reads of_warps that the last lane of each warp wrote
    Value before = *carry;
    for (int w = 0; w < SCHEDULE_WARPS; ++w) {
        if (w == warp) before = *carry;
        *carry = join(*carry, of_warps[w]);
    }
    return lane == 0 ? before : join(before, others);
}

}  // namespace nvr
