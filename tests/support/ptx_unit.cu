// A kernel for each thing that ptx.cuh can say, and a program that runs one: ptx_unit KERNEL INPUT_BYTES OUTPUT_BYTES < input > output.
// test_cuda_ref_ptx.py builds it with g++ and with nvcc and compares with NumPy.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.cuh"
#include "wgmma_ptx.cuh"

namespace nvr {

struct Params {
    const unsigned char* in;
    int64_t in_bytes;
    unsigned char* out;
};

template <class T>
__device__ const T* input(const Params& params, int64_t byte = 0) {
    return reinterpret_cast<const T*>(params.in + byte);
}
template <class T>
__device__ T* output(const Params& params) {
    return reinterpret_cast<T*>(params.out);
}

// --- ldmatrix: in = 4096 bytes for shared memory, then a byte offset for each of 64 lanes; out [64][2][4]: plain, transposed -----------

constexpr int IMAGE = 4096;

__global__ void ldmatrix_kernel(Params params) {
    for (int i = threadIdx.x; i < IMAGE / 4; i += 64) shared_memory()[i] = input<float>(params)[i];
    __syncthreads();  // hazard: lanes read rows that other threads wrote
    const uint32_t address = ptx::shared_address(shared_memory()) + input<uint32_t>(params, IMAGE)[threadIdx.x];
    uint32_t plain[4], transposed[4];
    ptx::ldmatrix_x4(plain, address);
    ptx::ldmatrix_x4_trans(transposed, address);
    for (int m = 0; m < 4; ++m) {
        output<uint32_t>(params)[threadIdx.x * 8 + m] = plain[m];
        output<uint32_t>(params)[threadIdx.x * 8 + 4 + m] = transposed[m];
    }
}

// --- mma: in [lanes][10]: a, b, c; out [lanes][4] -----------------------------------------------------------------------------------

struct MmaInput {
    uint32_t a[4], b[2];
    float c[4];
};

template <class Element>
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ void mma<Bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_bf16(c, a, b0, b1);
}
template <>
__device__ void mma<Fp16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_f16(c, a, b0, b1);
}

template <class Element>
__global__ void mma_kernel(Params params) {
    MmaInput own = input<MmaInput>(params)[threadIdx.x];
    mma<Element>(own.c, own.a, own.b[0], own.b[1]);
    for (int i = 0; i < 4; ++i) output<float>(params)[threadIdx.x * 4 + i] = own.c[i];
}

// --- conversions: in [64] pairs of floats; out [64][4]: bf16x2, f16x2 of the pair, ex2 and lg2 of its first ---------------------------

__global__ void convert_kernel(Params params) {
    const float2 pair = input<float2>(params)[threadIdx.x];
    uint32_t* out = output<uint32_t>(params) + threadIdx.x * 4;
    out[0] = ptx::f32_to_bf16x2(pair.x, pair.y);
    out[1] = ptx::f32_to_f16x2(pair.x, pair.y);
    reinterpret_cast<float*>(out)[2] = ptx::ex2_approx_f32(pair.x);
    reinterpret_cast<float*>(out)[3] = ptx::lg2_approx_f32(pair.x);
}

// --- cp.async in three groups, read back in order: in, out [3][32] chunks of 16 bytes; of chunk t of group 2 only t % 17 bytes ---------

__global__ void groups_kernel(Params params) {
    const int t = static_cast<int>(threadIdx.x);
    const uint4* shared = reinterpret_cast<const uint4*>(shared_memory());
    const uint32_t target = ptx::shared_address(shared_memory()) + 16 * t;
    ptx::cp_async_16(target, params.in + 16 * t);
    ptx::cp_async_commit();
    ptx::cp_async_16(target + 512, params.in + 512 + 16 * t);
    ptx::cp_async_commit();
    // With 0 bytes nothing is read: any address will do.
    ptx::cp_async_16_zfill(target + 1024, t % 17 == 0 ? params.in + params.in_bytes : params.in + 1024 + 16 * t, t % 17);
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<2>();
    output<uint4>(params)[t] = shared[t];
    ptx::cp_async_wait_group<1>();
    output<uint4>(params)[32 + t] = shared[32 + t];
    ptx::cp_async_wait_group<0>();
    output<uint4>(params)[64 + t] = shared[64 + t];
}

