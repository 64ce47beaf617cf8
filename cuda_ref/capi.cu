// The C interface: checks the arguments, lays out the workspace, launches. Host code only; nothing here throws, prints or exits.
#include "validate.cuh"
#include "work.cuh"

namespace {

using namespace nvr;

constexpr int64_t BLOCK_RESERVED_SHARED = 1024;   // what the runtime keeps of an SM's shared memory for each block
constexpr int64_t WORKSPACE_ALIGNMENT = 256;      // of each array in the workspace: whole cache lines of its own

const char* const STATUS_NAMES[] = {"NVR_OK",
                                    "NVR_ERROR_NULL_POINTER",
                                    "NVR_ERROR_ALIGNMENT",
                                    "NVR_ERROR_STRIDE",
                                    "NVR_ERROR_SIZE",
                                    "NVR_ERROR_DTYPE",
                                    "NVR_ERROR_OPTION",
                                    "NVR_ERROR_CAPACITY",
                                    "NVR_ERROR_WORKSPACE",
                                    "NVR_ERROR_UNSUPPORTED_DIMS",
                                    "NVR_ERROR_SHARED_MEMORY",
                                    "NVR_ERROR_NO_DEVICE",
                                    "NVR_ERROR_NO_KERNEL_IMAGE",
                                    "NVR_ERROR_LAUNCH",
                                    "NVR_ERROR_BARRIER"};
static_assert(sizeof(STATUS_NAMES) / sizeof(STATUS_NAMES[0]) == NVR_ERROR_BARRIER + 1, "a name for each status");

// Shortest share of a CTA, keys; and keys that a CTA does in the time by which each piece delays all others (see cuts.cuh).
constexpr int32_t MIN_KEYS = 128, MMA_MERGE_KEYS = 2, WGMMA_MERGE_KEYS = 5;

// Kernels on tensor cores. Each cuts work into tiles of its own, of rows of several tokens.
bool uses_tensor_cores(int kernel) { return kernel == NVR_KERNEL_MMA || kernel == NVR_KERNEL_WGMMA; }

int choose_tile(const nvr_plan_config& config, const Device& device) {
    return config.kernel == NVR_KERNEL_WGMMA ? choose_wgmma_tile(config, device) : choose_mma_tile(config, device);
}

TileSize size_of_tile(const nvr_plan_config& config, int tile) {
    return config.kernel == NVR_KERNEL_WGMMA ? size_of_wgmma_tile(config, tile) : size_of_mma_tile(config, tile);
}

void shape_for_tensor_cores(Plan* plan, int tile) {
    const TileSize size = size_of_tile(plan->config, tile);
    plan->tile = tile;
    plan->tile_rows = size.rows;
    plan->tile_keys = size.keys;
    plan->row_heads = plan->config.num_heads;
    plan->merge_keys = plan->config.kernel == NVR_KERNEL_WGMMA ? WGMMA_MERGE_KEYS : MMA_MERGE_KEYS;
    plan->base2 = 1;
}

// Tile extents of the plan. device: NULL is enough when it has no tile of mma or wgmma to choose.
Plan shape_plan(const nvr_plan_config& config, const Device* device) {
    Plan plan = {};
    plan.config = config;
    plan.min_keys = MIN_KEYS;
    plan.words = static_cast<int32_t>(ceil_div(min64(config.max_total_q, NVR_MAX_DRAFT), WARP));
    if (uses_tensor_cores(config.kernel)) {
        shape_for_tensor_cores(&plan, config.tile_config == 0 ? choose_tile(config, *device) : config.tile_config);
        return plan;
    }
    int32_t tile = config.tile_config;
    if (tile == NVR_TILE_DEFAULT) tile = config.num_heads > 8 ? NVR_TILE_H16_K16 : NVR_TILE_H8_K16;
    plan.tile_rows = tile == NVR_TILE_H16_K16 ? 16 : 8;
    plan.tile_keys = tile == NVR_TILE_H8_K32 ? 32 : 16;
    plan.head_tiles = static_cast<int32_t>(ceil_div(config.num_heads, plan.tile_rows));
    plan.row_heads = plan.head_tiles * plan.tile_rows;
    return plan;
}

// Persistent CTAs of paged, mma and wgmma: as many as are resident at once.
int32_t count_ctas(const Plan& plan, const Device& device) {
    if (uses_tensor_cores(plan.config.kernel)) return device.sms;
    int blocks = 1;
    for_dims(plan.config, [&](auto dims) { return blocks = decltype(dims)::type::BLOCKS_PER_SM; });
    const int64_t need = tile_shared_bytes(plan) + BLOCK_RESERVED_SHARED;
    return device.sms * static_cast<int32_t>(max64(1, min64(blocks, device.shared_per_sm / need)));
}

// Partial results. Otherwise: two a CTA. Deterministic: a request has at most MAX_PIECES pieces in all, and only requests longer than k keys,
// PIECE_KEYS in whole units, have several a tile, at most ceil(keys / k) <= 2 * keys / k.
int64_t count_partial_slots(const Plan& plan) {
    const nvr_plan_config& config = plan.config;
    if (!config.deterministic) return 2 * static_cast<int64_t>(plan.ctas);
    const int64_t keys = config.max_kv_entries * config.page_size + config.max_total_q;
    const int64_t tiles = min64(MAX_PIECES / 2, ceil_div(min64(config.max_total_q, NVR_MAX_DRAFT) * plan.row_heads, plan.tile_rows));
    const int64_t piece_keys = PIECE_KEYS / plan.tile_keys * plan.tile_keys;
    return min64(min64(config.max_batch, config.max_total_q) * MAX_PIECES, tiles * (2 * keys / piece_keys));
}

// Hands out the arrays of the workspace one after the other; with base NULL only their sizes count.
struct Allocator {
    char* base;
    int64_t used;
    template <class T>
    void take(T** array, int64_t count) {
        *array = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
        used += ceil_div(count * static_cast<int64_t>(sizeof(T)), WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT;
    }
};

int64_t lay_out(Plan* plan, char* base) {
    const nvr_plan_config& config = plan->config;
    Workspace& workspace = plan->workspace;
    Allocator allocator = {base, 0};
    allocator.take(&workspace.counts, 1);
    allocator.take(&workspace.requests, config.max_batch);
    allocator.take(&workspace.starts, plan->ctas + 1);
    allocator.take(&workspace.row_request, config.max_total_q);
    allocator.take(&workspace.visibility, config.max_total_q * plan->words);
    allocator.take(&workspace.slots, config.max_kv_entries * config.page_size);
    allocator.take(&workspace.merges, plan->max_merges);
    allocator.take(&workspace.statistics, plan->partial_slots * plan->tile_rows);
    allocator.take(&workspace.partial_out, plan->partial_slots * plan->tile_rows * config.latent_dim);
    return allocator.used;
}

int make_plan(const nvr_plan_config* config, Device* device, Plan* plan) {
    int status = check_config(config);
    if (status == NVR_OK) status = get_device(config->device, device);
    if (status != NVR_OK) return status;
    *plan = shape_plan(*config, device);
    plan->ctas = count_ctas(*plan, *device);
    plan->partial_slots = count_partial_slots(*plan);
    plan->max_merges = static_cast<int32_t>(plan->partial_slots / 2);  // a tile in pieces has two at least
    return NVR_OK;
}

int open_workspace(Plan* plan, const void* workspace, uint64_t workspace_bytes) {
    const int status = check_pointer("workspace", workspace, NVR_ALIGNMENT);
    if (status != NVR_OK) return status;
    const int64_t need = lay_out(plan, static_cast<char*>(const_cast<void*>(workspace)));
    if (workspace_bytes >= static_cast<uint64_t>(need)) return NVR_OK;
    return fail(NVR_ERROR_WORKSPACE, "the workspace has %llu bytes, this plan needs %lld; see nvr_workspace_bytes",
                static_cast<unsigned long long>(workspace_bytes), static_cast<long long>(need));
}

int check_mma(const Plan& plan, const Device& device) {
    const TileSize size = size_of_mma_tile(plan.config, plan.tile);
    if (size.hands_over && !device.hands_over) {
        return fail(NVR_ERROR_NO_KERNEL_IMAGE,
                    "the mma tile of %d rows needs an sm_90a GPU and a library built for it; the default tile would run", size.rows);
    }
    if (size.shared_bytes <= device.shared_per_block) return NVR_OK;
    return fail(NVR_ERROR_SHARED_MEMORY,
                "the mma tile of %d rows x %d keys needs %lld B of shared memory, this device has %d B; %s would run", size.rows, size.keys,
                static_cast<long long>(size.shared_bytes), device.shared_per_block,
                plan.tile == choose_mma_tile(plan.config, device) ? "paged" : "the default tile");
}

int check_wgmma(const Plan& plan, const Device& device) {
    const TileSize size = size_of_wgmma_tile(plan.config, plan.tile);
    if (!device.hands_over) {
        return fail(NVR_ERROR_NO_KERNEL_IMAGE, "wgmma needs an sm_90a GPU (Hopper) and a library built for it; mma would run");
    }
    if (size.shared_bytes <= device.shared_for_wgmma) return NVR_OK;
    return fail(NVR_ERROR_SHARED_MEMORY,
                "the wgmma tile of %d rows x %d keys needs %lld B of shared memory, this device has %d B; %s would run", size.rows, size.keys,
                static_cast<long long>(size.shared_bytes), device.shared_for_wgmma,
                plan.tile == choose_wgmma_tile(plan.config, device) ? "mma" : "the default tile");
}

int check_shared(const Plan& plan, const Device& device) {
    const int64_t need = tile_shared_bytes(plan);
    if (need <= device.shared_per_block) return NVR_OK;
    return fail(NVR_ERROR_SHARED_MEMORY,
                "tile of %d heads x %d keys needs %lld B of shared memory, this device has %d B; the default tile configuration needs less",
                plan.tile_rows, plan.tile_keys, static_cast<long long>(need), device.shared_per_block);
}

int64_t shared_bytes_of(const Plan& plan, int kernel) {
    if (kernel == NVR_KERNEL_NAIVE) return 0;
    return uses_tensor_cores(kernel) ? size_of_tile(plan.config, plan.tile).shared_bytes : tile_shared_bytes(plan);
}

// Whether a plan is one for the kernel.
int check_plans_kernel(const nvr_plan_config& config, int kernel) {
    if (kernel < NVR_KERNEL_NAIVE || kernel > NVR_KERNEL_WGMMA) return fail(NVR_ERROR_OPTION, "unknown kernel %d", kernel);
    if (kernel == config.kernel || !(uses_tensor_cores(kernel) || uses_tensor_cores(config.kernel))) return NVR_OK;
    return fail(NVR_ERROR_OPTION, "a plan with kernel = %d cannot run kernel %d: mma and wgmma cut work into tiles of their own", config.kernel,
                kernel);
}

int check_kernel(const Plan& plan, const Device& device, int kernel) {
    const int status = check_plans_kernel(plan.config, kernel);
    if (status != NVR_OK || kernel == NVR_KERNEL_NAIVE) return status;
    if (kernel == NVR_KERNEL_WGMMA) return check_wgmma(plan, device);
    return kernel == NVR_KERNEL_MMA ? check_mma(plan, device) : check_shared(plan, device);
}

int verify(int kernel, const nvr_plan_config* config, const nvr_tensors* tensors, const void* workspace, uint64_t workspace_bytes,
           void* stream) {
    Device device;
    VerifyParams params = {};
    int status = make_plan(config, &device, &params.plan);
    if (status == NVR_OK) status = check_tensors(*config, tensors);
    if (status == NVR_OK) status = open_workspace(&params.plan, workspace, workspace_bytes);
    if (status == NVR_OK) status = check_kernel(params.plan, device, kernel);
    if (status != NVR_OK) return status;
    params.tensors = *tensors;
    params.rows = min64(config->max_total_q, min64(tensors->q_rows, tensors->out_rows));
    if (params.rows == 0) return NVR_OK;
    const DeviceGuard guard(config->device);
    if (kernel == NVR_KERNEL_NAIVE) return launch_naive(device, params, stream);
    if (kernel == NVR_KERNEL_FLASH) return launch_flash(device, params, stream);
    if (kernel == NVR_KERNEL_PAGED) return launch_paged(device, params, stream);
    return kernel == NVR_KERNEL_MMA ? launch_mma(device, params, stream) : launch_wgmma(device, params, stream);
}

}  // namespace

extern "C" {

int nvr_abi_version(void) { return NVR_ABI_VERSION; }

const char* nvr_last_error(void) { return last_error_text(); }

const char* nvr_status_string(int status) {
    return status >= NVR_OK && status <= NVR_ERROR_BARRIER ? STATUS_NAMES[status] : "unknown status";
}

int nvr_can_run(const nvr_plan_config* config, int kernel) {
    Device device;
    Plan plan;
    const int status = make_plan(config, &device, &plan);
    return status == NVR_OK ? check_kernel(plan, device, kernel) : status;
}

int nvr_shared_bytes(const nvr_plan_config* config, int kernel, uint64_t* bytes) {
    Device device;
    int status = check_config(config);
    if (status == NVR_OK && bytes == nullptr) status = fail(NVR_ERROR_NULL_POINTER, "bytes is NULL");
    if (status == NVR_OK) status = check_plans_kernel(*config, kernel);
    if (status == NVR_OK && uses_tensor_cores(kernel) && config->tile_config == 0) status = get_device(config->device, &device);
    if (status != NVR_OK) return status;
    *bytes = static_cast<uint64_t>(shared_bytes_of(shape_plan(*config, &device), kernel));
    return NVR_OK;
}

int nvr_workspace_bytes(const nvr_plan_config* config, uint64_t* bytes) {
    Device device;
    Plan plan;
    const int status = make_plan(config, &device, &plan);
    if (status != NVR_OK) return status;
    if (bytes == nullptr) return fail(NVR_ERROR_NULL_POINTER, "bytes is NULL");
    *bytes = static_cast<uint64_t>(lay_out(&plan, nullptr));
    return NVR_OK;
}

int nvr_plan_update(const nvr_plan_config* config, const nvr_indices* indices, void* workspace, uint64_t workspace_bytes, void* stream) {
    Device device;
    UpdateParams params = {};
    int status = make_plan(config, &device, &params.plan);
    if (status == NVR_OK) status = check_indices(*config, indices);
    if (status == NVR_OK) status = open_workspace(&params.plan, workspace, workspace_bytes);
    if (status != NVR_OK) return status;
    params.indices = *indices;
    const DeviceGuard guard(config->device);
    return launch_update(device, params, stream);
}

int nvr_verify_naive(const nvr_plan_config* config, const nvr_tensors* tensors, const void* workspace, uint64_t workspace_bytes,
                     void* stream) {
    return verify(NVR_KERNEL_NAIVE, config, tensors, workspace, workspace_bytes, stream);
}

int nvr_verify_flash(const nvr_plan_config* config, const nvr_tensors* tensors, const void* workspace, uint64_t workspace_bytes,
                     void* stream) {
    return verify(NVR_KERNEL_FLASH, config, tensors, workspace, workspace_bytes, stream);
}

int nvr_verify_paged(const nvr_plan_config* config, const nvr_tensors* tensors, void* workspace, uint64_t workspace_bytes, void* stream) {
    return verify(NVR_KERNEL_PAGED, config, tensors, workspace, workspace_bytes, stream);
}

int nvr_verify_mma(const nvr_plan_config* config, const nvr_tensors* tensors, void* workspace, uint64_t workspace_bytes, void* stream) {
    return verify(NVR_KERNEL_MMA, config, tensors, workspace, workspace_bytes, stream);
}

int nvr_verify_wgmma(const nvr_plan_config* config, const nvr_tensors* tensors, void* workspace, uint64_t workspace_bytes, void* stream) {
    return verify(NVR_KERNEL_WGMMA, config, tensors, workspace, workspace_bytes, stream);
}

}  // extern "C"
