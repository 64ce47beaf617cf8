// Device limits, error texts: the host side that is not a kernel. Compiled for both builds.
#include "device.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

namespace nvr {

namespace {
thread_local char last_error[512] = "";
}

int fail(int status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char* last_error_text() { return last_error; }

#ifdef __CUDACC__
int launch_failed(const char* what, cudaError_t error) {
    (void)cudaGetLastError();  // reported here, so the next call does not find it
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        return fail(NVR_ERROR_NO_KERNEL_IMAGE, "%s: the library was not built for this device's architecture; build it with cuda_ref.build",
                    what);
    }
    return fail(NVR_ERROR_LAUNCH, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

namespace {

constexpr int CACHED_DEVICES = 64;

struct CachedLimits {
    std::atomic<int> sms, shared_per_block, shared_per_sm;  // sms is written last: nonzero = all are there
    std::atomic<bool> hands_over, overlaps;
};
CachedLimits cached_limits[CACHED_DEVICES];

int no_device(int ordinal, cudaError_t error) {
    (void)cudaGetLastError();
    return fail(NVR_ERROR_NO_DEVICE, "CUDA device %d: %s", ordinal, cudaGetErrorString(error));
}

int ask_device(int ordinal, Device* device) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return no_device(ordinal, error);
    if (ordinal < 0 || ordinal >= count) return fail(NVR_ERROR_NO_DEVICE, "CUDA device %d does not exist; there are %d", ordinal, count);
    int major = 0, minor = 0;
    const struct {
        int* value;
        cudaDeviceAttr attribute;
    } wanted[] = {{&device->sms, cudaDevAttrMultiProcessorCount},
                  {&device->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                  {&device->shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                  {&major, cudaDevAttrComputeCapabilityMajor},
                  {&minor, cudaDevAttrComputeCapabilityMinor}};
    for (const auto& want : wanted) {
        error = cudaDeviceGetAttribute(want.value, want.attribute, ordinal);
        if (error != cudaSuccess) return no_device(ordinal, error);
    }
    device->shared_for_wgmma = device->shared_per_block;
#ifdef NVR_SM_90A  // build.py: there is code for sm_90a
    device->hands_over = major == 9 && minor == 0;
#else
    device->hands_over = false;
#endif
    device->overlaps = major >= 9;  // build.py compiles for the very architecture, so that its code waits
    return NVR_OK;
}

}  // namespace

int get_device(int ordinal, Device* device) {
    device->ordinal = ordinal;
    CachedLimits* cached = ordinal >= 0 && ordinal < CACHED_DEVICES ? &cached_limits[ordinal] : nullptr;
    if (cached != nullptr && (device->sms = cached->sms.load(std::memory_order_acquire)) != 0) {
        device->shared_per_block = cached->shared_per_block.load(std::memory_order_relaxed);
        device->shared_per_sm = cached->shared_per_sm.load(std::memory_order_relaxed);
        device->hands_over = cached->hands_over.load(std::memory_order_relaxed);
        device->overlaps = cached->overlaps.load(std::memory_order_relaxed);
        device->shared_for_wgmma = device->shared_per_block;
        return NVR_OK;
    }
    const int status = ask_device(ordinal, device);
    if (status == NVR_OK && cached != nullptr) {
        cached->shared_per_block.store(device->shared_per_block, std::memory_order_relaxed);
        cached->shared_per_sm.store(device->shared_per_sm, std::memory_order_relaxed);
        cached->hands_over.store(device->hands_over, std::memory_order_relaxed);
        cached->overlaps.store(device->overlaps, std::memory_order_relaxed);
        cached->sms.store(device->sms, std::memory_order_release);
    }
    return status;
}

DeviceGuard::DeviceGuard(int ordinal) : previous_(-1) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current != ordinal && cudaSetDevice(ordinal) == cudaSuccess) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
    if (previous_ >= 0) (void)cudaSetDevice(previous_);
}
#else
// A small imaginary device: few enough CTAs that small problems are split, and the shared memory of an sm_120 block (for wgmma, which is Hopper's,
// that of a Hopper block) or that of CUDA_REF_HOST_SHARED. Its threads have registers as they need them.
int get_device(int ordinal, Device* device) {
    constexpr int SMS = 4, SHARED_PER_BLOCK = 101376, HOPPER_SHARED = 232448;
    const char* text = getenv("CUDA_REF_HOST_SHARED");
    const int shared = text == nullptr ? SHARED_PER_BLOCK : atoi(text), hopper_shared = text == nullptr ? HOPPER_SHARED : shared;
    *device = {ordinal, SMS, shared, hopper_shared, 2 * (shared + 1024), true, false};
    return NVR_OK;
}

DeviceGuard::DeviceGuard(int) : previous_(-1) {}
DeviceGuard::~DeviceGuard() {}
#endif

}  // namespace nvr
