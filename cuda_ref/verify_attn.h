/* Tree-verify MLA attention: the C interface of the CUDA C reference.
 *
 * One call attends n_r draft tokens (H heads each) of every request r to the request's L_r cached tokens and to the draft tokens
 * that the tree lets each of them see. One KV row per token, shared by all heads: latent_dim values (key and value), rope_dim
 * values (key only).
 *
 *     score[i, h, j] = sm_scale * dot(q[i, h], kv[j]);  with logit_cap c > 0: c * tanh(score / c)
 *     out[i, h]      = sum_j softmax_j(score[i, h, j]) * kv[j, :latent_dim]
 *     lse[i, h]      = ln sum_j exp(score[i, h, j])         a row that sees nothing: out 0, lse -infinity
 *
 * Life of a plan:  nvr_workspace_bytes -> the caller allocates -> nvr_plan_update (once per verify step) -> nvr_verify_* (once per
 * layer). update and verify only enqueue kernels on the stream: no allocation, no copy to the host, no synchronisation; both can be
 * captured in a CUDA graph. Every array is device memory (host memory in the g++ build). Nothing here throws, prints or exits.
 */
#ifndef NVR_VERIFY_ATTN_H
#define NVR_VERIFY_ATTN_H

#include <stdint.h>

#if defined(__GNUC__)
#define NVR_API __attribute__((visibility("default")))
#else
#define NVR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Goes up by one whenever a struct, an enum value or a signature below changes. */
#define NVR_ABI_VERSION 3

/* Alignment in bytes of workspace, q, kv_cache, draft_kv and out, and the unit of their strides: one 16-byte vector load. */
#define NVR_ALIGNMENT 16

/* Most draft tokens of one request. A row's visibility is then at most 32 words, one for each lane of a warp. */
#define NVR_MAX_DRAFT 1024

/* naive puts 4 heads in a block and a grid has at most 65535 blocks in y. */
#define NVR_MAX_HEADS 262140

/* Every function that can fail returns one of these as int. nvr_last_error() has the numbers. */
enum nvr_status {
    NVR_OK = 0,
    NVR_ERROR_NULL_POINTER = 1,      /* a required pointer is NULL */
    NVR_ERROR_ALIGNMENT = 2,         /* a pointer is not aligned as its type or vector loads need */
    NVR_ERROR_STRIDE = 3,            /* a stride is no multiple of 16 bytes, or negative */
    NVR_ERROR_SIZE = 4,              /* a count is negative, zero where it must not be, too short or too large */
    NVR_ERROR_DTYPE = 5,             /* unknown nvr_dtype, or an index width other than 4 and 8 */
    NVR_ERROR_OPTION = 6,            /* unknown tree kind, kernel or tile configuration, or arguments that contradict */
    NVR_ERROR_CAPACITY = 7,          /* an array is longer than the plan's capacity */
    NVR_ERROR_WORKSPACE = 8,         /* the workspace is smaller than nvr_workspace_bytes says */
    NVR_ERROR_UNSUPPORTED_DIMS = 9,  /* latent_dim or rope_dim has no kernel */
    NVR_ERROR_SHARED_MEMORY = 10,    /* the tile needs more shared memory than the device gives a block */
    NVR_ERROR_NO_DEVICE = 11,        /* no driver, or no such device */
    NVR_ERROR_NO_KERNEL_IMAGE = 12,  /* the library was not built for this device's architecture */
    NVR_ERROR_LAUNCH = 13,           /* the CUDA runtime refused a launch */
    NVR_ERROR_BARRIER = 14           /* host build only: threads did not meet at a barrier, or one did with shared memory what no GPU allows */
};

enum nvr_dtype { NVR_BFLOAT16 = 0, NVR_FLOAT16 = 1, NVR_FLOAT32 = 2 };

