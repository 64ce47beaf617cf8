// The part of CUDA's vocabulary that the kernels use, for g++: the same .cu files then run on the CPU, under any sanitizer.
//
// Each CUDA thread of a block is a fiber (fiber.h); one runs at a time, in a fixed order, until it meets a barrier or a warp exchange
// (scheduler.cpp). Blocks run one after the other. Everything is per OS thread, so two callers do not meet.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    constexpr explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace nvr {
namespace host {

constexpr int WARP_LANES = 32;

// What the running CUDA thread knows of itself.
struct Indices {
    dim3 thread, block, grid;
};
extern thread_local Indices* running;

// Runs body(argument) as every thread of the grid. shared bytes of dynamic shared memory are filled with 0xFF (NaN) before each block.
// Returns NULL, or what went wrong; the rest of the grid is then not run.
const char* run_grid(dim3 grid, int threads, size_t shared, void (*body)(const void*), const void* argument);

void* block_shared_memory();
void block_barrier();

// Meets the other lanes of the warp and returns the 32 values that they brought.
const uint64_t* warp_exchange(uint64_t value);

// Bit patterns <-> float. Rounding is to nearest even; NaN stays NaN.
inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline float bf16_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }
inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = float_bits(x);
    if (x != x) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float fp16_to_float(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
    return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}
inline uint16_t float_to_fp16(float x) {
    const uint32_t bits = float_bits(x);
    const uint16_t sign = bits >> 16 & 0x8000;
    const float size = fabsf(x);
    if (x != x) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;  // halfway between the largest half and the next power of two
    if (size < 0x1p-14f) return sign | static_cast<uint16_t>(rintf(size * 0x1p24f));  // subnormal: whole multiples of 2^-24
    const uint32_t magnitude = float_bits(size) - (112u << 23);
    return sign | static_cast<uint16_t>((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

template <class T>
T exchange(T value, int source_lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane brings at most eight bytes");
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof value);
    const uint64_t* all = warp_exchange(raw);
    memcpy(&value, &all[source_lane], sizeof value);
    return value;
}

inline int lane() { return static_cast<int>(running->thread.x % WARP_LANES); }

}  // namespace host

inline float* shared_memory() { return static_cast<float*>(host::block_shared_memory()); }

}  // namespace nvr

#define threadIdx (::nvr::host::running->thread)
#define blockIdx (::nvr::host::running->block)
#define gridDim (::nvr::host::running->grid)

inline void __syncthreads() { nvr::host::block_barrier(); }
inline void __syncwarp() { nvr::host::warp_exchange(0); }

// The kernels use full warps only, so the mask of participating lanes is always "all".
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return nvr::host::exchange(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return nvr::host::exchange(value, nvr::host::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = nvr::host::lane();
    return nvr::host::exchange(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const uint64_t* all = nvr::host::warp_exchange(predicate);
    unsigned ballot = 0;
    for (int lane = 0; lane < nvr::host::WARP_LANES; ++lane) ballot |= static_cast<unsigned>(all[lane]) << lane;
    return ballot;
}
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