// What lies at the target of a copy: before it starts (zeros), on its way, after the wait. out [32][3]
__global__ void peek_kernel(Params params) {
    volatile float* target = shared_memory() + 4 * threadIdx.x;
    float* out = output<float>(params) + 3 * threadIdx.x;
    target[0] = 0.0f;
    out[0] = target[0];
    ptx::cp_async_16(ptx::shared_address(shared_memory() + 4 * threadIdx.x), params.in + 16 * threadIdx.x);
    ptx::cp_async_commit();
    out[1] = target[0];
    ptx::cp_async_wait_group<0>();
    out[2] = target[0];
}

// --- mbarriers, by one thread; out [5] = 1 for every wait that returned -----------------------------------------------------------------

__global__ void parity_kernel(Params params) {
    const uint32_t barrier = ptx::shared_address(shared_memory()), other = barrier + 8;
    if (threadIdx.x != 0) return;
    ptx::mbarrier_init(barrier, 2);
    ptx::mbarrier_wait(barrier, 1);  // "the phase before the first" is over
    output<int>(params)[0] = 1;
    for (int phase = 0; phase < 3; ++phase) {
        ptx::mbarrier_arrive(barrier);
        ptx::mbarrier_arrive(barrier);
        ptx::mbarrier_wait(barrier, phase & 1);
        output<int>(params)[1 + phase] = 1;
    }
    // A phase that a copy ends and nobody looks at, then two by hand: the third is over, whenever the copy landed.
    ptx::mbarrier_init(other, 1);
    ptx::cp_async_16(barrier + 16, params.in);
    ptx::cp_async_mbarrier_arrive_noinc(other);
    ptx::mbarrier_arrive(other);
    ptx::mbarrier_arrive(other);
    ptx::mbarrier_wait(other, 0);
    output<int>(params)[4] = 1;
}

// What 64 threads see of both phases (bit 0: parity 0) of an mbarrier that is fresh, and again when all have arrived; out [64], then a chunk of
// 16 bytes, the input's, which thread 0 looked for until it had landed.
__global__ void look_kernel(Params params) {
    const uint32_t barrier = ptx::shared_address(shared_memory()), other = barrier + 8;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 64);
        ptx::mbarrier_init(other, 1);
    }
    __syncthreads();  // hazard: nobody may use a barrier before it is made
    int seen = ptx::mbarrier_test(barrier, 0) | ptx::mbarrier_test(barrier, 1) << 1;
    __syncthreads();  // hazard: slow threads have not looked yet
    ptx::mbarrier_arrive(barrier);
    __syncthreads();  // hazard: slow threads have not arrived yet
    seen |= ptx::mbarrier_test(barrier, 0) << 2 | ptx::mbarrier_test(barrier, 1) << 3;
    output<int>(params)[threadIdx.x] = seen;
    if (threadIdx.x != 0) return;
    ptx::cp_async_16(barrier + 16, params.in);
    ptx::cp_async_mbarrier_arrive_noinc(other);
    while (!ptx::mbarrier_test(other, 0)) {
    }
    output<uint4>(params)[16] = reinterpret_cast<const uint4*>(shared_memory())[1];
}

// --- a ring of RING blocks: 4 producer warps copy by cp.async, 2 consumer warps write what they find; in, out: whole blocks -------------

constexpr int RING = 3, BLOCK_BYTES = 2048, PRODUCERS = 128;

__device__ void produce_blocks(const Params& params, uint32_t ring, uint32_t full, uint32_t empty) {
    const int t = static_cast<int>(threadIdx.x);
    for (int64_t i = 0; i < params.in_bytes / BLOCK_BYTES; ++i) {
        const uint32_t slot = i % RING, phase = i / RING & 1;
        ptx::mbarrier_wait(empty + 8 * slot, phase ^ 1);  // hazard: the copy overwrites what slow consumers still read
        ptx::cp_async_16(ring + slot * BLOCK_BYTES + 16 * t, params.in + i * BLOCK_BYTES + 16 * t);
        ptx::cp_async_mbarrier_arrive_noinc(full + 8 * slot);
    }
}

