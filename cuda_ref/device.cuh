// The host side's view of a device: its limits, the guard that makes it current, error texts, and the one way to launch a kernel.
#pragma once

#include <atomic>

#include "common.cuh"
#include "verify_attn.h"

namespace nvr {

struct Device {
    int ordinal;
    int sms;
    int shared_per_block;  // opt-in limit of dynamic shared memory, bytes
    int shared_for_wgmma;  // the same for wgmma; another number in the host build only
    int shared_per_sm;  // each resident block takes its own need and 1 KB more of it
    bool hands_over;    // there are setmaxnreg and wgmma, and code in this library that uses them
    bool overlaps;      // a grid can start before the one before it has ended
};

// A block gets this much dynamic shared memory without asking (CUDA C++ Programming Guide, "Shared Memory").
constexpr int64_t SHARED_WITHOUT_OPT_IN = 48 * 1024;

// Keeps the calling thread's text for nvr_last_error and returns the status.
__attribute__((format(printf, 2, 3))) int fail(int status, const char* format, ...);

const char* last_error_text();

// Fills in the device's limits; they are asked once per process.
int get_device(int ordinal, Device* device);

// Makes a device current for the calling thread and gives the old one back at the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int ordinal);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_;
};

#ifdef __CUDACC__
int launch_failed(const char* what, cudaError_t error);

// Raises a kernel's dynamic shared memory limit, once per kernel and device. Two threads may both do it: the call is idempotent.
template <auto kernel>
int allow_shared(const Device& device, const char* name) {
    static std::atomic<uint64_t> done{0};
    const uint64_t bit = device.ordinal < 64 ? uint64_t{1} << device.ordinal : 0;  // devices beyond 63 ask every time
    if (done.load(std::memory_order_acquire) & bit) return NVR_OK;
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   device.shared_per_block);
    if (error != cudaSuccess) return launch_failed(name, error);
    done.fetch_or(bit, std::memory_order_release);
    return NVR_OK;
}

// Enqueues kernel(params) and reads the launch's own status. overlap: where the device can, the kernel starts when the one before it in the
// stream lets it ("programmatic dependent launch", CUDA C++ Programming Guide), and waits for that one's end by griddepcontrol_wait.
template <auto kernel, class Params>
int launch(const Device& device, const char* name, dim3 grid, int threads, int64_t shared, void* stream, const Params& params,
           bool overlap = false) {
    if (shared > SHARED_WITHOUT_OPT_IN) {
        const int status = allow_shared<kernel>(device, name);
        if (status != NVR_OK) return status;
    }
    void* arguments[] = {const_cast<Params*>(&params)};
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &early;
    config.numAttrs = overlap && device.overlaps ? 1 : 0;
    const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
    return error == cudaSuccess ? NVR_OK : launch_failed(name, error);
}
#else
// Runs kernel(params) for the whole grid before it returns.
template <auto kernel, class Params>
int launch(const Device&, const char* name, dim3 grid, int threads, int64_t shared, void*, const Params& params, bool = false) {
    const auto body = [](const void* argument) { kernel(*static_cast<const Params*>(argument)); };
    const char* trouble = host::run_grid(grid, threads, static_cast<size_t>(shared), body, &params);
    return trouble == nullptr ? NVR_OK : fail(NVR_ERROR_BARRIER, "%s: %s", name, trouble);
}
#endif

}  // namespace nvr
