// wgmma: the last of the 128 threads works for all of them, on operands and accumulators in the threads' own frames.
#include "../wgmma_ptx.cuh"
#include "block.h"

namespace nvr {
namespace host {

namespace {

constexpr int ROWS = 64, DEPTH = 16;  // of a product
constexpr uint32_t CHUNK = 16, ROW = 128, PATTERN = 1024;  // bytes: a core matrix's row, the swizzle's row, and where it repeats
constexpr uint32_t IN_FLIGHT = 0x7fc0f11a;  // a NaN, told from others by its bits
constexpr const char* INSTRUCTION = "wgmma";

struct Operands {
    float* acc;
    const uint32_t* a;
    WgmmaForm form;
};

struct Wait {
    int newest, count;
    float* acc;
};

// A matrix descriptor, taken apart; bytes.
struct Descriptor {
    uint32_t start, leading, stride;
    bool swizzled;
};

Warpgroup& own_warpgroup() { return block->warpgroups[running->thread.x / WARPGROUP_THREADS]; }
int first_warp() { return static_cast<int>(running->thread.x / WARPGROUP_THREADS) * WARPGROUP_WARPS; }

// What a thread of the running warpgroup brought.
template <class Brought>
Brought& brought(int thread) {
    return *static_cast<Brought*>(block->warps[first_warp() + thread / WARP_LANES].operands[thread % WARP_LANES]);
}

// The running thread comes to an instruction of its warpgroup. True in the last of the 128, as meet() in the last of a warp.
bool meet_warpgroup(const char* instruction, void* operands) {
    if ((first_warp() + WARPGROUP_WARPS) * WARP_LANES > block->threads) give_up("%s: the block's last warps are no warpgroup", instruction);
    if (!meet(instruction, operands)) return false;
    Warpgroup& group = own_warpgroup();
    if (group.arrived == 0) group.instruction = instruction;
    if (group.instruction != instruction) {
        give_up("warps of a warpgroup meet at two different instructions, %s and %s", group.instruction, instruction);
    }
    if (++group.arrived == WARPGROUP_WARPS) {
        group.arrived = 0;
        return true;
    }
    suspend();
    return false;
}

void release_warpgroup() {
    for (int w = 0; w < WARPGROUP_WARPS; ++w) block->warps[first_warp() + w].ready = EVERY_LANE;
}

Descriptor decode(uint64_t bits, const char* what) {
    constexpr uint64_t field_bits = ptx::DESCRIPTOR_FIELD, known = 3ull << 62 | field_bits << 32 | field_bits << 16 | field_bits;
    if ((bits & ~known) != 0 || bits >> 62 > 1) {
        give_up("wgmma, %s: 0x%llx is no descriptor of wgmma_descriptor, or more was added to it than its address field holds", what,
                static_cast<unsigned long long>(bits));
    }
    auto field = [bits](int first) { return static_cast<uint32_t>(bits >> first & field_bits) << 4; };
    return {field(0), field(16), field(32), bits >> 62 == 1};
}

// The rules of the 128-byte swizzle, which XORs bits of the address itself: rows are where the pattern has them.
void check_pattern(const Descriptor& operand, int extent, bool transposed, const char* what) {
    const uint32_t width = transposed ? 2 * static_cast<uint32_t>(extent < 64 ? extent : 64) : 2 * CHUNK;
    const uint32_t row = operand.start % PATTERN / ROW, byte = operand.start % ROW;
    if (row != 0) give_up("wgmma, %s: it begins in row %u of the swizzle's pattern, not in row 0", what, row);
    if (byte + width > ROW) give_up("wgmma, %s: rows of %u bytes from byte %u on leave the 128 bytes of the swizzle", what, width, byte);
    const bool has_groups = transposed || extent > 8, has_blocks = transposed && extent > 64;
    if (has_groups && operand.stride % PATTERN != 0) give_up("wgmma, %s: stride is %u bytes, no multiple of 1024", what, operand.stride);
    if (has_blocks && operand.leading % PATTERN != 0) give_up("wgmma, %s: leading is %u bytes, no multiple of 1024", what, operand.leading);
}

// visit(row, k, chunk): each 16 bytes of an operand, its first element and where it lies; rows are of M or N. Transposed: MN-major, the eight
// elements are rows `row` to `row + 7`; else they are k to k + 7.
template <class Visit>
void for_each_chunk(uint64_t bits, int extent, bool transposed, const char* what, Visit visit) {
    const Descriptor operand = decode(bits, what);
    if (operand.swizzled) check_pattern(operand, extent, transposed, what);
    for (int row = 0; row < extent; row += transposed ? 8 : 1) {
        for (int k = 0; k < DEPTH; k += transposed ? 1 : 8) {
            const uint32_t of_row = static_cast<uint32_t>(row), of_k = static_cast<uint32_t>(k);
            uint32_t address = operand.start;
            if (transposed && operand.swizzled) {
                address += of_k % 8 * ROW + of_k / 8 * operand.stride + of_row % 64 * 2 + of_row / 64 * operand.leading;
            } else if (transposed) {
                address += of_k % 8 * CHUNK + of_k / 8 * operand.leading + of_row / 8 * operand.stride;
            } else if (operand.swizzled) {
                address += of_row % 8 * ROW + of_row / 8 * operand.stride + of_k * 2;
            } else {
                address += of_row % 8 * CHUNK + of_row / 8 * operand.stride + of_k / 8 * operand.leading;
            }
            if (operand.swizzled) address ^= address >> 3 & 0x70;  // bits 4 to 6 by bits 7 to 9
            visit(row, k, shared_at(address, CHUNK, INSTRUCTION));
        }
    }
}

// Element (row, k) of an operand as a matrix [M or N][DEPTH].
size_t at(int row, int k) { return static_cast<size_t>(row * DEPTH + k); }

float to_float(uint16_t bits, bool bf16) { return bf16 ? bf16_to_float(bits) : fp16_to_float(bits); }

// An operand in shared memory as a matrix.
std::vector<float> read_operand(uint64_t bits, int extent, bool transposed, bool bf16, const char* what) {
    std::vector<float> matrix(static_cast<size_t>(extent) * DEPTH);
    for_each_chunk(bits, extent, transposed, what, [&](int row, int k, const unsigned char* chunk) {
        uint16_t elements[CHUNK / 2];
        memcpy(elements, chunk, CHUNK);
        for (int i = 0; i < 8; ++i) matrix[at(transposed ? row + i : row, transposed ? k : k + i)] = to_float(elements[i], bf16);
    });
    return matrix;
}

// Whether it lies in shared memory at all, and, to AddressSanitizer, whether copies to it have landed.
void touch_operand(uint64_t bits, int extent, bool transposed, const char* what) {
    for_each_chunk(bits, extent, transposed, what, [](int, int, const volatile unsigned char* chunk) { (void)*chunk; });
}

// A, from the registers of all threads: the table at wgmma_rs in wgmma_ptx.cuh.
std::vector<float> gather_a(bool bf16) {
    std::vector<float> matrix(ROWS * DEPTH);
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        const int g = thread % WARP_LANES / 4, t = thread % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = thread / WARP_LANES * 16 + g + i / 2 % 2 * 8, k = 2 * t + i / 4 * 8 + i % 2;
            matrix[at(row, k)] = to_float(static_cast<uint16_t>(brought<Operands>(thread).a[i / 2] >> 16 * (i % 2)), bf16);
        }
    }
    return matrix;
}

// Element i of a thread's accumulators is element (row, column) of D: the table at wgmma_ss in wgmma_ptx.cuh.
float& element_of(std::vector<float>* d, int count, int thread, int i) {
    const int g = thread % WARP_LANES / 4, t = thread % 4;
    return (*d)[static_cast<size_t>((thread / WARP_LANES * 16 + g + i / 2 % 2 * 8) * 2 * count + i / 4 * 8 + 2 * t + i % 2)];
}

void check_untouched(const Accumulators& acc) {
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        for (int i = 0; i < acc.count; ++i) {
            if (float_bits(acc.arrays[thread][i]) != IN_FLIGHT) {
                give_up("wgmma: thread %d of the warpgroup wrote accumulators of a product on its way, before a wgmma_wait took them", thread);
            }
        }
    }
}

