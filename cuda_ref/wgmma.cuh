// wgmma: tree-verify attention for Hopper (sm_90a), on tensor cores by warpgroup (bfloat16 and float16).
//
//     grid (ctas), block 512 threads      CTA p walks its share of the line of work (work.cuh); a unit is one step of KEYS KV rows for one
//                                         tile of 64 query rows. A query row is (draft token, head): all heads of all draft tokens of a
//                                         request share each fetched KV row.
//
//     producer warpgroup         score warpgroup                       two value warpgroups
//     Q, slots -> ring           Q to registers                        half of the columns each
//            |      full[s]      S = Q K^T, mask, P = 2^(S - peak)     O = alpha O + P V (registers)
//            |                         |    ready[s]: P, alpha               |
//            +-----------------> ring of slots <-----------------------------+
//            <---------------------- empty[s] -------------------------------+
//
// ring: slots of KEYS KV rows, read twice: as keys (whole rows) and as values (their latent part). While the value warpgroups multiply step j, the
// score warpgroup is at step j + 1 and the producers fetch step j + 2. A tile's Q comes through the same ring, ahead of its keys.
//
//     a slot:  full    the producers' copies have landed                                -> score warps
//              ready   P, alpha, flag and, in the last step, the sums are written       -> value warps
//              scored  S is there: the tensor cores are free until its softmax is made  -> value warps that hold back (DELAYED)
//              empty   the value warps have multiplied (of Q: the score warps read it)  -> producers
//
// A tile that a share's border cuts is finished by combine: its pieces leave (peak, total) and a normalised partial, peaks in log2 units.
#pragma once

#include "wgmma_producer.cuh"
#include "wgmma_score.cuh"
#include "wgmma_value.cuh"

namespace nvr {

// Whether the code of this pass can run on a GPU: there is wgmma, and room for the tile.
template <class L>
__host__ __device__ constexpr bool is_wgmma_compiled() {
#if !defined(__CUDA_ARCH__)
    return true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return L::END <= 232448;
#else
    return false;
#endif
}

template <class Element, class Tile, class RowDims>
__global__ void __launch_bounds__(wgmma::THREADS, 1) wgmma_kernel(VerifyParams params) {
    using C = wgmma::Config<Element, Tile, RowDims>;
    if constexpr (is_wgmma_compiled<C>()) {
        constexpr uint32_t FIRST_VALUE = wgmma::WARPGROUP, FIRST_PRODUCER = (1 + wgmma::VALUE_GROUPS) * wgmma::WARPGROUP;
        const uint32_t t = threadIdx.x, base = ptx::shared_address(shared_memory());
        if (t == 0) {
            for (uint32_t s = 0; s < C::SLOTS; ++s) {
                ptx::mbarrier_init(wgmma::barrier_at<C::FULL>(base, s), wgmma::WARPGROUP);
                ptx::mbarrier_init(wgmma::barrier_at<C::EMPTY>(base, s), wgmma::VALUE_GROUPS * wgmma::WARPGROUP);
                ptx::mbarrier_init(wgmma::barrier_at<C::READY>(base, s), wgmma::WARPGROUP);
                ptx::mbarrier_init(wgmma::barrier_at<C::SCORED>(base, s), wgmma::SCORE_WARPS);
            }
        }
        __syncthreads();  // hazard: all roles use the mbarriers that thread 0 makes
        ptx::griddepcontrol_launch_dependents();  // combine: as soon as a CTA of this kernel has left room; it waits for all of them
        if (t < FIRST_VALUE) {
            ptx::set_max_registers<C::SCORE_REGISTERS, (C::SCORE_REGISTERS > wgmma::LAUNCH_REGISTERS)>();
            wgmma::score<C>(params, base, t);
        } else if (t < FIRST_PRODUCER) {
            ptx::set_max_registers<C::VALUE_REGISTERS, (C::VALUE_REGISTERS > wgmma::LAUNCH_REGISTERS)>();
            wgmma::value<C>(params, base, t - FIRST_VALUE);
        } else {
            ptx::set_max_registers<C::PRODUCER_REGISTERS, (C::PRODUCER_REGISTERS > wgmma::LAUNCH_REGISTERS)>();
            wgmma::produce<C>(params, base, t - FIRST_PRODUCER);
        }
    } else {
#ifdef __CUDA_ARCH__
        __trap();
#endif
    }
}

template <class Element>
int launch_wgmma_of(const Device& device, const VerifyParams& params, void* stream) {
    const Plan& plan = params.plan;
    const dim3 grid(static_cast<unsigned>(plan.ctas));
    return WgmmaTiles::visit(plan.tile, [&](auto tile) {
        return for_mma_dims(plan.config, [&](auto dims) {
            using Tile = typename decltype(tile)::type;
            using RowDims = typename decltype(dims)::type;
            constexpr int64_t SHARED = wgmma::Layout<Tile, RowDims>::END;
            return launch<wgmma_kernel<Element, Tile, RowDims>>(device, "wgmma", grid, wgmma::THREADS, SHARED, stream, params);
        });
    });
}

}  // namespace nvr
