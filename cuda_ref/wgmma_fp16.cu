// wgmma of float16.
#include "wgmma.cuh"

namespace nvr {

template int launch_wgmma_of<Fp16>(const Device&, const VerifyParams&, void*);

}  // namespace nvr
