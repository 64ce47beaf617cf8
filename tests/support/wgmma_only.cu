// A library of wgmma alone, for tests of other tiles than those that GPUs are given: the other kernels take most of the compiler's time.
#include "verify_attn.cuh"

namespace nvr {

int64_t tile_shared_bytes(const Plan&) { return 0; }
TileSize size_of_mma_tile(const nvr_plan_config&, int) { return {}; }
int choose_mma_tile(const nvr_plan_config&, const Device&) { return 0; }
int launch_naive(const Device&, const VerifyParams&, void*) { return fail(NVR_ERROR_LAUNCH, "there is only wgmma here"); }
int launch_flash(const Device&, const VerifyParams&, void*) { return fail(NVR_ERROR_LAUNCH, "there is only wgmma here"); }
int launch_paged(const Device&, const VerifyParams&, void*) { return fail(NVR_ERROR_LAUNCH, "there is only wgmma here"); }
int launch_mma(const Device&, const VerifyParams&, void*) { return fail(NVR_ERROR_LAUNCH, "there is only wgmma here"); }

}  // namespace nvr