// The accumulators that all threads brought, as products know them: on their way already, or from now on.
Accumulators* find_accumulators(Warpgroup* group, int count) {
    for (Accumulators& acc : group->accumulators) {
        if (acc.arrays[0] != brought<Operands>(0).acc) continue;
        if (acc.count != count) give_up("wgmma: %d columns, and products of %d on their way into the same array", 2 * count, 2 * acc.count);
        return &acc;
    }
    if (!group->fenced) give_up("wgmma: no wgmma_fence since the last wgmma_wait that took accumulators, or none at all");
    group->accumulators.push_back({{}, count, std::vector<float>(static_cast<size_t>(ROWS * 2 * count)), 0});
    Accumulators* acc = &group->accumulators.back();
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        acc->arrays[thread] = brought<Operands>(thread).acc;
        for (int i = 0; i < count; ++i) {
            element_of(&acc->value, count, thread, i) = acc->arrays[thread][i];
            acc->arrays[thread][i] = bits_float(IN_FLIGHT);
        }
    }
    return acc;
}

bool same(const WgmmaForm& one, const WgmmaForm& other) {
    return one.a == other.a && one.b == other.b && one.count == other.count && one.accumulate == other.accumulate &&
           one.transpose_b == other.transpose_b && one.bf16 == other.bf16 && one.a_in_registers == other.a_in_registers;
}

