// Checks of everything the host knows: pointers, alignment, sizes, strides, enum values. Host code only.
#include "validate.cuh"

namespace nvr {

namespace {

constexpr int64_t MAX_ROWS = INT32_MAX;           // the grid's x extent
constexpr int64_t MAX_SLOTS = INT32_MAX - 4096;  // kernels count keys, drafts and the rest of a last tile included, in int32

int check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return NVR_OK;
    return fail(NVR_ERROR_SIZE, "%s is %lld, expected %lld .. %lld", name, static_cast<long long>(value), static_cast<long long>(low),
                static_cast<long long>(high));
}

int element_bytes(const nvr_plan_config& config) { return config.dtype == NVR_FLOAT32 ? 4 : 2; }

int check_dim(const char* name, int32_t value, int32_t low, int32_t high) {
    if (value >= low && value <= high && value % WARP == 0) return NVR_OK;
    return fail(NVR_ERROR_UNSUPPORTED_DIMS, "%s is %d; the kernels take multiples of %d from %d to %d", name, value, WARP, low, high);
}

// A stride of a dimension with `extent` entries; only strides that are used count.
int check_stride(const char* name, int64_t stride, int64_t extent, const nvr_plan_config& config) {
    if (extent <= 1) return NVR_OK;
    const int64_t unit = NVR_ALIGNMENT / element_bytes(config);
    if (stride >= 0 && stride % unit == 0) return NVR_OK;
    return fail(NVR_ERROR_STRIDE, "%s is %lld elements, expected a multiple of %lld (16 bytes), not negative", name,
                static_cast<long long>(stride), static_cast<long long>(unit));
}

int check_index_array(const char* name, const nvr_index_array& array, int64_t least) {
    if (array.width != 4 && array.width != 8) return fail(NVR_ERROR_DTYPE, "%s has width %d, expected 4 or 8 bytes", name, array.width);
    if (array.length < least) {
        return fail(NVR_ERROR_SIZE, "%s has %lld elements, expected at least %lld", name, static_cast<long long>(array.length),
                    static_cast<long long>(least));
    }
    return array.length == 0 ? NVR_OK : check_pointer(name, array.data, array.width);
}

// Rows that mma or wgmma, `kernel`, is compiled for.
int check_mma_rows(const nvr_plan_config& config, const char* kernel) {
    if (config.dtype == NVR_FLOAT32) return fail(NVR_ERROR_DTYPE, "dtype float32: %s takes bfloat16 and float16; paged would run", kernel);
    if (for_mma_dims(config, [](auto) { return true; })) return NVR_OK;
    return fail(NVR_ERROR_UNSUPPORTED_DIMS,
                "latent_dim is %d and rope_dim %d; %s is compiled for 512/64, 512/0, 256/64 and 128/64, paged would run", config.latent_dim,
                config.rope_dim, kernel);
}

int check_tree(const nvr_tree& tree) {
    if (tree.kind < NVR_TREE_CAUSAL || tree.kind > NVR_TREE_FULL_MASK) return fail(NVR_ERROR_OPTION, "unknown tree kind %d", tree.kind);
    if (tree.kind == NVR_TREE_CAUSAL) return NVR_OK;
    int status = check_range("tree.length", tree.length, 0, INT64_MAX);
    if (status != NVR_OK) return status;
    if (tree.kind == NVR_TREE_BITS || tree.kind == NVR_TREE_DENSE) {
        if ((status = check_range("tree.stride", tree.stride, 0, INT32_MAX)) != NVR_OK) return status;
    }
    const bool words = tree.kind == NVR_TREE_PARENTS || tree.kind == NVR_TREE_BITS;
    return tree.length == 0 ? NVR_OK : check_pointer("tree.data", tree.data, words ? sizeof(int32_t) : 1);
}

}  // namespace

int check_pointer(const char* name, const void* pointer, int64_t alignment) {
    if (pointer == nullptr) return fail(NVR_ERROR_NULL_POINTER, "%s is NULL", name);
    if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return NVR_OK;
    return fail(NVR_ERROR_ALIGNMENT, "%s is at %p, expected a multiple of %lld bytes", name, pointer, static_cast<long long>(alignment));
}