__device__ void consume_blocks(const Params& params, uint32_t full, uint32_t empty) {
    const int t = static_cast<int>(threadIdx.x) - PRODUCERS;
    for (int64_t i = 0; i < params.in_bytes / BLOCK_BYTES; ++i) {
        const uint32_t slot = i % RING, phase = i / RING & 1;
        ptx::mbarrier_wait(full + 8 * slot, phase);  // hazard: the block's copies are on their way
        const uint4* block = reinterpret_cast<const uint4*>(shared_memory()) + slot * (BLOCK_BYTES / 16);
        for (int chunk = t; chunk < BLOCK_BYTES / 16; chunk += 64) output<uint4>(params)[i * (BLOCK_BYTES / 16) + chunk] = block[chunk];
        __syncwarp();  // hazard: lane 0 speaks for all lanes
        if (t % WARP == 0) ptx::mbarrier_arrive(empty + 8 * slot);
    }
}

__global__ void __launch_bounds__(PRODUCERS + 64, 1) ring_kernel(Params params) {
    const uint32_t ring = ptx::shared_address(shared_memory()), full = ring + RING * BLOCK_BYTES, empty = full + 8 * RING;
    if (threadIdx.x < RING) {
        ptx::mbarrier_init(full + 8 * threadIdx.x, PRODUCERS);
        ptx::mbarrier_init(empty + 8 * threadIdx.x, 2);
    }
    __syncthreads();  // hazard: nobody may use a barrier before it is made
    ptx::griddepcontrol_wait();  // returns at once: nothing overlaps here
    if (threadIdx.x < PRODUCERS) {
        ptx::set_max_registers<40, false>();
        ptx::griddepcontrol_launch_dependents();
        produce_blocks(params, ring, full, empty);
    } else {
        consume_blocks(params, full, empty);
    }
}

// --- named barriers: 4 warps square numbers, 8 warps add up what they find, a buffer of 128 between them; in [steps][128], out [256] ----

__global__ void named_kernel(Params params) {
    using Ready = ptx::named_barrier<2, 384>;
    using Free = ptx::named_barrier<3, 384>;
    const int t = static_cast<int>(threadIdx.x);
    const int64_t steps = params.in_bytes / 512;
    float sum = 0.0f;
    for (int64_t i = 0; i < steps; ++i) {
        if (t < 128) {
            const float x = input<float>(params)[i * 128 + t];
            if (i > 0) Free::sync();  // hazard: the adders still read the last step's squares
            shared_memory()[t] = x * x;
            Ready::arrive();
        } else {
            Ready::sync();  // hazard: the squares of this step are not written yet
            sum += shared_memory()[t % 128];
            if (i + 1 < steps) Free::arrive();
        }
    }
    if (t >= 128) output<float>(params)[t - 128] = sum;
}

// Pairs of warps trade places, each pair at a barrier of its own; in, out [128].
__global__ void numbered_kernel(Params params) {
    const int t = static_cast<int>(threadIdx.x);
    shared_memory()[t] = input<float>(params)[t];
    ptx::numbered_barrier<64>::sync(14 + t / 64);  // hazard: the other warp's numbers are not written yet
    output<float>(params)[t] = shared_memory()[t ^ 32];
}

// --- a product as attention needs it: in q [16][64], kv [32][64]; out s = q kv^T [16][32], o = s kv [16][64], float32 ------------------

// Byte offset of 16-byte chunk `chunk` of a row of 128 bytes: the 8 rows of an ldmatrix lie in 8 different bank groups.
__device__ uint32_t place(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }

template <class Element>
__device__ uint32_t pack(float high, float low);
template <>
__device__ uint32_t pack<Bf16>(float high, float low) {
    return ptx::f32_to_bf16x2(high, low);
}
template <>
__device__ uint32_t pack<Fp16>(float high, float low) {
    return ptx::f32_to_f16x2(high, low);
}

constexpr int KV_AT = 16 * 128, P_AT = KV_AT + 32 * 128, PRODUCT_BYTES = P_AT + 16 * 128;

// Scores of keys 8 warp .. 8 warp + 7.
template <class Element>
__device__ void score(uint32_t base, int warp, int lane, float (&s)[4]) {
    for (int k = 0; k < 64; k += 32) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, base + KV_AT + place(8 * warp + lane % 8, k / 8 + lane / 8));
        for (int half = 0; half < 2; ++half) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, base + place(lane % 16, k / 8 + 2 * half + lane / 16));
            mma<Element>(s, a, b[2 * half], b[2 * half + 1]);
        }
    }
}