/* mma and wgmma: tensor cores; bfloat16 and float16 rows of 512/64, 512/0, 256/64 and 128/64 (latent_dim/rope_dim). wgmma: sm_90a GPUs only. */
enum nvr_kernel { NVR_KERNEL_NAIVE = 0, NVR_KERNEL_FLASH = 1, NVR_KERNEL_PAGED = 2, NVR_KERNEL_MMA = 3, NVR_KERNEL_WGMMA = 4 };

/* Heads x keys of one tile of flash and paged. The default takes 16 heads when there are more than 8. */
enum nvr_tile_config { NVR_TILE_DEFAULT = 0, NVR_TILE_H8_K16 = 1, NVR_TILE_H16_K16 = 2, NVR_TILE_H8_K32 = 3 };

/* Query rows (draft token x head) of one tile of mma. M64 needs an sm_90a GPU; MEDIUM and SMALL take less shared memory, see
 * nvr_shared_bytes. The default is the fewest rows that hold a request of average size (deterministic: of any size), then the largest tile that
 * the device has room for. */
enum nvr_mma_tile {
    NVR_MMA_DEFAULT = 0,
    NVR_MMA_M64 = 1,
    NVR_MMA_M32 = 2,
    NVR_MMA_M32_MEDIUM = 3,
    NVR_MMA_M32_SMALL = 4,
    NVR_MMA_M16 = 5,
    NVR_MMA_M16_MEDIUM = 6,
    NVR_MMA_M16_SMALL = 7
};

enum nvr_tree_kind {
    NVR_TREE_CAUSAL = 0,   /* draft token i sees 0 .. i; no array */
    NVR_TREE_PARENTS = 1,  /* int32 [total_q]: index of the parent in its own request, -1 = root */
    NVR_TREE_BITS = 2,     /* uint32 [total_q, stride]: bit j % 32 of word j / 32: the row sees draft token j */
    NVR_TREE_DENSE = 3,    /* bytes [batch, stride, stride], the top left n_r x n_r of each */
    NVR_TREE_FULL_MASK = 4 /* bytes, per request n_r rows of L_r + n_r, requests one after the other (SGLang FULL_MASK) */
};

/* What stays the same over all updates of a plan. */
typedef struct nvr_plan_config {
    int32_t device; /* CUDA ordinal; the host build ignores it */
    int32_t dtype;  /* nvr_dtype of q, kv_cache, draft_kv, out */
    int32_t num_heads;
    int32_t latent_dim; /* multiple of 32, 32 .. 512 */
    int32_t rope_dim;   /* multiple of 32, 0 .. 128 */
    int32_t page_size;
    int32_t draft_in_cache; /* 1: the last n_r tokens of a request's list are its draft tokens; 0: they come in draft_kv */
    int32_t deterministic;  /* 1: the bits of a request depend on nothing but that request (paged, mma, wgmma; naive and flash always) */
    int32_t tile_config;    /* nvr_mma_tile of a plan for mma; of one for wgmma a number of WgmmaTiles in wgmma_config.cuh, from 1 on, or 0 for the
                               first that the device has room for; otherwise nvr_tile_config */
    int32_t kernel;         /* nvr_kernel that the plan is for; naive, flash and paged run on each other's plans, mma and wgmma on their own only */
    int64_t max_batch;
    int64_t max_total_q;
    int64_t max_kv_entries; /* entries of kv_indices, not tokens */
} nvr_plan_config;

/* An int32 or int64 array; data may be NULL when length is 0. */
typedef struct nvr_index_array {
    const void *data;
    int64_t length; /* elements */
    int32_t width;  /* bytes of one element: 4 or 8 */
    int32_t reserved;
} nvr_index_array;

typedef struct nvr_tree {
    int32_t kind; /* nvr_tree_kind */
    int32_t reserved;
    const void *data;
    int64_t length; /* elements of data; elements at and after it count as "not visible" and are never read */
    int64_t stride; /* bits: words from row to row; dense: N; otherwise ignored */
} nvr_tree;

