/* Runs a few small problems through the C interface and compares with a dense computation in double precision.
 * Plain C on purpose: it is the proof that the header needs no C++ and no Python. Exit code 0 = all agree.
 * Host build only: the arrays are host memory, exactly as large as promised, so AddressSanitizer sees any access beyond them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../verify_attn.h"

#define MAX_REQUESTS 4
#define SM_SCALE 0.3f

struct problem {
    int heads, latent, rope, page_size, aside, deterministic, tile_config, requests;
    int drafts[MAX_REQUESTS], prefix[MAX_REQUESTS];
    float logit_cap;
};

static const struct problem PROBLEMS[] = {
    {3, 128, 64, 1, 1, 0, NVR_TILE_DEFAULT, 3, {2, 0, 5}, {37, 4, 0}, 0.0f},
    {20, 512, 64, 4, 0, 1, NVR_TILE_DEFAULT, 2, {3, 1}, {70, 1100}, 30.0f},
    {9, 96, 32, 16, 1, 0, NVR_TILE_H8_K32, 4, {1, 7, 0, 2}, {0, 33, 0, 600}, 0.0f},
};

static unsigned random_state = 1;

/* Uniform in [-1, 1), the same on every machine. Multiples of 1/128, which bfloat16 holds exactly. */
static float next_random(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 24) / 128.0f - 1.0f;
}

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(16, (bytes + 15) / 16 * 16);
    if (memory == NULL) exit(2);
    return memory;
}

static float *random_rows(size_t count) {
    float *rows = allocate(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) rows[i] = next_random();
    return rows;
}

/* Node i hangs below node (i - 1) / 2: a binary tree. */
static int sees(int row, int key) {
    while (row > key) row = row == 0 ? -1 : (row - 1) / 2;
    return row == key;
}

struct arrays {
    int total_q, entries, pool_pages, tokens;
    int32_t qo[MAX_REQUESTS + 1], kv[MAX_REQUESTS + 1], lens[MAX_REQUESTS];
    int32_t *pages, *parents;
    float *q, *pool, *draft, *out, *lse;
};

static void build_arrays(const struct problem *p, struct arrays *a) {
    const int width = p->latent + p->rope;
    memset(a, 0, sizeof *a);
    for (int r = 0; r < p->requests; ++r) {
        a->lens[r] = p->prefix[r] + (p->aside ? 0 : p->drafts[r]);
        a->qo[r + 1] = a->qo[r] + p->drafts[r];
        a->kv[r + 1] = a->kv[r] + (a->lens[r] + p->page_size - 1) / p->page_size;
    }
    a->total_q = a->qo[p->requests];
    a->entries = a->kv[p->requests];
    a->pool_pages = a->entries + 3;
    a->pages = allocate(sizeof(int32_t) * (size_t)a->entries);
    for (int e = 0; e < a->entries; ++e) a->pages[e] = a->pool_pages - 1 - e; /* backwards: no page where its number would put it */
    a->parents = allocate(sizeof(int32_t) * (size_t)a->total_q);
    for (int r = 0; r < p->requests; ++r) {
        for (int i = 0; i < p->drafts[r]; ++i) a->parents[a->qo[r] + i] = i == 0 ? -1 : (i - 1) / 2;
    }
    a->q = random_rows((size_t)a->total_q * p->heads * width);
    a->pool = random_rows((size_t)a->pool_pages * p->page_size * width);
    a->draft = random_rows((size_t)a->total_q * width);
    a->out = allocate(sizeof(float) * (size_t)a->total_q * p->heads * p->latent);
    a->lse = allocate(sizeof(float) * (size_t)a->total_q * p->heads);
}

static void free_arrays(struct arrays *a) {
    free(a->pages);
    free(a->parents);
    free(a->q);
    free(a->pool);
    free(a->draft);
    free(a->out);
    free(a->lse);
}

static const float *key_row(const struct problem *p, const struct arrays *a, int r, int key) {
    const int width = p->latent + p->rope;
    if (p->aside && key >= p->prefix[r]) return a->draft + (size_t)(a->qo[r] + key - p->prefix[r]) * width;
    const int page = a->pages[a->kv[r] + key / p->page_size];
    return a->pool + ((size_t)page * p->page_size + key % p->page_size) * width;
}

