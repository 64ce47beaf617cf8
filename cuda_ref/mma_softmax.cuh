// The online softmax of mma and wgmma over the scores of one step, of one lane, in units of log2(e).
#pragma once

#include "mma_scores.cuh"

namespace nvr {
namespace mma {

// How far the sum of a lane's weights of one row and step may grow; and then log2 of how far a row's largest score may be above its peak. A lane
// has at most 16 keys of a row: where the first is exceeded, so is the second (but for rounding), and peaks move. Far from float16's 65504.
constexpr float GROWN_SUM = 256.0f, GROWTH = 4.0f;

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

// Weights, two to a word. The sums of the lane's are added up, as they are, for the lse, and as the values are weighed with them, to divide by: a
// weight of 100 may be rounded by 0.2, and divided by the exact sum, a row of one large weight would be off by as much.
template <class S>
__device__ __forceinline__ void weigh(Scores<S>& scores, float factor, const RowFloats<S>& peak, Weights<S>& weights, RowFloats<S>& exact,
                                      RowFloats<S>& rounded) {
    using Element = typename S::Element;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        // A row that has seen nothing yet has peak -inf, and -inf - -inf would be NaN: measure from 0 instead.
        const float below = peak[i] > -INFINITY ? -peak[i] : 0.0f;
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
            const float low = ptx::ex2_approx_f32(fmaf(score_at<S>(scores, i, n, 0), factor, below));
            const float high = ptx::ex2_approx_f32(fmaf(score_at<S>(scores, i, n, 1), factor, below));
            exact[i] += low + high;
            weights[i / 2][n][i % 2] = TensorCore<Element>::pack(high, low);
        }
    }
    // By lanes, not by tensor cores: it fits in between the exponentials, of which a quarter of an SM makes 4 a clock.
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
            const uint32_t x = weights[i / 2][n][i % 2];
            rounded[i] += Element::to_float(static_cast<uint16_t>(x)) + Element::to_float(static_cast<uint16_t>(x >> 16));
        }
    }
}

template <class S>
__device__ __forceinline__ void add_rows(const RowFloats<S>& exact, const RowFloats<S>& weighed, RowFloats<S>& total, RowFloats<S>& rounded) {
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        total[i] += exact[i];
        rounded[i] += weighed[i];
    }
}

__device__ __forceinline__ float over_quad(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// At the end of a piece: the sums of the rows, and the peaks that they are measured from, to shared memory. row: the lane's first there.
template <class S>
__device__ __forceinline__ void hand_over_sums(const RowFloats<S>& total, const RowFloats<S>& rounded, const RowFloats<S>& peak, uint32_t row,
                                               uint32_t lane) {
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        const float exact = over_quad(total[i]), weighed = over_quad(rounded[i]);
        if (lane % 4 == 0) {
            shared_array<float>(S::TOTALS)[row + 8 * i] = exact;
            shared_array<float>(S::ROUNDED)[row + 8 * i] = weighed;
            shared_array<float>(S::REFERENCES)[row + 8 * i] = peak[i];
        }
    }
}

}  // namespace mma
}  // namespace nvr
