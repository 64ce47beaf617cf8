// mma with tiles of 64 rows.
#include "mma.cuh"

namespace nvr {

template int launch_mma_tile<MmaM64>(const Device&, const VerifyParams&, void*);

}  // namespace nvr