/* Largest error of out and lse over all rows of request r. */
static double check_request(const struct problem *p, const struct arrays *a, float sm_scale, int r) {
    const int width = p->latent + p->rope, keys = p->prefix[r] + p->drafts[r];
    double *weights = allocate(sizeof(double) * (size_t)(keys + 1)), worst = 0.0;
    for (int row = 0; row < p->drafts[r] * p->heads; ++row) {
        const size_t line = (size_t)a->qo[r] * p->heads + row;
        double maximum = -INFINITY, sum = 0.0;
        for (int j = 0; j < keys; ++j) {
            const float *key = key_row(p, a, r, j);
            double dot = 0.0;
            for (int d = 0; d < width; ++d) dot += (double)a->q[line * width + d] * key[d];
            dot *= sm_scale;
            if (p->logit_cap > 0.0f) dot = p->logit_cap * tanh(dot / p->logit_cap);
            weights[j] = j < p->prefix[r] || sees(row / p->heads, j - p->prefix[r]) ? dot : -INFINITY;
            maximum = fmax(maximum, weights[j]);
        }
        for (int j = 0; j < keys; ++j) sum += weights[j] = exp(weights[j] - maximum);
        worst = fmax(worst, fabs(a->lse[line] - (maximum + log(sum))));
        for (int d = 0; d < p->latent; ++d) {
            double value = 0.0;
            for (int j = 0; j < keys; ++j) value += weights[j] / sum * key_row(p, a, r, j)[d];
            worst = fmax(worst, fabs(a->out[line * p->latent + d] - value));
        }
    }
    free(weights);
    return worst;
}

static int check(int status, const char *what) {
    if (status != NVR_OK) fprintf(stderr, "%s: %s: %s\n", what, nvr_status_string(status), nvr_last_error());
    return status == NVR_OK;
}

static nvr_index_array index_array(const int32_t *data, int length) {
    const nvr_index_array array = {data, length, 4, 0};
    return array;
}

/* The upper half of each float32 is a bfloat16; its lower half is zero here. */
static uint16_t *to_bfloat16(const float *values, size_t count) {
    uint16_t *halves = allocate(count * sizeof(uint16_t));
    for (size_t i = 0; i < count; ++i) memcpy(halves + i, (const char *)(values + i) + 2, sizeof(uint16_t));
    return halves;
}

static void from_bfloat16(const uint16_t *halves, size_t count, float *values) {
    memset(values, 0, count * sizeof(float));
    for (size_t i = 0; i < count; ++i) memcpy((char *)(values + i) + 2, halves + i, sizeof(uint16_t));
}

static nvr_tensors make_tensors(const struct problem *p, const struct arrays *a) {
    const int width = p->latent + p->rope;
    const nvr_tensors tensors = {a->q, a->pool, p->aside ? a->draft : NULL, a->out, a->lse, a->total_q, a->pool_pages, a->total_q,
                                 a->total_q, (int64_t)p->heads * width, width, (int64_t)p->page_size * width, width, width,
                                 (int64_t)p->heads * p->latent, p->latent, SM_SCALE, p->logit_cap};
    return tensors;
}

static int run_kernel(int kernel, const nvr_plan_config *config, const nvr_tensors *tensors, void *workspace, uint64_t bytes) {
    const int status = kernel == NVR_KERNEL_NAIVE   ? nvr_verify_naive(config, tensors, workspace, bytes, NULL)
                       : kernel == NVR_KERNEL_FLASH ? nvr_verify_flash(config, tensors, workspace, bytes, NULL)
                       : kernel == NVR_KERNEL_PAGED ? nvr_verify_paged(config, tensors, workspace, bytes, NULL)
                       : kernel == NVR_KERNEL_MMA   ? nvr_verify_mma(config, tensors, workspace, bytes, NULL)
                                                    : nvr_verify_wgmma(config, tensors, workspace, bytes, NULL);
    return check(status, "verify");
}

/* out and lse against double; outputs are at most 1. */
static int compare(const struct problem *p, const struct arrays *a, int kernel, int tile, double tolerance) {
    double worst = 0.0;
    for (int r = 0; r < p->requests; ++r) {
        const double error = check_request(p, a, SM_SCALE, r);
        if (!(error <= worst)) worst = error; /* keeps a NaN */
    }
    printf("H %d, D %d + %d, page size %d, kernel %d, tile %d: error %.2e\n", p->heads, p->latent, p->rope, p->page_size, kernel, tile, worst);
    return worst <= tolerance;
}

static int compare_kernels(const struct problem *p, struct arrays *a, const nvr_plan_config *config, void *workspace, uint64_t bytes) {
    const nvr_tensors tensors = make_tensors(p, a);
    int good = 1;
    for (int kernel = NVR_KERNEL_NAIVE; kernel <= NVR_KERNEL_PAGED; ++kernel) {
        memset(a->out, 0xff, sizeof(float) * (size_t)a->total_q * p->heads * p->latent); /* NaN: a value not written fails */
        memset(a->lse, 0xff, sizeof(float) * (size_t)a->total_q * p->heads);
        if (!run_kernel(kernel, config, &tensors, workspace, bytes)) return 0;
        good &= compare(p, a, kernel, p->tile_config, 2e-5);
    }
    return good;
}