int check_config(const nvr_plan_config* config) {
    if (config == nullptr) return fail(NVR_ERROR_NULL_POINTER, "config is NULL");
    if (config->dtype < NVR_BFLOAT16 || config->dtype > NVR_FLOAT32) return fail(NVR_ERROR_DTYPE, "unknown dtype %d", config->dtype);
    if (config->kernel < NVR_KERNEL_NAIVE || config->kernel > NVR_KERNEL_WGMMA) {
        return fail(NVR_ERROR_OPTION, "unknown kernel %d", config->kernel);
    }
    const bool mma = config->kernel == NVR_KERNEL_MMA, wgmma = config->kernel == NVR_KERNEL_WGMMA;
    const int last_tile = wgmma ? count_wgmma_tiles() : mma ? static_cast<int>(NVR_MMA_M16_SMALL) : static_cast<int>(NVR_TILE_H8_K32);
    if (config->tile_config < 0 || config->tile_config > last_tile) {
        return fail(NVR_ERROR_OPTION, "unknown tile configuration %d", config->tile_config);
    }
    const struct {
        const char* name;
        int64_t value, low, high;
    } ranges[] = {{"num_heads", config->num_heads, 1, NVR_MAX_HEADS},
                  {"page_size", config->page_size, 1, INT32_MAX},
                  {"draft_in_cache", config->draft_in_cache, 0, 1},
                  {"deterministic", config->deterministic, 0, 1},
                  {"max_batch", config->max_batch, 0, MAX_ROWS},
                  {"max_total_q", config->max_total_q, 0, MAX_ROWS},
                  {"max_kv_entries", config->max_kv_entries, 0, MAX_SLOTS / max64(config->page_size, 1)}};
    for (const auto& range : ranges) {
        const int status = check_range(range.name, range.value, range.low, range.high);
        if (status != NVR_OK) return status;
    }
    int status = check_dim("latent_dim", config->latent_dim, WARP, MAX_LATENT_DIM);
    if (status == NVR_OK) status = check_dim("rope_dim", config->rope_dim, 0, MAX_ROPE_DIM);
    return status == NVR_OK && (mma || wgmma) ? check_mma_rows(*config, mma ? "mma" : "wgmma") : status;
}

int check_indices(const nvr_plan_config& config, const nvr_indices* indices) {
    if (indices == nullptr) return fail(NVR_ERROR_NULL_POINTER, "indices is NULL");
    int status = check_range("batch", indices->batch, 0, INT64_MAX);
    if (status != NVR_OK) return status;
    if (indices->batch > config.max_batch) {
        return fail(NVR_ERROR_CAPACITY, "batch is %lld, the plan's max_batch is %lld", static_cast<long long>(indices->batch),
                    static_cast<long long>(config.max_batch));
    }
    if (indices->kv_indices.length > config.max_kv_entries) {
        return fail(NVR_ERROR_CAPACITY, "kv_indices has %lld elements, the plan's max_kv_entries is %lld",
                    static_cast<long long>(indices->kv_indices.length), static_cast<long long>(config.max_kv_entries));
    }
    if ((status = check_index_array("qo_indptr", indices->qo_indptr, indices->batch + 1)) != NVR_OK) return status;
    if ((status = check_index_array("kv_indptr", indices->kv_indptr, indices->batch + 1)) != NVR_OK) return status;
    if ((status = check_index_array("kv_indices", indices->kv_indices, 0)) != NVR_OK) return status;
    const nvr_index_array& lens = indices->kv_lens;
    if (lens.data != nullptr || lens.length != 0) {
        if ((status = check_index_array("kv_lens", lens, indices->batch)) != NVR_OK) return status;
    } else if (config.page_size > 1 && indices->batch > 0) {
        return fail(NVR_ERROR_NULL_POINTER, "kv_lens is NULL, but page_size is %d: the tokens of a last page are not known",
                    config.page_size);
    }
    return check_tree(indices->tree);
}

int check_tensors(const nvr_plan_config& config, const nvr_tensors* tensors) {
    if (tensors == nullptr) return fail(NVR_ERROR_NULL_POINTER, "tensors is NULL");
    const bool aside = !config.draft_in_cache;
    if (!aside && tensors->draft_kv != nullptr) return fail(NVR_ERROR_OPTION, "draft_kv is given, but the plan says draft_in_cache");
    const struct {
        const char *name, *count;
        const void* pointer;
        int64_t rows;
        bool used;
    } arrays[] = {{"q", "q_rows", tensors->q, tensors->q_rows, true},
                  {"kv_cache", "kv_pages", tensors->kv_cache, tensors->kv_pages, true},
                  {"draft_kv", "draft_rows", tensors->draft_kv, tensors->draft_rows, aside},
                  {"out", "out_rows", tensors->out, tensors->out_rows, true}};
    for (const auto& array : arrays) {
        if (!array.used) continue;
        int status = check_range(array.count, array.rows, 0, INT64_MAX);
        if (status == NVR_OK && array.rows > 0) status = check_pointer(array.name, array.pointer, NVR_ALIGNMENT);
        if (status != NVR_OK) return status;
    }
    if (tensors->lse != nullptr) {
        const int status = check_pointer("lse", tensors->lse, sizeof(float));
        if (status != NVR_OK) return status;
    }
    const struct {
        const char* name;
        int64_t stride, extent;
    } strides[] = {{"q_row_stride", tensors->q_row_stride, tensors->q_rows},
                   {"q_head_stride", tensors->q_head_stride, config.num_heads},
                   {"kv_page_stride", tensors->kv_page_stride, tensors->kv_pages},
                   {"kv_token_stride", tensors->kv_token_stride, config.page_size},
                   {"draft_row_stride", tensors->draft_row_stride, aside ? tensors->draft_rows : 0},
                   {"out_row_stride", tensors->out_row_stride, tensors->out_rows},
                   {"out_head_stride", tensors->out_head_stride, config.num_heads}};
    for (const auto& stride : strides) {
        const int status = check_stride(stride.name, stride.stride, stride.extent, config);
        if (status != NVR_OK) return status;
    }
    return NVR_OK;
}

}  // namespace nvr
