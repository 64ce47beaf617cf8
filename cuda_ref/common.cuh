// What every kernel uses: the CUDA vocabulary (from nvcc, or from host/ under g++), the element types, warp helpers.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "host/cuda_on_cpu.h"
#endif

namespace nvr {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#ifdef __CUDACC__
// The block's dynamic shared memory, 1024-byte aligned, as wgmma's swizzle wants it (mma's wants 128).
__device__ __forceinline__ float* shared_memory() {
    extern __shared__ __align__(1024) float4 nvr_dynamic_shared[];
    return reinterpret_cast<float*>(nvr_dynamic_shared);
}
#endif

// Element types: BITS is how a value lies in memory, VECTOR how many values a 16-byte load brings.
// The conversions are single instructions written out, because cuda_fp16.h and cuda_bf16.h would double the compile time and need cccl.
struct Bf16 {
    using Bits = uint16_t;
    static constexpr int VECTOR = 8;
    static __device__ __forceinline__ float to_float(Bits x) {
#ifdef __CUDACC__
        return __uint_as_float(static_cast<uint32_t>(x) << 16);
#else
        return host::bf16_to_float(x);
#endif
    }
    // Round to nearest even; NaN stays NaN.
    static __device__ __forceinline__ Bits from_float(float x) {
#ifdef __CUDACC__
        Bits bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return bits;
#else
        return host::float_to_bf16(x);
#endif
    }
};

struct Fp16 {
    using Bits = uint16_t;
    static constexpr int VECTOR = 8;
    static __device__ __forceinline__ float to_float(Bits x) {
#ifdef __CUDACC__
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
        return value;
#else
        return host::fp16_to_float(x);
#endif
    }
    static __device__ __forceinline__ Bits from_float(float x) {
#ifdef __CUDACC__
        Bits bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return bits;
#else
        return host::float_to_fp16(x);
#endif
    }
};

struct Fp32 {
    using Bits = float;
    static constexpr int VECTOR = 4;
    static __device__ __forceinline__ float to_float(Bits x) { return x; }
    static __device__ __forceinline__ Bits from_float(float x) { return x; }
};

// Sixteen bytes of global memory -> VECTOR floats in shared memory. Both ends are 16-byte aligned.
template <class Element>
__device__ __forceinline__ void copy_vector(const typename Element::Bits* source, float* target) {
    const uint4 raw = *reinterpret_cast<const uint4*>(source);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float4* vectors = reinterpret_cast<float4*>(target);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t low = words[2 * i], high = words[2 * i + 1];
        vectors[i] = make_float4(Element::to_float(static_cast<uint16_t>(low)), Element::to_float(static_cast<uint16_t>(low >> 16)),
                                 Element::to_float(static_cast<uint16_t>(high)), Element::to_float(static_cast<uint16_t>(high >> 16)));
    }
}

template <>
__device__ __forceinline__ void copy_vector<Fp32>(const float* source, float* target) {
    *reinterpret_cast<float4*>(target) = *reinterpret_cast<const float4*>(source);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

// exp(x - maximum) by ex2. The maximum is subtracted in natural units first: x * log2e of a score near -1e5 would lose the bits that
// matter. A maximum of -inf (nothing seen yet) is replaced by 0, since -inf - -inf is NaN. A NaN score stays NaN.
__device__ __forceinline__ float exp_below(float x, float maximum) {
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    return exp2f((x - base) * LOG2E);
}

}  // namespace nvr
