// The device vocabulary of a warpgroup (numba_verify/gpu/warpgroup.py): four warps whose first is a multiple of four. sm_90a only; for other
// architectures these functions compile to nothing.
//
// A product goes on by itself: nobody may touch its accumulators, or write what it reads in shared memory, before a wgmma_wait for its
// group. Titles in quotation marks: "Asynchronous Warpgroup Level Matrix Instructions" if no other section is named.
//
//     fence_proxy_async()   whoever wrote the operands in shared memory, or who waited for them, if it was not TMA
//     wgmma_fence()         after the last other access to the accumulators and A registers; not between products
//     wgmma_ss(...) ...     products one after the other add up in the same registers
//     wgmma_commit()        those since the last commit are a group
//     wgmma_wait<0>(acc)    now the accumulators are there
#pragma once

#include "ptx.cuh"

namespace nvr {
namespace ptx {

// Bits 0 to 13 of a matrix descriptor: a shared address in units of 16 bytes ("Matrix Descriptor Format").
constexpr uint32_t DESCRIPTOR_FIELD = (1u << 14) - 1;

// The descriptor of an operand from `address` on. LEADING, STRIDE: distances in bytes, multiples of 16. SWIZZLE: 0, or 128 for rows of 128
// bytes whose 16-byte chunk c of row r lies at place c ^ (r % 8), from a multiple of 1024 bytes on. To move it by n bytes add n >> 4.
//     K-major, swizzle 0     8 x 8 matrices of 128 bytes (8 rows of 16); LEADING: to the next one in K, STRIDE: in M or N
//     K-major, swizzle 128   rows of 64 elements of K; STRIDE: to the next 8 rows; a k step of 16 is 32 bytes further
//     MN-major, swizzle 128  rows of 64 elements of N; LEADING: to the next 64 of N, STRIDE: to the next 8 of K
template <int LEADING, int STRIDE, int SWIZZLE>
__host__ __device__ constexpr uint64_t wgmma_descriptor(uint32_t address) {
    static_assert(LEADING >= 0 && STRIDE >= 0 && (LEADING | STRIDE) % 16 == 0 && (LEADING | STRIDE) >> 18 == 0, "multiples of 16, 18 bits");
    static_assert(SWIZZLE == 0 || SWIZZLE == 128, "no swizzle or that of 128 bytes");
    return static_cast<uint64_t>(SWIZZLE / 128) << 62 | static_cast<uint64_t>(STRIDE >> 4) << 32 | static_cast<uint64_t>(LEADING >> 4) << 16 |
           (address >> 4 & DESCRIPTOR_FIELD);
}

template <class Element>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<Bf16> = true;
template <class Element>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<Fp16> = true;

}  // namespace ptx
}  // namespace nvr

#ifndef __CUDACC__
#include "host/wgmma_on_cpu.h"
#else