void end_product(const Product& product) {
    const WgmmaForm& form = product.form;
    const int columns = 2 * form.count;
    const std::vector<float> a = form.a_in_registers ? product.a : read_operand(form.a, ROWS, false, form.bf16, "A");
    const std::vector<float> b = read_operand(form.b, columns, form.transpose_b, form.bf16, "B");
    for (int row = 0; row < ROWS; ++row) {
        for (int column = 0; column < columns; ++column) {
            float* d = &product.acc->value[static_cast<size_t>(row * columns + column)];
            double sum = form.accumulate ? *d : 0.0;
            for (int k = 0; k < DEPTH; ++k) sum += static_cast<double>(a[at(row, k)]) * b[at(column, k)];
            *d = static_cast<float>(sum);
        }
    }
}

void end_groups(Warpgroup* group, int newest) {
    for (const Accumulators& acc : group->accumulators) check_untouched(acc);
    for (; group->groups.size() > static_cast<size_t>(newest); group->groups.pop_front()) {
        for (const Product& product : group->groups.front()) {
            end_product(product);
            ++group->ended;
        }
    }
}

// The accumulators that a wait takes, if products went into them.
void hand_back(Warpgroup* group) {
    for (auto acc = group->accumulators.begin(); acc != group->accumulators.end(); ++acc) {
        if (acc->arrays[0] != brought<Wait>(0).acc) continue;
        if (acc->last > group->ended) give_up("wgmma_wait: it takes the accumulators of a product whose group it does not wait for");
        for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
            for (int i = 0; i < acc->count; ++i) acc->arrays[thread][i] = element_of(&acc->value, acc->count, thread, i);
        }
        group->accumulators.erase(acc);
        break;
    }
    group->fenced = false;
}

}  // namespace

void wgmma(float* acc, const uint32_t* a, const WgmmaForm& form) {
    Operands mine = {acc, a, form};
    if (!meet_warpgroup(INSTRUCTION, &mine)) return;
    Warpgroup& group = own_warpgroup();
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        if (!same(form, brought<Operands>(thread).form)) {
            give_up("wgmma: thread %d of the warpgroup brings other descriptors, or another product, than this one", thread);
        }
    }
    if (!form.a_in_registers) touch_operand(form.a, ROWS, false, "A");
    touch_operand(form.b, 2 * form.count, form.transpose_b, "B");
    Accumulators* accumulators = find_accumulators(&group, form.count);
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        if (accumulators->arrays[thread] != brought<Operands>(thread).acc) give_up("wgmma: threads bring accumulators of different products");
    }
    check_untouched(*accumulators);
    accumulators->last = ++group.issued;
    group.open.push_back({accumulators, form, form.a_in_registers ? gather_a(form.bf16) : std::vector<float>()});
    release_warpgroup();
}

void wgmma_fence() {
    if (!meet_warpgroup("wgmma_fence", nullptr)) return;
    own_warpgroup().fenced = true;
    release_warpgroup();
}

void wgmma_commit() {
    if (!meet_warpgroup("wgmma_commit", nullptr)) return;
    Warpgroup& group = own_warpgroup();
    group.groups.push_back(std::move(group.open));
    group.open.clear();
    release_warpgroup();
}

void wgmma_wait(int newest, float* acc, int count) {
    Wait mine = {newest, count, acc};
    if (!meet_warpgroup("wgmma_wait", &mine)) return;
    for (int thread = 0; thread < WARPGROUP_THREADS; ++thread) {
        const Wait& other = brought<Wait>(thread);
        if (other.newest != newest || other.count != count) give_up("wgmma_wait: the threads of the warpgroup wait for different groups");
    }
    end_groups(&own_warpgroup(), newest);
    if (acc != nullptr) hand_back(&own_warpgroup());
    release_warpgroup();
}

void reset_warpgroups() {
    for (Warpgroup& group : block->warpgroups) group = Warpgroup();
}

}  // namespace host
}  // namespace nvr