// Output columns 16 warp .. 16 warp + 15, in two accumulators of 8.
template <class Element>
__device__ void add_values(uint32_t base, int warp, int lane, float (&o)[2][4]) {
    for (int key = 0; key < 32; key += 16) {
        uint32_t a[4], b[4];
        ptx::ldmatrix_x4(a, base + P_AT + place(lane % 16, key / 8 + lane / 16));
        ptx::ldmatrix_x4_trans(b, base + KV_AT + place(key + lane % 16, 2 * warp + lane / 16));
        mma<Element>(o[0], a, b[0], b[1]);
        mma<Element>(o[1], a, b[2], b[3]);
    }
}

template <class Element>
__global__ void product_kernel(Params params) {
    const int t = static_cast<int>(threadIdx.x), warp = t / WARP, lane = t % WARP, g = lane / 4, column = 2 * (lane % 4);
    const uint32_t base = ptx::shared_address(shared_memory());
    for (int chunk = t; chunk < 48 * 8; chunk += 128) ptx::cp_async_16(base + place(chunk / 8, chunk % 8), params.in + 16 * chunk);
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // hazard: every warp reads rows that other threads copied
    float s[4] = {}, o[2][4] = {};
    score<Element>(base, warp, lane, s);
    for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half;
        unsigned char* target = reinterpret_cast<unsigned char*>(shared_memory()) + P_AT + place(row, warp) + 2 * column;
        *reinterpret_cast<uint32_t*>(target) = pack<Element>(s[2 * half + 1], s[2 * half]);
        for (int i = 0; i < 2; ++i) output<float>(params)[row * 32 + 8 * warp + column + i] = s[2 * half + i];
    }
    __syncthreads();  // hazard: every warp reads scores of all warps
    add_values<Element>(base, warp, lane, o);
    for (int i = 0; i < 4; ++i) {
        float* out = output<float>(params) + 16 * 32 + (g + i / 2 * 8) * 64 + 16 * warp + column + i % 2;
        out[0] = o[0][i];
        out[8] = o[1][i];
    }
}

// --- wgmma: in = shared memory with A at 0 and B at WGMMA_B, then A [64][depth], then C [64][2 COUNT]; out D [64][2 COUNT] = A B^T + C ---
// The operands lie as warpgroup.py lays them out; LEADING and STRIDE are its distances. Without ADD the first product starts from nothing.

constexpr int WGMMA_B = 16384, WGMMA_BYTES = 60 * 1024, WGMMA_ROWS = 64;

// Where accumulator i of the running thread lies in a matrix of `columns` columns.
__device__ int wgmma_place(int i, int columns) {
    const int t = static_cast<int>(threadIdx.x);
    return (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + t % 4 * 2 + i % 2;
}

template <class Element, int COUNT, bool TRANSPOSE_B, bool A_IN_REGISTERS, bool ADD, int SWIZZLE, int LEADING_A, int STRIDE_A, int LEADING_B,
          int STRIDE_B>
__global__ void __launch_bounds__(128, 1) wgmma_kernel(Params params) {
    constexpr int depth = SWIZZLE ? 64 : 32, a_step = SWIZZLE ? 32 : 2 * LEADING_A;
    constexpr int b_step = !SWIZZLE ? 2 * LEADING_B : TRANSPOSE_B ? 2 * STRIDE_B : 32;
    const int t = static_cast<int>(threadIdx.x);
    const int64_t c_bytes = WGMMA_ROWS * 2 * COUNT * 4, a_bytes = WGMMA_ROWS * depth * 2, image = params.in_bytes - a_bytes - c_bytes;
    for (int64_t i = t; i < image / 4; i += 128) shared_memory()[i] = input<float>(params)[i];
    const uint32_t* a_words = input<uint32_t>(params, image) + (t / 32 * 16 + t % 32 / 4) * (depth / 2) + t % 4;
    uint32_t registers[depth / 16][4];
    float acc[COUNT];
#pragma unroll
    for (int i = 0; i < depth / 4; ++i) registers[i / 4][i % 4] = a_words[i % 2 * 8 * (depth / 2) + i / 4 * 8 + i % 4 / 2 * 4];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) acc[i] = input<float>(params, image + a_bytes)[wgmma_place(i, 2 * COUNT)];
    ptx::fence_proxy_async();
    __syncthreads();  // hazard: the products read what all threads wrote
    const uint32_t base = ptx::shared_address(shared_memory());
    const uint64_t a = ptx::wgmma_descriptor<LEADING_A, STRIDE_A, SWIZZLE>(base);
    const uint64_t b = ptx::wgmma_descriptor<LEADING_B, STRIDE_B, SWIZZLE>(base + WGMMA_B);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < depth / 16; ++s) {
        if constexpr (A_IN_REGISTERS) {
            ptx::wgmma_rs<TRANSPOSE_B, Element>(acc, registers[s], b + (s * b_step >> 4), ADD || s > 0);
        } else {
            ptx::wgmma_ss<TRANSPOSE_B, Element>(acc, a + (s * a_step >> 4), b + (s * b_step >> 4), ADD || s > 0);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(acc);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) output<float>(params)[wgmma_place(i, 2 * COUNT)] = acc[i];
}

