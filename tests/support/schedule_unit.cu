// Runs schedule of cuda_ref for a plan of any number of CTAs and prints its tables: schedule_unit < input > output.
//
//     input     int64: batch, ctas, row_heads, tile_rows, tile_keys, min_keys, merge_keys, deterministic, partial_slots, query rows, keys
//               int32: qo_indptr [batch + 1], kv_indptr [batch + 1]; pages of one token, draft rows in the cache
//     output    Counts, Request [batch], Cursor [ctas + 1], Merge [partial_slots / 2], of which nothing but merges is written
//
// test_schedule.py builds it with g++ and with nvcc and compares the tables with those of numba_verify.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schedule.cu"

namespace nvr {

struct Input {
    int64_t batch, ctas, row_heads, tile_rows, tile_keys, min_keys, merge_keys, deterministic, partial_slots, rows, keys;
};

// Memory that host and device see, full of 0xff.
#ifdef __CUDACC__
void* allocate(size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, bytes) != cudaSuccess) exit(2);
    return memset(memory, 0xff, bytes);
}
int wait() { return cudaDeviceSynchronize() == cudaSuccess ? NVR_OK : NVR_ERROR_LAUNCH; }
#else
void* allocate(size_t bytes) {
    void* memory = malloc(bytes);
    return memory == nullptr ? nullptr : memset(memory, 0xff, bytes);
}
int wait() { return NVR_OK; }
#endif

// A table of the output.
template <class T>
struct Table {
    T* data;
    size_t count;
    explicit Table(int64_t length) : data(static_cast<T*>(allocate(length * sizeof(T) + 1))), count(static_cast<size_t>(length)) {}
    bool read() { return fread(data, sizeof(T), count, stdin) == count; }
    bool write() { return fwrite(data, sizeof(T), count, stdout) == count; }
};

int run() {
    Input input;
    if (fread(&input, sizeof input, 1, stdin) != 1) return 2;
    static Table<int32_t> qo(input.batch + 1), kv(input.batch + 1);  // static: not a leak to AddressSanitizer
    static Table<Counts> counts(1);
    static Table<Request> requests(input.batch);
    static Table<Cursor> starts(input.ctas + 1);
    static Table<Merge> merges(input.partial_slots / 2);
    if (!qo.read() || !kv.read()) return 2;
    UpdateParams params = {};
    Plan& plan = params.plan;
    plan.config.page_size = plan.config.draft_in_cache = 1;
    plan.config.deterministic = static_cast<int32_t>(input.deterministic);
    plan.config.max_total_q = input.rows;
    plan.config.max_kv_entries = input.keys;
    plan.tile_rows = static_cast<int32_t>(input.tile_rows);
    plan.tile_keys = static_cast<int32_t>(input.tile_keys);
    plan.row_heads = static_cast<int32_t>(input.row_heads);
    plan.min_keys = static_cast<int32_t>(input.min_keys);
    plan.merge_keys = static_cast<int32_t>(input.merge_keys);
    plan.ctas = static_cast<int32_t>(input.ctas);
    plan.partial_slots = input.partial_slots;
    plan.max_merges = static_cast<int32_t>(input.partial_slots / 2);
    plan.workspace.counts = counts.data;
    plan.workspace.requests = requests.data;
    plan.workspace.starts = starts.data;
    plan.workspace.merges = merges.data;
    params.indices.batch = input.batch;
    params.indices.qo_indptr = {qo.data, input.batch + 1, 4};
    params.indices.kv_indptr = {kv.data, input.batch + 1, 4};
    params.indices.kv_indices = {nullptr, input.keys, 4};  // schedule only asks how many
    params.indices.kv_lens = {nullptr, 0, 4};
    Device device;
    int status = get_device(0, &device);
    if (status == NVR_OK) {
        status = launch<schedule_kernel>(device, "schedule", dim3(1), SCHEDULE_THREADS, SCHEDULE_WARPS * sizeof(Line), nullptr, params);
    }
    if (status == NVR_OK) status = wait();
    if (status != NVR_OK) {
        fputs(last_error_text(), stderr);
        return status;
    }
    return counts.write() && requests.write() && starts.write() && merges.write() ? 0 : 2;
}

}  // namespace nvr

int main() { return nvr::run(); }
