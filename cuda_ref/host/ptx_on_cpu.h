// ptx.cuh for g++: the same names, on the fibers of cuda_on_cpu.h.
//
// * A 32-bit shared address is the offset in the block's dynamic shared memory plus SHARED_BASE, where sm_80 and later begin too: an offset
//   given for an address is out of bounds and reported.
// * A copy lands as late as a GPU may let it: when its thread waits for its group, or when somebody waits or looks for the mbarrier
//   phase that it is part of and nothing else is missing. Until then its target is NaN; AddressSanitizer reports every access to it.
// * mma sums in double and rounds once; a tensor core is a little coarser.
#pragma once

#include "cuda_on_cpu.h"

namespace nvr {
namespace host {

constexpr uint32_t SHARED_BASE = 1024;

uint32_t address_of_shared(const void* pointer);

void ldmatrix(uint32_t (&result)[4], uint32_t address, bool transposed);
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

void begin_copy(uint32_t shared_address, const void* source, uint32_t source_bytes);
void commit_copies();
void wait_for_copies(int newest);

void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, uint32_t count);
void mbarrier_arrive_after_copies(uint32_t address);
void mbarrier_wait(uint32_t address, uint32_t parity);
bool mbarrier_test(uint32_t address, uint32_t parity);

void named_barrier(int number, int threads, bool wait);

// wgmma (wgmma_on_cpu.h): what a product is, apart from its registers. Of A either the descriptor or the registers.
struct WgmmaForm {
    uint64_t a, b;
    int count;  // accumulators of a thread
    bool accumulate, transpose_b, bf16, a_in_registers;
};

void wgmma(float* acc, const uint32_t* a, const WgmmaForm& form);
void wgmma_fence();
void wgmma_commit();
// acc: NULL if it takes none.
void wgmma_wait(int newest, float* acc, int count);

}  // namespace host

namespace ptx {

inline uint32_t shared_address(const void* pointer) { return host::address_of_shared(pointer); }

template <int NUMBER, int THREADS>
struct named_barrier {
    static_assert(1 <= NUMBER && NUMBER <= 15 && THREADS > 0 && THREADS % 32 == 0, "barrier 0 is __syncthreads; whole warps arrive");
    static void sync() { host::named_barrier(NUMBER, THREADS, true); }
    static void arrive() { host::named_barrier(NUMBER, THREADS, false); }
};

template <int THREADS>
struct numbered_barrier {
    static_assert(THREADS > 0 && THREADS % 32 == 0, "whole warps arrive");
    static void sync(uint32_t number) { host::named_barrier(static_cast<int>(number), THREADS, true); }
    static void arrive(uint32_t number) { host::named_barrier(static_cast<int>(number), THREADS, false); }
};

inline void mbarrier_init(uint32_t address, uint32_t count) { host::mbarrier_init(address, count); }
inline void mbarrier_arrive(uint32_t address) { host::mbarrier_arrive(address, 1); }
inline void mbarrier_arrive_count(uint32_t address, uint32_t count) { host::mbarrier_arrive(address, count); }
inline void mbarrier_wait(uint32_t address, uint32_t parity) { host::mbarrier_wait(address, parity); }
inline bool mbarrier_test(uint32_t address, uint32_t parity) { return host::mbarrier_test(address, parity); }

inline void cp_async_16(uint32_t shared_address, const void* source) { host::begin_copy(shared_address, source, 16); }
inline void cp_async_16_zfill(uint32_t shared_address, const void* source, uint32_t source_bytes) {
    host::begin_copy(shared_address, source, source_bytes);
}
inline void cp_async_commit() { host::commit_copies(); }
template <int NEWEST>
void cp_async_wait_group() {
    static_assert(NEWEST >= 0, "a number of groups");
    host::wait_for_copies(NEWEST);
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t address) { host::mbarrier_arrive_after_copies(address); }

inline void ldmatrix_x4(uint32_t (&result)[4], uint32_t address) { host::ldmatrix(result, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&result)[4], uint32_t address) { host::ldmatrix(result, address, true); }
inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { host::mma_bf16(c, a, b0, b1); }
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { host::mma_fp16(c, a, b0, b1); }

inline uint32_t f32_to_bf16x2(float high, float low) {
    return static_cast<uint32_t>(host::float_to_bf16(high)) << 16 | host::float_to_bf16(low);
}
inline uint32_t f32_to_f16x2(float high, float low) {
    return static_cast<uint32_t>(host::float_to_fp16(high)) << 16 | host::float_to_fp16(low);
}
// .ftz: subnormal arguments and results count as 0; 2^x of the former is 1 either way.
inline float ex2_approx_f32(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float lg2_approx_f32(float x) { return log2f(x); }

// Grids run one after another here.
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

template <int COUNT, bool INCREASE>
void set_max_registers() {
    static_assert(24 <= COUNT && COUNT <= 256 && COUNT % 8 == 0, "registers a thread, a multiple of 8");
}

}  // namespace ptx
}  // namespace nvr