// Two groups, of which the older is waited for first; then arrivals for a whole warp at once. in as above for 64 columns; out A B^T twice:
// of the first 16 of K, of the others.
__global__ void __launch_bounds__(128, 1) wgmma_groups_kernel(Params params) {
    const int t = static_cast<int>(threadIdx.x);
    const uint32_t base = ptx::shared_address(shared_memory()), barrier = base + WGMMA_BYTES - 8;
    for (int64_t i = t; i < (params.in_bytes - 64 * 64 * 6) / 4; i += 128) shared_memory()[i] = input<float>(params)[i];
    if (t == 0) ptx::mbarrier_init(barrier, 128);
    ptx::fence_proxy_async();
    __syncthreads();  // hazard: the products read what all threads wrote, and the barrier is there
    const uint64_t a = ptx::wgmma_descriptor<16, 2048, 128>(base), b = ptx::wgmma_descriptor<16, 2048, 128>(base + WGMMA_B);
    float first[32], others[32];
    ptx::wgmma_fence();
    ptx::wgmma_ss<false, Bf16>(first, a, b, false);
    ptx::wgmma_commit();
    ptx::wgmma_ss<false, Bf16>(others, a + 2, b + 2, false);
    ptx::wgmma_ss<false, Bf16>(others, a + 4, b + 4, true);
    ptx::wgmma_ss<false, Bf16>(others, a + 6, b + 6, true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>(first);
    ptx::wgmma_wait<0>();
    ptx::wgmma_wait<0>(others);
    __syncwarp();  // hazard: lane 0 speaks for all lanes
    if (t % WARP == 0) ptx::mbarrier_arrive_count(barrier, WARP);
    ptx::mbarrier_wait(barrier, 0);  // hazard: slow warps still multiply what is overwritten
    shared_memory()[WGMMA_B / 4 + t] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        output<float>(params)[wgmma_place(i, 64)] = first[i];
        output<float>(params)[WGMMA_ROWS * 64 + wgmma_place(i, 64)] = others[i];
    }
}

#ifndef __CUDACC__
// What the CPU makes of a product whose operands change on its way, A and B first ones, then zeros. out [128][3]: an accumulator right after the
// product, after a wait that does not take it, after one that does. A GPU may show anything.
__global__ void wgmma_late_kernel(Params params) {
    const uint32_t base = ptx::shared_address(shared_memory());
    volatile float acc[4] = {};
    float(&own)[4] = const_cast<float(&)[4]>(acc);
    for (int i = static_cast<int>(threadIdx.x); i < 576; i += 128) reinterpret_cast<uint32_t*>(shared_memory())[i] = 0x3f803f80;
    __syncthreads();
    ptx::wgmma_fence();
    ptx::wgmma_ss<false, Bf16>(own, ptx::wgmma_descriptor<1024, 128, 0>(base), ptx::wgmma_descriptor<128, 0, 0>(base + 2048), false);
    ptx::wgmma_commit();
    float* out = output<float>(params) + 3 * threadIdx.x;
    out[0] = acc[0];
    for (int i = static_cast<int>(threadIdx.x); i < 576; i += 128) shared_memory()[i] = 0.0f;
    __syncthreads();
    ptx::wgmma_wait<0>();
    out[1] = acc[0];
    ptx::wgmma_wait<0>(own);
    out[2] = acc[0];
}
#endif

