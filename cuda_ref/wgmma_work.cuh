// What the three roles of wgmma share: barriers, marks and operands in shared memory. The walk, the ring and the swizzle are mma's.
#pragma once

#include "mma_work.cuh"
#include "wgmma_config.cuh"

namespace nvr {
namespace wgmma {

// The mbarrier of a slot; FIRST: FULL, EMPTY, READY or SCORED.
template <uint32_t FIRST>
__device__ __forceinline__ uint32_t barrier_at(uint32_t base, uint32_t place) {
    return base + FIRST + 8 * place;
}

// The score warps.
__device__ __forceinline__ void score_sync() { ptx::named_barrier<1, WARPGROUP>::sync(); }

// A warp's own mark: one lane puts it down, and all pick it up after the last step of a piece. w: score warps first, then value warps.
template <class C>
__device__ __forceinline__ Mark* mark_of(uint32_t w) {
    return reinterpret_cast<Mark*>(shared_array<unsigned char>(C::MARKS + w * MARK_BYTES));
}

// A copy whose origin the compiler cannot see: what is computed from it is computed here, and not kept from before.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
#ifdef __CUDACC__
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Global memory that is read soon begins to travel. Nothing waits for it; a load without a use ptxas would leave out.
__device__ __forceinline__ void touch(const void* address) {
#ifdef __CUDACC__
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
#else
    (void)address;
#endif
}

// begin_walk, and the request's row of the table is fetched with it. All at once (volatile): ptxas would put each load where it is used first, one
// memory latency after the other, before the first copy can start.
__device__ __forceinline__ Walk begin_share(const Plan& plan) {
    const volatile Cursor* start = plan.workspace.starts + blockIdx.x;
    const int64_t begin = start[0].unit, end = start[1].unit;
    const int32_t request = start[0].request, tile = start[0].tile, unit = start[0].block;
    const Walk walk = {static_cast<uint32_t>(request), static_cast<uint32_t>(tile), static_cast<uint32_t>(unit), static_cast<uint32_t>(end - begin)};
    if (walk.left != 0) {
        // Each half of the row, which is 64 bytes: two sectors of the cache.
        const Request& row = request_of(plan, walk);
        touch(&row.q_len);
        touch(&row.slot_begin);
    }
    return walk;
}

// What is the same in all lanes, from lane 0, so that ptxas knows it and may keep it in a uniform register.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(ALL_LANES, x, 0); }

// An operand of wgmma in shared memory, laid out as wgmma_descriptor says. Addresses are in the low half of its descriptor, the high half is a
// constant. Uniform, so that the descriptors of a product are made by one addition each: otherwise by six instructions and two moves from
// ordinary registers.
template <int LEADING, int STRIDE, int SWIZZLE>
class Operand {
  public:
    __device__ __forceinline__ explicit Operand(uint32_t address) : low_(uniform(low(address))) {}

    // In two steps: the low half of its descriptor, worked out early, and the operand.
    static __device__ __forceinline__ uint32_t low(uint32_t address) {
        return static_cast<uint32_t>(ptx::wgmma_descriptor<LEADING, STRIDE, SWIZZLE>(address));
    }
    static __device__ __forceinline__ Operand at_low(uint32_t low) {
        Operand operand;
        operand.low_ = uniform(low);
        return operand;
    }

    // The descriptor of what lies `bytes`, a multiple of 16, further.
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
        constexpr uint64_t HIGH = ptx::wgmma_descriptor<LEADING, STRIDE, SWIZZLE>(0) >> 32 << 32;
        return HIGH | (low_ + (bytes >> 4));
    }

  private:
    __device__ __forceinline__ Operand() {}

    uint32_t low_;
};

}  // namespace wgmma
}  // namespace nvr
