// wgmma of bfloat16.
#include "wgmma.cuh"

namespace nvr {

template int launch_wgmma_of<Bf16>(const Device&, const VerifyParams&, void*);

}  // namespace nvr