// --- the program ------------------------------------------------------------------------------------------------------------------

struct Case {
    const char* name;
    int threads;
    int64_t shared;
    int (*launch)(const Device&, const char*, dim3, int, int64_t, void*, const Params&, bool);
};

const Case CASES[] = {
    {"ldmatrix", 64, IMAGE, launch<ldmatrix_kernel, Params>},
    {"mma_bf16", 64, 0, launch<mma_kernel<Bf16>, Params>},
    {"mma_f16", 64, 0, launch<mma_kernel<Fp16>, Params>},
    {"convert", 64, 0, launch<convert_kernel, Params>},
    {"groups", 32, 1536, launch<groups_kernel, Params>},
    {"peek", 32, 512, launch<peek_kernel, Params>},
    {"parity", 32, 32, launch<parity_kernel, Params>},
    {"look", 64, 32, launch<look_kernel, Params>},
    {"ring", PRODUCERS + 64, RING * (BLOCK_BYTES + 16), launch<ring_kernel, Params>},
    {"named", 384, 512, launch<named_kernel, Params>},
    {"numbered", 128, 512, launch<numbered_kernel, Params>},
    {"wgmma_ss-n64-bfloat16-k128-add", 128, WGMMA_BYTES, launch<wgmma_kernel<Bf16, 32, false, false, true, 128, 16, 2048, 16, 2048>, Params>},
    {"wgmma_rs-n256-float16-mn128-new", 128, WGMMA_BYTES, launch<wgmma_kernel<Fp16, 128, true, true, false, 128, 16, 2048, 9216, 1024>, Params>},
    {"wgmma_ss-n8-float16-k0-new", 128, WGMMA_BYTES, launch<wgmma_kernel<Fp16, 4, false, false, false, 0, 1040, 128, 144, 128>, Params>},
    {"wgmma_rs-n96-bfloat16-mn0-add", 128, WGMMA_BYTES, launch<wgmma_kernel<Bf16, 48, true, true, true, 0, 1040, 128, 1728, 144>, Params>},
    {"wgmma_groups", 128, WGMMA_BYTES, launch<wgmma_groups_kernel, Params>},
#ifndef __CUDACC__
    {"wgmma_late", 128, 2304, launch<wgmma_late_kernel, Params>},
#endif
    {"product_bf16", 128, PRODUCT_BYTES, launch<product_kernel<Bf16>, Params>},
    {"product_f16", 128, PRODUCT_BYTES, launch<product_kernel<Fp16>, Params>},
};

#ifdef __CUDACC__
void* allocate(size_t bytes) {
    void* memory = nullptr;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}
int fetch(void* to, const void* from, size_t bytes) { return cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess ? 0 : 3; }
#else
void* allocate(size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 16, bytes) == 0 ? memory : nullptr;
}
int fetch(void* to, const void* from, size_t bytes) {
    memcpy(to, from, bytes);
    return 0;
}
#endif

int run(const Case& unit, size_t in_bytes, size_t out_bytes) {
    static char host[1 << 20];
    static void *const in = allocate(in_bytes), *const out = allocate(out_bytes);  // static: not a leak to AddressSanitizer
    if (in == nullptr || out == nullptr || in_bytes > sizeof host || out_bytes > sizeof host) return 2;
    if (fread(host, 1, in_bytes, stdin) != in_bytes || fetch(in, host, in_bytes) != 0) return 2;
    const Params params = {static_cast<unsigned char*>(in), static_cast<int64_t>(in_bytes), static_cast<unsigned char*>(out)};
    Device device;
    int status = get_device(0, &device);
    if (status == NVR_OK) status = unit.launch(device, unit.name, dim3(1), unit.threads, unit.shared, nullptr, params, false);
    if (status == NVR_OK) status = fetch(host, out, out_bytes);
    if (status != NVR_OK) {
        fputs(last_error_text(), stderr);
        return status;
    }
    return fwrite(host, 1, out_bytes, stdout) == out_bytes ? 0 : 2;
}

}  // namespace nvr

int main(int count, char** arguments) {
    if (count != 4) return 2;
    for (const auto& unit : nvr::CASES) {
        if (strcmp(unit.name, arguments[1]) == 0) return nvr::run(unit, strtoul(arguments[2], nullptr, 10), strtoul(arguments[3], nullptr, 10));
    }
    return 2;
}
