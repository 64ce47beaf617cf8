// mma with tiles of 32 rows.
#include "mma.cuh"

namespace nvr {

template int launch_mma_tile<MmaM32>(const Device&, const VerifyParams&, void*);
template int launch_mma_tile<MmaM32Medium>(const Device&, const VerifyParams&, void*);
template int launch_mma_tile<MmaM32Small>(const Device&, const VerifyParams&, void*);

}  // namespace nvr
