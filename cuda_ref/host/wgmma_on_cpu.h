// wgmma_ptx.cuh for g++: the same names, on the fibers of cuda_on_cpu.h.
//
// * A product happens as late as a GPU may let it: in the wait that ends its group, with what is in shared memory then. Its accumulators are
//   NaN from its issue until a wait takes them; one that takes none ends the reads of shared memory only.
// * Proxies are not modelled: fence_proxy_async does nothing, and one that is missing is not seen. The simulator of numba_verify sees it.
// * Sums are in double and rounded once a product; a tensor core is a little coarser.
#pragma once

#include "ptx_on_cpu.h"

namespace nvr {
namespace ptx {

inline void fence_proxy_async() {}
inline void wgmma_fence() { host::wgmma_fence(); }
inline void wgmma_commit() { host::wgmma_commit(); }

template <int NEWEST>
void wgmma_wait() {
    static_assert(0 <= NEWEST && NEWEST <= 7, "a number of groups");
    host::wgmma_wait(NEWEST, nullptr, 0);
}
template <int NEWEST, int COUNT>
void wgmma_wait(float (&acc)[COUNT]) {
    static_assert(0 <= NEWEST && NEWEST <= 7, "a number of groups");
    host::wgmma_wait(NEWEST, acc, COUNT);
}

template <bool TRANSPOSE_B, class Element, int COUNT>
void wgmma_ss(float (&acc)[COUNT], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(IS_BF16<Element> || IS_FP16<Element>, "16-bit floats");
    static_assert(COUNT % 4 == 0 && COUNT <= 128, "a multiple of 8 columns up to 256");
    host::wgmma(acc, nullptr, {a, b, COUNT, accumulate, TRANSPOSE_B, IS_BF16<Element>, false});
}
template <bool TRANSPOSE_B, class Element, int COUNT>
void wgmma_rs(float (&acc)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(IS_BF16<Element> || IS_FP16<Element>, "16-bit floats");
    static_assert(COUNT % 4 == 0 && COUNT <= 128, "a multiple of 8 columns up to 256");
    host::wgmma(acc, a, {0, b, COUNT, accumulate, TRANSPOSE_B, IS_BF16<Element>, true});
}

}  // namespace ptx
}  // namespace nvr
