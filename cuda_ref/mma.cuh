// mma: tree-verify attention on tensor cores by mma.sync, for every GPU from sm_80 on (bfloat16 and float16).
//
//     grid (ctas), block 512 threads      CTA p walks its share of the line of work (work.cuh); a unit is one step of KEYS KV rows for one
//                                         tile of ROWS query rows. A query row is (draft token, head): all heads of all draft tokens of a
//                                         request share each fetched KV row.
//
//     producer warps             score warps                           value warps
//     slots -> ring              S = Q K^T, mask, P = 2^(S - peak)     O = alpha O + P V
//            |      full[b]         |  Q      ready |  P, alpha           |  O (registers)
//            +-----------------> ring of KV <-------+---------------------+
//            <---------------------- empty[b] ----------------------------+
//                                   <--------------- free ----------------+
//
// ring: blocks of 16 KV rows, read twice: as keys (whole rows) and as values (their latent part). While the value warps multiply step j, the
// score warps work on step j + 1 and the producers fetch what comes after: tensor cores, softmax and memory are busy at once.
//
//     a block:  full    producers' copies have landed        -> score warps read keys (value warps follow through `ready`)
//               empty   every value warp has read its values -> producers refill it
//     a step:   ready   P, alpha, flags (and the sums at the end of a piece) are written   -> value warps
//               free    the value warps have read them                                    -> score warps write the next
//               scored  its scores are made, tensor cores are free (tiles that hold back) -> value warps of the same SM quarter
//
// A tile that a share's border cuts is finished by combine: its pieces leave (peak, total) and a normalised partial, peaks in log2 units.
#pragma once

#include "mma_producer.cuh"
#include "mma_score.cuh"
#include "mma_value.cuh"

namespace nvr {

// Whether the code of this pass can run on a GPU: nowhere is an image of a tile that no GPU of its architecture has room for.
template <class L>
__host__ __device__ constexpr bool is_compiled() {
#if !defined(__CUDA_ARCH__)
    return true;
#else
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool HANDS_OVER = true;
#else
    constexpr bool HANDS_OVER = false;
#endif
    constexpr uint32_t MOST_SHARED = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870   ? 166912
                                     : __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 232448
                                                                                   : 101376;
    return (HANDS_OVER || !L::HANDS_OVER) && L::END <= MOST_SHARED;
#endif
}

template <class Element, class Tile, class RowDims>
__global__ void __launch_bounds__(mma::THREADS, 1) mma_kernel(VerifyParams params) {
    using C = mma::Config<Element, Tile, RowDims>;
    if constexpr (is_compiled<C>()) {
        const uint32_t t = threadIdx.x, base = ptx::shared_address(shared_memory());
        if (t == 0) {
            for (int b = 0; b < C::FULL_BARRIERS; ++b) ptx::mbarrier_init(mma::full_at<C>(base, b), mma::PRODUCER_THREADS);
            for (int b = 0; b < C::BLOCKS; ++b) ptx::mbarrier_init(mma::empty_at<C>(base, b), mma::VALUE_WARPS);
            if constexpr (C::HOLDS_BACK) {
                for (int b = 0; b < C::GROUPS; ++b) ptx::mbarrier_init(mma::Signals<C>::ready_at(base, b), C::ROW_WARPS * WARP);
                for (int b = 0; b < C::SCORED_STEPS * C::ROW_WARPS; ++b) {
                    ptx::mbarrier_init(mma::scored_at<C>(base, b / C::ROW_WARPS, b % C::ROW_WARPS), 1);
                }
            }
        }
        __syncthreads();  // hazard: all roles use the mbarriers that thread 0 makes
        ptx::griddepcontrol_launch_dependents();  // combine: as soon as a CTA of this kernel has left room; it waits for all of them
        if (t < mma::SCORE_THREADS) {
            if constexpr (C::HANDS_OVER) ptx::set_max_registers<mma::SCORE_REGISTERS, true>();
            mma::score<C>(params, base, t);
        } else if (t < mma::SCORE_THREADS + mma::VALUE_THREADS) {
            if constexpr (C::HANDS_OVER) ptx::set_max_registers<mma::VALUE_REGISTERS, true>();
            mma::value<C>(params, base, t - mma::SCORE_THREADS);
        } else {
            if constexpr (C::HANDS_OVER) ptx::set_max_registers<mma::PRODUCER_REGISTERS, false>();
            mma::produce<C>(params, base, t - mma::SCORE_THREADS - mma::VALUE_THREADS);
        }
    } else {
#ifdef __CUDA_ARCH__
        __trap();
#endif
    }
}

template <class Tile>
int launch_mma_tile(const Device& device, const VerifyParams& params, void* stream) {
    const Plan& plan = params.plan;
    const dim3 grid(static_cast<unsigned>(plan.ctas));
    return for_mma_dims(plan.config, [&](auto dims) {
        using RowDims = typename decltype(dims)::type;
        constexpr int64_t SHARED = mma::Layout<Tile, RowDims>::END;
        if (plan.config.dtype == NVR_BFLOAT16) {
            return launch<mma_kernel<Bf16, Tile, RowDims>>(device, "mma", grid, mma::THREADS, SHARED, stream, params);
        }
        return launch<mma_kernel<Fp16, Tile, RowDims>>(device, "mma", grid, mma::THREADS, SHARED, stream, params);
    });
}

}  // namespace nvr
