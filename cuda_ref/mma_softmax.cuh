// The online softmax of mma and wgmma over the scores of one step, of one lane, in units of log2(e).
#pragma once

#include "mma_scores.cuh"

namespace nvr {
namespace mma {

// What scores are still to be multiplied by, to be in log2 units; capped ones are ready.
template <class S>
__device__ __forceinline__ float to_log2(const nvr_tensors& tensors, Scores<S>& scores) {
    const float cap = tensors.logit_cap;
    if (!(cap > 0.0f)) return tensors.sm_scale * LOG2E;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = score_at<S>(scores, i, n, e);
                x = cap * tanhf(x * tensors.sm_scale / cap) * LOG2E;
            }
        }
    }
    return 1.0f;
}

template <class S>
__device__ __forceinline__ float row_maximum(Scores<S>& scores, int i, float sign) {
    float x = -INFINITY;
#pragma unroll
    for (int n = 0; n < S::KEY_TILES; ++n) x = fmaxf(x, fmaxf(score_at<S>(scores, i, n, 0) * sign, score_at<S>(scores, i, n, 1) * sign));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// The rows' largest, scaled once a row, not once a score: a product by 1 or -1 costs nothing.
template <class S>
__device__ __forceinline__ void find_maxima(Scores<S>& scores, float factor, RowFloats<S>& maxima) {
    if (factor >= 0.0f) {
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) maxima[i] = row_maximum<S>(scores, i, 1.0f) * factor;
    } else {
#pragma unroll
        for (int i = 0; i < S::LANE_ROWS; ++i) maxima[i] = row_maximum<S>(scores, i, -1.0f) * -factor;
    }
}

// Weights, two to a word, and their sums as they are, of the lane's keys, for the lse.
template <class S>
__device__ __forceinline__ void weigh(Scores<S>& scores, float factor, const RowFloats<S>& peak, RowFloats<S>& total, Weights<S>& weights) {
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        // A row that has seen nothing yet has peak -inf, and -inf - -inf would be NaN: measure from 0 instead.
        const float below = peak[i] > -INFINITY ? -peak[i] : 0.0f;
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
            const float low = ptx::ex2_approx_f32(fmaf(score_at<S>(scores, i, n, 0), factor, below));
            const float high = ptx::ex2_approx_f32(fmaf(score_at<S>(scores, i, n, 1), factor, below));
            total[i] += low + high;
            weights[i / 2][n][i % 2] = TensorCore<typename S::Element>::pack(high, low);
        }
    }
}

// The sums as the value warps see the weights, of all keys of the step, to divide by. A weight of 100 may be rounded by 0.2: divided by the exact
// sum, a row of one large weight would be off by as much.
template <class S>
__device__ __forceinline__ void add_rounded(const Weights<S>& weights, RowFloats<S>& rounded) {
    using Core = TensorCore<typename S::Element>;
    // Summed by the tensor cores: weights times ones. Words of two neighbouring 16 x 8 tiles are just the fragment of a 16 x 16 one.
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; n += 2) {
            const uint32_t a[4] = {weights[m][n][0], weights[m][n][1], weights[m][n + 1][0], weights[m][n + 1][1]};
            float sums[4] = {};
            Core::multiply(sums, a, Core::ONES, Core::ONES);
            rounded[2 * m] += sums[0];
            rounded[2 * m + 1] += sums[2];
        }
    }
}

// The same, of the lane's keys.
template <class S>
__device__ __forceinline__ void add_lane_rounded(const Weights<S>& weights, RowFloats<S>& rounded) {
    using Element = typename S::Element;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
            const uint32_t x = weights[i / 2][n][i % 2];
            rounded[i] += Element::to_float(static_cast<uint16_t>(x)) + Element::to_float(static_cast<uint16_t>(x >> 16));
        }
    }
}

}  // namespace mma
}  // namespace nvr
