// What capi.cu checks before it launches anything. Each function returns a status and leaves the numbers in nvr_last_error.
#pragma once

#include "verify_attn.cuh"

namespace nvr {

int check_config(const nvr_plan_config* config);
int check_indices(const nvr_plan_config& config, const nvr_indices* indices);
int check_tensors(const nvr_plan_config& config, const nvr_tensors* tensors);
int check_pointer(const char* name, const void* pointer, int64_t alignment);

}  // namespace nvr