/* What one update brings. */
typedef struct nvr_indices {
    int64_t batch;
    nvr_index_array qo_indptr;  /* [batch + 1] */
    nvr_index_array kv_indptr;  /* [batch + 1] */
    nvr_index_array kv_indices; /* [>= kv_indptr[batch]] page numbers */
    nvr_index_array kv_lens;    /* [batch] tokens of each list; may be absent (data NULL, length 0) when page_size is 1 */
    nvr_tree tree;
} nvr_indices;

/* What one run brings. Strides count elements; the last dimension of every array is contiguous; a stride of a dimension of size 1
 * is not looked at. */
typedef struct nvr_tensors {
    const void *q;        /* [q_rows, num_heads, latent_dim + rope_dim] */
    const void *kv_cache; /* [kv_pages, page_size, latent_dim + rope_dim] */
    const void *draft_kv; /* [draft_rows, latent_dim + rope_dim]; NULL exactly when draft_in_cache */
    void *out;            /* [out_rows, num_heads, latent_dim] */
    float *lse;           /* [out_rows, num_heads] contiguous, natural log; may be NULL */
    int64_t q_rows;       /* rows at and after the plan's total_q are neither read nor written */
    int64_t kv_pages;
    int64_t draft_rows;
    int64_t out_rows;
    int64_t q_row_stride, q_head_stride;
    int64_t kv_page_stride, kv_token_stride;
    int64_t draft_row_stride;
    int64_t out_row_stride, out_head_stride;
    float sm_scale;
    float logit_cap; /* 0 = off */
} nvr_tensors;

NVR_API int nvr_abi_version(void);

/* Text of the calling thread's last failure, "" when there was none. Valid until its next call. */
NVR_API const char *nvr_last_error(void);

/* The enum's name, for example "NVR_ERROR_SIZE"; "unknown status" for anything else. */
NVR_API const char *nvr_status_string(int status);

/* NVR_OK when the kernel (nvr_kernel) can run this plan on its device; otherwise the status that verify would return. */
NVR_API int nvr_can_run(const nvr_plan_config *config, int kernel);

/* Dynamic shared memory of one block, in bytes. Asks no device, unless it has to choose a tile of mma or wgmma. */
NVR_API int nvr_shared_bytes(const nvr_plan_config *config, int kernel, uint64_t *bytes);

/* Bytes of workspace that a plan needs on its device. Keep it as long as the plan; update and verify share it. */
NVR_API int nvr_workspace_bytes(const nvr_plan_config *config, uint64_t *bytes);

/* Enqueue two kernels that turn lengths, pages and tree into the work list. stream is a cudaStream_t (ignored by the host build). */
NVR_API int nvr_plan_update(const nvr_plan_config *config, const nvr_indices *indices, void *workspace, uint64_t workspace_bytes,
                            void *stream);

/* Enqueue the attention itself. paged, mma and wgmma write partial results to the workspace, so one workspace serves one stream at a time. */
NVR_API int nvr_verify_naive(const nvr_plan_config *config, const nvr_tensors *tensors, const void *workspace,
                             uint64_t workspace_bytes, void *stream);
NVR_API int nvr_verify_flash(const nvr_plan_config *config, const nvr_tensors *tensors, const void *workspace,
                             uint64_t workspace_bytes, void *stream);
NVR_API int nvr_verify_paged(const nvr_plan_config *config, const nvr_tensors *tensors, void *workspace, uint64_t workspace_bytes,
                             void *stream);
NVR_API int nvr_verify_mma(const nvr_plan_config *config, const nvr_tensors *tensors, void *workspace, uint64_t workspace_bytes,
                           void *stream);
NVR_API int nvr_verify_wgmma(const nvr_plan_config *config, const nvr_tensors *tensors, void *workspace, uint64_t workspace_bytes,
                             void *stream);

#ifdef __cplusplus
}
#endif

#endif
