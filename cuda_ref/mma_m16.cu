// mma with tiles of 16 rows.
#include "mma.cuh"

namespace nvr {

template int launch_mma_tile<MmaM16>(const Device&, const VerifyParams&, void*);
template int launch_mma_tile<MmaM16Medium>(const Device&, const VerifyParams&, void*);
template int launch_mma_tile<MmaM16Small>(const Device&, const VerifyParams&, void*);

}  // namespace nvr