namespace nvr {
namespace ptx {

// "membar / fence", .proxy.async: what this thread wrote to shared memory, or knows of, is there for wgmma to read.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// "wgmma.fence": products that follow see what this warp did to registers before.
__device__ __forceinline__ void wgmma_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// "wgmma.commit_group": the products since the last commit become the newest group.
__device__ __forceinline__ void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// "wgmma.wait_group": waits for all groups but the NEWEST ones, whose accumulators a later wait takes.
template <int NEWEST>
__device__ __forceinline__ void wgmma_wait() {
    static_assert(0 <= NEWEST && NEWEST <= 7, "a number of groups");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
#endif
}

// The instructions by the number of accumulators a thread has, half the columns of B: those widths that are listed below.
template <int COUNT>
struct WgmmaOf;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Inline assembly wants every operand written out, in its text and behind it.

// "{%0, %1, ...}" and the operands it names, for 4, 8, ... accumulators.
#define NVR_NAMES_4 "%0, %1, %2, %3"
#define NVR_NAMES_8 NVR_NAMES_4 ", %4, %5, %6, %7"
#define NVR_NAMES_16 NVR_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NVR_NAMES_24 NVR_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NVR_NAMES_32 NVR_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NVR_NAMES_48 NVR_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NVR_NAMES_64 NVR_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NVR_NAMES_128                                                                                                                   \
    NVR_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
                 "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "      \
                 "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define NVR_FOUR(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define NVR_EIGHT(i) NVR_FOUR(i), NVR_FOUR(i + 4)
#define NVR_SIXTEEN(i) NVR_EIGHT(i), NVR_EIGHT(i + 8)
#define NVR_ACC_4 NVR_FOUR(0)
#define NVR_ACC_8 NVR_EIGHT(0)
#define NVR_ACC_16 NVR_SIXTEEN(0)
#define NVR_ACC_24 NVR_ACC_16, NVR_EIGHT(16)
#define NVR_ACC_32 NVR_ACC_16, NVR_SIXTEEN(16)
#define NVR_ACC_48 NVR_ACC_32, NVR_SIXTEEN(32)
#define NVR_ACC_64 NVR_ACC_48, NVR_SIXTEEN(48)
#define NVR_ACC_128 NVR_ACC_64, NVR_SIXTEEN(64), NVR_SIXTEEN(80), NVR_SIXTEEN(96), NVR_SIXTEEN(112)

// One product. I0 ... I6: the numbers that follow the accumulators'.
#define NVR_SS(WIDTH, COUNT, TYPE, I0, I1, I2, I3)                                                                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #WIDTH           \
                 "k16.f32." TYPE "." TYPE " {" NVR_NAMES_##COUNT "}, %" #I0 ", %" #I1 ", add, 1, 1, 0, %" #I3 ";\n}"     \
                 : NVR_ACC_##COUNT                                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(TRANSPOSE_B)))
#define NVR_RS(WIDTH, COUNT, TYPE, I0, I1, I2, I3, I4, I5, I6)                                                           \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #WIDTH           \
                 "k16.f32." TYPE "." TYPE " {" NVR_NAMES_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4    \
                 ", add, 1, 1, %" #I6 ";\n}"                                                                             \
                 : NVR_ACC_##COUNT                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(TRANSPOSE_B)))

#define NVR_WGMMA_OF(WIDTH, COUNT, I0, I1, I2, I3, I4, I5, I6)                                                           \
    template <>                                                                                                          \
    struct WgmmaOf<COUNT> {                                                                                              \
        template <bool TRANSPOSE_B, class Element>                                                                       \
        static __device__ __forceinline__ void ss(float (&acc)[COUNT], uint64_t a, uint64_t b, bool accumulate) {        \
            if constexpr (IS_BF16<Element>) {                                                                            \
                NVR_SS(WIDTH, COUNT, "bf16", I0, I1, I2, I3);                                                            \
            } else {                                                                                                     \
                NVR_SS(WIDTH, COUNT, "f16", I0, I1, I2, I3);                                                             \
            }                                                                                                            \
        }                                                                                                                \
        template <bool TRANSPOSE_B, class Element>                                                                       \
        static __device__ __forceinline__ void rs(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
            if constexpr (IS_BF16<Element>) {                                                                            \
                NVR_RS(WIDTH, COUNT, "bf16", I0, I1, I2, I3, I4, I5, I6);                                                \
            } else {                                                                                                     \
                NVR_RS(WIDTH, COUNT, "f16", I0, I1, I2, I3, I4, I5, I6);                                                 \
            }                                                                                                            \
        }                                                                                                                \
        template <int NEWEST>                                                                                            \
        static __device__ __forceinline__ void wait(float (&acc)[COUNT]) {                                               \
            asm volatile("wgmma.wait_group.sync.aligned %" #I0 ";" : NVR_ACC_##COUNT : "n"(NEWEST) : "memory");          \
        }                                                                                                                \
    }

NVR_WGMMA_OF(8, 4, 4, 5, 6, 7, 8, 9, 10);
NVR_WGMMA_OF(16, 8, 8, 9, 10, 11, 12, 13, 14);
NVR_WGMMA_OF(32, 16, 16, 17, 18, 19, 20, 21, 22);
NVR_WGMMA_OF(48, 24, 24, 25, 26, 27, 28, 29, 30);
NVR_WGMMA_OF(64, 32, 32, 33, 34, 35, 36, 37, 38);
NVR_WGMMA_OF(96, 48, 48, 49, 50, 51, 52, 53, 54);
NVR_WGMMA_OF(128, 64, 64, 65, 66, 67, 68, 69, 70);
NVR_WGMMA_OF(256, 128, 128, 129, 130, 131, 132, 133, 134);
#endif

// D (64 x 2 COUNT) = A (64 x 16) B (16 x 2 COUNT), plus D if accumulate. A and B are descriptors; A is K-major, B too unless TRANSPOSE_B makes
// it MN-major. Element: Bf16 or Fp16. ("Register Fragments", wgmma D): warp w of the group holds rows 16 w to 16 w + 15; with g = lane / 4,
// t = lane % 4, for every j:
//     acc[4 j], acc[4 j + 1]      D[16 w + g, 8 j + 2 t], D[16 w + g, 8 j + 2 t + 1]
//     acc[4 j + 2], acc[4 j + 3]  D[16 w + g + 8, 8 j + 2 t], D[16 w + g + 8, 8 j + 2 t + 1]
template <bool TRANSPOSE_B, class Element, int COUNT>
__device__ __forceinline__ void wgmma_ss(float (&acc)[COUNT], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(IS_BF16<Element> || IS_FP16<Element>, "16-bit floats");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    WgmmaOf<COUNT>::template ss<TRANSPOSE_B, Element>(acc, a, b, accumulate);
#else
    (void)acc, (void)a, (void)b, (void)accumulate;
#endif
}

// The same with A in registers ("Register Fragments", wgmma A), low half first:
//     a[0]  A[16 w + g, 2 t], A[16 w + g, 2 t + 1]            a[1]  A[16 w + g + 8, 2 t], A[16 w + g + 8, 2 t + 1]
//     a[2]  A[16 w + g, 2 t + 8], A[16 w + g, 2 t + 9]        a[3]  A[16 w + g + 8, 2 t + 8], A[16 w + g + 8, 2 t + 9]
template <bool TRANSPOSE_B, class Element, int COUNT>
__device__ __forceinline__ void wgmma_rs(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(IS_BF16<Element> || IS_FP16<Element>, "16-bit floats");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    WgmmaOf<COUNT>::template rs<TRANSPOSE_B, Element>(acc, a, b, accumulate);
#else
    (void)acc, (void)a, (void)b, (void)accumulate;
#endif
}

// wgmma_wait that takes the accumulators of the groups it waits for: nothing reads them before.
template <int NEWEST, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&acc)[COUNT]) {
    static_assert(0 <= NEWEST && NEWEST <= 7, "a number of groups");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    WgmmaOf<COUNT>::template wait<NEWEST>(acc);
#else
    (void)acc;
#endif
}

}  // namespace ptx
}  // namespace nvr
#endif