/* mma or wgmma with each tile that the device has room for, in bfloat16. compared: there is a right answer. */
static int run_tiles(const struct problem *p, struct arrays *a, nvr_plan_config config, const nvr_indices *indices, int kernel, int compared) {
    const size_t width = (size_t)(p->latent + p->rope), values = (size_t)a->total_q * p->heads * p->latent;
    uint16_t *q = to_bfloat16(a->q, (size_t)a->total_q * p->heads * width);
    uint16_t *pool = to_bfloat16(a->pool, (size_t)a->pool_pages * p->page_size * width);
    uint16_t *draft = to_bfloat16(a->draft, (size_t)a->total_q * width);
    uint16_t *out = allocate(values * sizeof(uint16_t));
    nvr_tensors tensors = make_tensors(p, a);
    int good = 1;
    tensors.q = q;
    tensors.kv_cache = pool;
    tensors.draft_kv = p->aside ? draft : NULL;
    tensors.out = out;
    config.dtype = NVR_BFLOAT16;
    config.kernel = kernel;
    for (int tile = 1;; ++tile) {
        uint64_t bytes = 0;
        config.tile_config = tile;
        const int status = nvr_can_run(&config, kernel);
        if (status == NVR_ERROR_OPTION) break; /* there are no more */
        if (status == NVR_ERROR_SHARED_MEMORY || status == NVR_ERROR_UNSUPPORTED_DIMS) continue;
        good &= check(status, "can_run") && check(nvr_workspace_bytes(&config, &bytes), "workspace_bytes");
        void *workspace = allocate(bytes);
        memset(workspace, 0xff, bytes);
        memset(out, 0xff, values * sizeof(uint16_t));
        memset(a->lse, 0xff, sizeof(float) * (size_t)a->total_q * p->heads);
        good = good && check(nvr_plan_update(&config, indices, workspace, bytes, NULL), "update");
        good = good && run_kernel(kernel, &config, &tensors, workspace, bytes);
        from_bfloat16(out, values, a->out);
        if (compared) good &= compare(p, a, kernel, tile, 1e-2); /* weights and outputs have 8 bits */
        free(workspace);
    }
    free(q);
    free(pool);
    free(draft);
    free(out);
    return good;
}

/* Lengths and parents that no caller should send. There is no right answer; the sanitizers watch that no access is out of bounds. */
static int survive_bad_data(const struct problem *p, struct arrays *a, const nvr_plan_config *config, const nvr_indices *indices,
                            void *workspace, uint64_t bytes) {
    const nvr_tensors tensors = make_tensors(p, a);
    int good = 1;
    a->qo[1] = a->total_q + 100;
    a->qo[2] = -7;
    a->kv[1] = a->entries + 100;
    a->lens[0] = INT32_MAX;
    a->parents[0] = 1; /* a cycle */
    a->parents[a->total_q - 1] = INT32_MAX;
    good &= check(nvr_plan_update(config, indices, workspace, bytes, NULL), "update");
    for (int kernel = NVR_KERNEL_NAIVE; kernel <= NVR_KERNEL_PAGED; ++kernel) {
        good &= run_kernel(kernel, config, &tensors, workspace, bytes);
    }
    for (int kernel = NVR_KERNEL_MMA; kernel <= NVR_KERNEL_WGMMA; ++kernel) good &= run_tiles(p, a, *config, indices, kernel, 0);
    return good;
}

static int run_problem(const struct problem *p) {
    struct arrays a;
    build_arrays(p, &a);
    const nvr_plan_config config = {0, NVR_FLOAT32, p->heads, p->latent, p->rope, p->page_size, !p->aside, p->deterministic,
                                    p->tile_config, NVR_KERNEL_PAGED, p->requests, a.total_q, a.entries};
    const nvr_indices indices = {p->requests, index_array(a.qo, p->requests + 1), index_array(a.kv, p->requests + 1),
                                 index_array(a.pages, a.entries), index_array(a.lens, p->requests),
                                 {NVR_TREE_PARENTS, 0, a.parents, a.total_q, 0}};
    uint64_t bytes = 0;
    int good = check(nvr_workspace_bytes(&config, &bytes), "workspace_bytes");
    void *workspace = allocate(bytes);
    memset(workspace, 0xff, bytes); /* stale contents must not matter */
    good = good && check(nvr_plan_update(&config, &indices, workspace, bytes, NULL), "update");
    good = good && compare_kernels(p, &a, &config, workspace, bytes);
    for (int kernel = NVR_KERNEL_MMA; kernel <= NVR_KERNEL_WGMMA; ++kernel) good = good && run_tiles(p, &a, config, &indices, kernel, 1);
    good = good && survive_bad_data(p, &a, &config, &indices, workspace, bytes);
    free(workspace);
    free_arrays(&a);
    return good;
}

int main(void) {
    int good = nvr_abi_version() == NVR_ABI_VERSION;
    for (size_t i = 0; i < sizeof PROBLEMS / sizeof PROBLEMS[0]; ++i) good &= run_problem(&PROBLEMS[i]);
    return good ? 0 : 1;
}
