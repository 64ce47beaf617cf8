// plan_update: two kernels turn the caller's index arrays into the workspace that every verify kernel reads.
//
//   schedule  1 block    lengths -> requests[batch], counts, starts[ctas + 1]      scans over the requests, 256 at a time
//                                   merges[counts.few + counts.many]
//   expand    grid       pages   -> slots[entries * page_size]                     paging is resolved here once, not in every kernel
//                        tree    -> visibility[total_q, words], row_request[max_total_q]
//
// Lengths are known on the device only, so nothing here trusts them: each is clamped so that no index leaves the workspace.
#include "cuts.cuh"
#include "merges.cuh"

namespace nvr {

constexpr int EXPAND_THREADS = 256;
constexpr int EXPAND_BLOCKS_PER_SM = 8;  // 2048 threads fill an SM; the rest of the grid would only queue

__device__ inline int64_t clamp64(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

__device__ inline int64_t read_index(const nvr_index_array& array, int64_t i) {
    if (i >= array.length) return 0;
    return array.width == 4 ? static_cast<const int32_t*>(array.data)[i] : static_cast<const int64_t*>(array.data)[i];
}

// kv_indices entries that are listed and that the plan has room for. A request that claims more than kv_indptr[batch] is cut there,
// because expand fills no slots beyond.
__device__ inline int64_t entry_capacity(const UpdateParams& params) {
    const int64_t listed = max64(read_index(params.indices.kv_indptr, params.indices.batch), 0);
    return min64(listed, min64(params.plan.config.max_kv_entries, params.indices.kv_indices.length));
}

__device__ Request read_request(const UpdateParams& params, int64_t r) {
    const nvr_plan_config& config = params.plan.config;
    const nvr_indices& indices = params.indices;
    Request request = {};
    request.q_begin = clamp64(read_index(indices.qo_indptr, r), 0, config.max_total_q);
    const int64_t room = min64(NVR_MAX_DRAFT, config.max_total_q - request.q_begin);
    request.q_len = clamp64(read_index(indices.qo_indptr, r + 1) - request.q_begin, 0, room);

    const int64_t entry = clamp64(read_index(indices.kv_indptr, r), 0, entry_capacity(params));
    const int64_t entries = clamp64(read_index(indices.kv_indptr, r + 1) - entry, 0, entry_capacity(params) - entry);
    const int64_t listed = entries * config.page_size;
    const int64_t tokens = indices.kv_lens.data == nullptr ? listed : clamp64(read_index(indices.kv_lens, r), 0, listed);
    request.slot_begin = entry * config.page_size;
    request.prefix = config.draft_in_cache ? max64(tokens - request.q_len, 0) : tokens;
    request.kv_len = config.draft_in_cache ? tokens : tokens + request.q_len;
    return request;
}

// Writes requests[batch]; returns what they sum up to, the same in every thread.
__device__ Line write_requests(const UpdateParams& params, Line* of_warps) {
    const Plan& plan = params.plan;
    Line line = {};
    for (int64_t base = 0; base < params.indices.batch; base += SCHEDULE_THREADS) {
        const int64_t r = base + threadIdx.x;
        Request request = {};
        if (r < params.indices.batch) request = read_request(params, r);
        const int32_t tiles = tiles_of(plan, request);
        const int32_t blocks = blocks_of(plan, request);
        int64_t slots = tiles;
        if (plan.config.deterministic) {
            const Split split = split_by_length(plan.tile_keys, tiles, blocks);
            slots = split.pieces > 1 ? static_cast<int64_t>(tiles) * split.pieces : 0;
        }
        const Line before = block_scan(
            {request.q_len * (request.prefix + request.q_len), static_cast<int64_t>(tiles) * blocks, slots, tiles > 0 ? blocks : 0}, &line, of_warps);
        request.mask_begin = before.mask_bytes;
        request.unit_begin = before.units;
        request.piece_begin = before.slots;
        // Without room (only when index arrays overlap, which valid ones do not) the tile stays whole.
        if (plan.config.deterministic && (slots == 0 || request.piece_begin + slots > plan.partial_slots)) request.piece_begin = -1;
        if (r < params.indices.batch) plan.workspace.requests[r] = request;
        __syncthreads();  // hazard: all that follows reads requests that other threads wrote; the next scan overwrites of_warps
    }
    return line;
}

// grid 1, block SCHEDULE_THREADS, shared memory: SCHEDULE_WARPS of Line
__global__ void __launch_bounds__(SCHEDULE_THREADS) schedule_kernel(UpdateParams params) {
    const Plan& plan = params.plan;
    const int64_t batch = params.indices.batch;
    int64_t* scratch = reinterpret_cast<int64_t*>(shared_memory());
    const Line line = write_requests(params, reinterpret_cast<Line*>(scratch));
    const bool may_cut = cut_line(plan, batch, line, scratch);
    const int64_t merges = plan.config.deterministic ? merge_pieces(plan, batch, scratch) : may_cut ? merge_shares(plan, scratch) : 0;
    if (threadIdx.x == 0) {
        const int64_t entries = batch == 0 ? 0 : entry_capacity(params);
        *plan.workspace.counts = {batch, entries, static_cast<int32_t>(merges & 0xffffffff), static_cast<int32_t>(merges >> 32)};
    }
}

// Word `lane` of the chain from node i to its root. At most n steps, so that a cycle ends; a parent outside the request ends it too.
__device__ uint32_t word_of_ancestors(const nvr_tree& tree, const Request& request, int64_t i, int lane) {
    uint32_t word = 0;
    int64_t node = i;
    for (int64_t step = 0; step < request.q_len && node >= 0 && node < request.q_len; ++step) {
        if (node / WARP == lane) word |= 1u << (node % WARP);
        if (request.q_begin + node >= tree.length) break;
        node = static_cast<const int32_t*>(tree.data)[request.q_begin + node];
    }
    return word;
}

// Word `lane` of a row of n mask bytes that begins at `offset`: the warp reads 32 bytes at a time, ballot makes them a word.
__device__ uint32_t word_of_bytes(const nvr_tree& tree, int64_t offset, int64_t n, int lane) {
    uint32_t word = 0;
    for (int64_t first = 0; first < n; first += WARP) {
        const int64_t byte = offset + first + lane;
        const bool visible = first + lane < n && byte < tree.length && static_cast<const uint8_t*>(tree.data)[byte] != 0;
        const uint32_t ballot = __ballot_sync(ALL_LANES, visible);
        if (first / WARP == lane) word = ballot;
    }
    return word;
}

// Word `lane` of the visibility of row i of request r. n <= NVR_MAX_DRAFT, so a warp holds a whole row.
__device__ uint32_t visibility_word(const nvr_tree& tree, const Request& request, int64_t r, int64_t i, int lane) {
    const int64_t n = request.q_len;
    switch (tree.kind) {
        case NVR_TREE_PARENTS: return word_of_ancestors(tree, request, i, lane);
        case NVR_TREE_BITS: {
            const int64_t index = (request.q_begin + i) * tree.stride + lane;
            return lane < tree.stride && index < tree.length ? static_cast<const uint32_t*>(tree.data)[index] : 0;
        }
        case NVR_TREE_DENSE: {
            const int64_t used = i < tree.stride ? min64(n, tree.stride) : 0;
            return word_of_bytes(tree, (r * tree.stride + i) * tree.stride, used, lane);
        }
        case NVR_TREE_FULL_MASK: return word_of_bytes(tree, request.mask_begin + i * (request.prefix + n) + request.prefix, n, lane);
        default: {  // NVR_TREE_CAUSAL: bits 0 .. i
            const int64_t ones = i + 1 - lane * WARP;
            return ones >= WARP ? ~0u : ones > 0 ? (1u << ones) - 1 : 0;
        }
    }
}

__device__ void expand_row(const UpdateParams& params, int64_t row, int lane) {
    const Workspace& workspace = params.plan.workspace;
    const int64_t batch = params.indices.batch;
    const int32_t r = batch == 0 ? 0 : find_request<&Request::q_begin>(workspace.requests, batch, row);
    Request request = {};
    if (batch > 0) request = workspace.requests[r];
    const int64_t i = row - request.q_begin;
    const bool owned = i >= 0 && i < request.q_len;
    if (lane == 0) workspace.row_request[row] = owned ? r : -1;
    if (!owned) return;
    // Bits at and after n may be set: no kernel looks at them, because key L + n is beyond kv_len.
    const uint32_t word = visibility_word(params.indices.tree, request, r, i, lane);
    if (lane < params.plan.words) workspace.visibility[row * params.plan.words + lane] = word;
}

// grid any, block EXPAND_THREADS: a warp a row, then a thread a slot
__global__ void __launch_bounds__(EXPAND_THREADS) expand_kernel(UpdateParams params) {
    const nvr_plan_config& config = params.plan.config;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * EXPAND_THREADS;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * EXPAND_THREADS + threadIdx.x;
    for (int64_t row = thread / WARP; row < config.max_total_q; row += threads / WARP) expand_row(params, row, threadIdx.x % WARP);

    const int64_t slots = params.plan.workspace.counts->entries * config.page_size;
    for (int64_t slot = thread; slot < slots; slot += threads) {
        const int64_t entry = slot / config.page_size, offset = slot % config.page_size;
        const int64_t page = read_index(params.indices.kv_indices, entry);
        params.plan.workspace.slots[slot] = static_cast<uint32_t>(page * config.page_size + offset);
    }
}

int launch_update(const Device& device, const UpdateParams& params, void* stream) {
    const int status = launch<schedule_kernel>(device, "schedule", dim3(1), SCHEDULE_THREADS, SCHEDULE_WARPS * sizeof(Line), stream,
                                               params);
    if (status != NVR_OK) return status;
    const nvr_plan_config& config = params.plan.config;
    const int64_t wanted = max64(config.max_total_q * WARP, config.max_kv_entries * config.page_size);
    const int64_t blocks = min64(ceil_div(wanted, EXPAND_THREADS), device.sms * EXPAND_BLOCKS_PER_SM);
    return launch<expand_kernel>(device, "expand", dim3(static_cast<unsigned>(max64(blocks, 1))), EXPAND_THREADS, 0, stream, params);
}

}  // namespace nvr
