// The device vocabulary: one function a PTX instruction, named as in numba_verify/gpu/ptx.py, so that a kernel and its twin read alike.
//
// Results of several registers come back through references to arrays; indexed by constants they stay in registers. Shared memory is
// named by its 32-bit address (shared_address), global memory by pointers. Titles in quotation marks are sections of the PTX ISA manual.
// Warp-wide instructions (named barriers, ldmatrix, mma, setmaxnreg) want all 32 lanes. wgmma: wgmma_ptx.cuh.
#pragma once

#include "common.cuh"

#ifndef __CUDACC__
#include "host/ptx_on_cpu.h"
#else

namespace nvr {
namespace ptx {

// The 32-bit address of something in shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// --- synchronisation: "Parallel Synchronization and Communication Instructions" ------------------------------------------------------

// "bar, barrier": THREADS of the block meet at barrier NUMBER. sync waits for them all and sees what they wrote before; arrive goes on.
template <int NUMBER, int THREADS>
struct named_barrier {
    static_assert(1 <= NUMBER && NUMBER <= 15 && THREADS > 0 && THREADS % 32 == 0, "barrier 0 is __syncthreads; whole warps arrive");
    static __device__ __forceinline__ void sync() { asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory"); }
    static __device__ __forceinline__ void arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory"); }
};

// The same with the barrier's number at run time, 1 to 15.
template <int THREADS>
struct numbered_barrier {
    static_assert(THREADS > 0 && THREADS % 32 == 0, "whole warps arrive");
    static __device__ __forceinline__ void sync(uint32_t number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }
    static __device__ __forceinline__ void arrive(uint32_t number) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }
};

// "mbarrier.init": the 8 aligned bytes at the address become a barrier whose every phase wants `count` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t address, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}

// "mbarrier.arrive": one arrival; what this thread wrote before is seen by whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint32_t address) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address) : "memory");
}

// The same, `count` arrivals at once. A single instruction from sm_90 on.
__device__ __forceinline__ void mbarrier_arrive_count(uint32_t address, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(address), "r"(count) : "memory");
#else
    for (uint32_t i = 0; i < count; ++i) mbarrier_arrive(address);
#endif
}

// "mbarrier.test_wait / try_wait": returns when the phase of that parity has completed: phases 0, 2, ... have parity 0. A new barrier
// counts as having completed a phase of parity 1. try_wait lets the hardware suspend the thread; it is there from sm_90 on.
__device__ __forceinline__ void mbarrier_wait(uint32_t address, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred completed;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 completed, [%0], %1;\n"
        "@!completed bra again;\n"
        "}" ::"r"(address), "r"(parity) : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred completed;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared.b64 completed, [%0], %1;\n"
        "@!completed bra again;\n"
        "}" ::"r"(address), "r"(parity) : "memory");
#endif
}

// "mbarrier.test_wait": whether the phase of that parity has completed, as mbarrier_wait counts. Does not wait.
__device__ __forceinline__ bool mbarrier_test(uint32_t address, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred completed;\n"
        "mbarrier.test_wait.parity.shared.b64 completed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, completed;\n"
        "}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
    return done != 0;
}

// --- asynchronous copies: "Data Movement and Conversion Instructions: Asynchronous copy" ---------------------------------------------

// "cp.async": starts to copy 16 aligned bytes; they may be read only after commit and wait_group, or after the mbarrier phase.
__device__ __forceinline__ void cp_async_16(uint32_t shared_address, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address), "l"(source) : "memory");
}

// The same, but only the first source_bytes (0 to 16) are read, the rest of the 16 is zero.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t shared_address, const void* source, uint32_t source_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(source_bytes) : "memory");
}

// "cp.async.commit_group": the copies that this thread has started since the last commit become its newest group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// "cp.async.wait_group": waits for all of this thread's groups but the NEWEST ones. A barrier makes the data visible to other threads.
template <int NEWEST>
__device__ __forceinline__ void cp_async_wait_group() {
    static_assert(NEWEST >= 0, "a number of groups");
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// "cp.async.mbarrier.arrive": an arrival as soon as all copies that this thread has started have landed. noinc: one of the `count` of init.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t address) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}

// --- tensor cores: "Warp Level Matrix Instructions" ----------------------------------------------------------------------------------

// "ldmatrix": four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 (16 aligned bytes) of matrix l / 8. result[m]
// of lane l: row l / 4, columns 2 (l % 4) (low half) and 2 (l % 4) + 1 (high half) of matrix m.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&result)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(address)
                 : "memory");
}

// The same matrices transposed: result[m] of lane l: rows 2 (l % 4) (low half) and 2 (l % 4) + 1 (high half) of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&result)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(address)
                 : "memory");
}

// "mma", m16n8k16: C (16 x 8 float32) += A (16 x 16) B (16 x 8). Fragments, g = lane / 4, t = lane % 4, low half first:
//     a[0]  A[g, 2t], A[g, 2t + 1]             a[1]  A[g + 8, 2t], A[g + 8, 2t + 1]
//     a[2]  A[g, 2t + 8], A[g, 2t + 9]         a[3]  A[g + 8, 2t + 8], A[g + 8, 2t + 9]
//     b0    B[2t, g], B[2t + 1, g]             b1    B[2t + 8, g], B[2t + 9, g]
//     c[0], c[1]  C[g, 2t], C[g, 2t + 1]       c[2], c[3]  C[g + 8, 2t], C[g + 8, 2t + 1]
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- conversion and arithmetic -------------------------------------------------------------------------------------------------------

// "cvt": two 16-bit floats in one word, nearest even. PTX order: the upper half comes first.
__device__ __forceinline__ uint32_t f32_to_bf16x2(float high, float low) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ uint32_t f32_to_f16x2(float high, float low) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// "ex2": 2^x within 2 ulp; ex2(-inf) = 0; subnormal arguments and results count as 0.
__device__ __forceinline__ float ex2_approx_f32(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// "lg2": log2 x; lg2(0) = -inf.
__device__ __forceinline__ float lg2_approx_f32(float x) {
    float result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// --- grids: "Parallel Synchronization and Communication Instructions: griddepcontrol" ------------------------------------------------

// For a launch with `overlap` (device.cuh). Every thread of the later grid has to wait, also one with nothing to do: whatever comes next in the
// stream starts when that grid has ended, and takes all before it for ended too. Both do nothing before sm_90, where no grid overlaps.

// ".launch_dependents": as far as this block is concerned the next grid may start, where there is room for its blocks.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ".wait": returns when the grid before this one has ended and what it wrote is visible; at once after any other launch.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- registers: "Miscellaneous Instructions: setmaxnreg" -----------------------------------------------------------------------------

// A warpgroup asks for registers (waits until there are as many) or gives some back. sm_90a only; elsewhere every thread keeps its share.
template <int COUNT, bool INCREASE>
__device__ __forceinline__ void set_max_registers() {
    static_assert(24 <= COUNT && COUNT <= 256 && COUNT % 8 == 0, "registers a thread, a multiple of 8");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (INCREASE) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
    }
#endif
}

}  // namespace ptx
}  // namespace nvr
#endif
