// Q to shared memory and S = Q K^T, for the score warps of mma.
#pragma once

#include "mma_scores.cuh"

namespace nvr {
namespace mma {

// k steps that fragments are fetched ahead: an ldmatrix waits its turn among those of twelve warps, longer than one step lasts.
constexpr int AHEAD = 2;
// k steps of 16 dims in a 128-byte segment; fragments of as many have registers.
constexpr int TURNS = SEGMENT_BYTES / (16 * ITEM_BYTES);

// The rows of a tile to shared memory, landed for this thread on return. Rows past the request's last become zeros.
// first: row of the request (draft token x head) that is the tile's first; rows: rows of the request that may be read.
template <class C>
__device__ __forceinline__ void load_queries(const VerifyParams& params, uint32_t base, uint32_t t, int64_t q_begin, uint32_t first,
                                             uint32_t rows) {
    constexpr int ROWS_A_PASS = SCORE_THREADS / THREADS_PER_ROW;
    const nvr_tensors& tensors = params.tensors;
    const uint32_t heads = params.plan.row_heads, sub = t % THREADS_PER_ROW;
#pragma unroll
    for (int i = 0; i < C::ROWS / ROWS_A_PASS; ++i) {
        const uint32_t row = t / THREADS_PER_ROW + i * ROWS_A_PASS, flat = first + row;
        const uint32_t token = flat / heads, head = flat - token * heads;
        const bool valid = flat < rows;
        uintptr_t source = reinterpret_cast<uintptr_t>(tensors.q);
        if (valid) source += ((q_begin + token) * tensors.q_row_stride + head * tensors.q_head_stride) * ITEM_BYTES + sub * CHUNK_BYTES;
        const uint32_t target = base + C::Q + row_offset<C>(row, sub);
#pragma unroll
        for (uint32_t s = 0; s < C::SEGMENTS; ++s) {
            ptx::cp_async_16_zfill(target + s * SEGMENT_BYTES, reinterpret_cast<const void*>(valid ? source + s * SEGMENT_BYTES : source),
                                   valid ? CHUNK_BYTES : 0);
        }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
}

// scores = this warp's rows times the keys of the step, over all of a row's dims. q_at, k_at[block]: the lane's ldmatrix rows of k step 0; the
// swizzle makes step k of a segment the same address with bits 5 and 6 XOR k.
template <class S>
__device__ __forceinline__ void multiply_keys(uint32_t q_at, const uint32_t (&k_at)[S::KEY_BLOCKS], Scores<S>& scores) {
    constexpr int STEPS = S::SEGMENTS * TURNS, PAIRS = S::KEY_TILES / 2, TILES = S::ROW_TILES * S::KEY_TILES;
    // Few accumulators would wait for each other (an mma takes about 33 clocks): then several share a result.
    constexpr int CHAINS = TILES < 8 ? 8 / TILES : 1;
    float sums[CHAINS][S::ROW_TILES][S::KEY_TILES][4] = {};
    uint32_t a[TURNS][S::ROW_TILES][4], b[TURNS][PAIRS][4];
#pragma unroll
    for (int step = -AHEAD; step < STEPS; ++step) {
        if (step + AHEAD < STEPS) {
            const int k = (step + AHEAD) % TURNS;
            const uint32_t offset = (step + AHEAD) / TURNS * SEGMENT_BYTES;
#pragma unroll
            for (int m = 0; m < S::ROW_TILES; ++m) ptx::ldmatrix_x4(a[k][m], (q_at ^ k << 5) + offset + m * 16 * S::ROW_BYTES);
#pragma unroll
            for (int n = 0; n < PAIRS; ++n) ptx::ldmatrix_x4(b[k][n], (k_at[n] ^ k << 5) + offset);
        }
        if (step < 0) continue;
        const int k = step % TURNS;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; ++n) {
                TensorCore<typename S::Element>::multiply(sums[k % CHAINS][m][n], a[k][m], b[k][n / 2][n % 2 * 2], b[k][n / 2][n % 2 * 2 + 1]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = scores[(m * S::KEY_TILES + n) * 4 + i];
                score = sums[0][m][n][i];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) score += sums[c][m][n][i];
            }
        }
    }
}

}  // namespace mma
}  // namespace nvr
