// Runs a grid on the CPU: blocks one after the other, a block's threads as fibers.
//
// A fiber runs until it waits. Then the next ready lane of its warp runs, or the next warp with a ready lane. The order is fixed, so a
// kernel without races gives the same bits every time. CUDA_REF_HOST_SEED, a number, shuffles the order. When no fiber is ready
// and some have not ended, they wait for different things: the block is given up and run_grid says who waits for what, instead of hanging
// as a GPU would.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <new>

#include "block.h"
#include "ptx_on_cpu.h"

#if defined(__x86_64__)
// void nvr_switch_stack(void** save, void* load): the registers that a call preserves go on the old stack and come off the new one.
asm(R"(
    .text
    .p2align 4
    .hidden nvr_switch_stack
    .globl nvr_switch_stack
    .type nvr_switch_stack, @function
nvr_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size nvr_switch_stack, .-nvr_switch_stack
    .section .note.GNU-stack, "", @progbits
    .text
)");
#endif

namespace nvr {
namespace host {

thread_local Indices* running = nullptr;
thread_local Block* block = nullptr;

namespace {

// Deepest kernel frame: under 8 KB, about 40 KB with AddressSanitizer's red zones. Pages that are never touched cost nothing.
constexpr size_t STACK_BYTES = 256 * 1024;

struct BlockOwner {
    Block* owned = nullptr;
    ~BlockOwner() {
        if (owned != nullptr) owned->~Block();
        free(owned);
    }
    Block* get() {
        if (owned == nullptr) {
            void* memory = nullptr;
            if (posix_memalign(&memory, alignof(Block), sizeof(Block)) != 0) return nullptr;
            owned = new (memory) Block();
        }
        return owned;
    }
};
thread_local BlockOwner owner;

// xorshift32
uint32_t next_random() {
    block->random ^= block->random << 13;
    block->random ^= block->random >> 17;
    block->random ^= block->random << 5;
    return block->random;
}

// The next fiber to run after `index`, or NULL.
Fiber* next_ready(int index) {
    const int warps = block->threads / WARP_LANES;
    int home = index / WARP_LANES, lane = index % WARP_LANES;  // where to begin to look
    if (block->random != 0) {
        const uint32_t draw = next_random();
        home = static_cast<int>(draw % static_cast<uint32_t>(warps));
        lane = static_cast<int>(draw >> 27);
    }
    const unsigned later = block->warps[home].ready & (EVERY_LANE << lane << 1);
    if (later != 0) return &block->fibers[home * WARP_LANES + __builtin_ctz(later)];
    for (int step = 1; step <= warps; ++step) {
        const int warp = (home + step) % warps;
        if (block->warps[warp].ready != 0) return &block->fibers[warp * WARP_LANES + __builtin_ctz(block->warps[warp].ready)];
    }
    return nullptr;
}

// Leaves the running fiber for the next ready one, or for run_block when there is none.
void leave(bool ended) {
    Fiber* from = self();
    Fiber* to = next_ready(static_cast<int>(from->thread.x));
    running = to;
    switch_to(&from->context, to == nullptr ? &block->main : &to->context, ended);
}

void fiber_entry() {
    arrive(&self()->context, &block->main);
    block->body(block->argument);
    const unsigned index = running->thread.x;
    Warp& warp = block->warps[index / WARP_LANES];
    warp.ready &= ~(1u << index % WARP_LANES);
    warp.ended |= 1u << index % WARP_LANES;
    ++block->ended;
    leave(true);
}

const char* describe_deadlock() {
    int in_warp = 0;
    for (int w = 0; w < block->threads / WARP_LANES; ++w) in_warp += __builtin_popcount(block->warps[w].arrived);
    size_t used = static_cast<size_t>(snprintf(
        block->trouble, sizeof block->trouble,
        "block (%u, %u) cannot go on: %d of %d threads wait at __syncthreads, %d for the rest of their warp, %d have ended",
        block->fibers[0].block.x, block->fibers[0].block.y, block->at_barrier, block->threads, in_warp, block->ended));
    for (int number = 1; number < NAMED_BARRIERS && used < sizeof block->trouble; ++number) {
        const NamedBarrier& barrier = block->named[number];
        if (barrier.waiting == 0) continue;
        used += static_cast<size_t>(snprintf(block->trouble + used, sizeof block->trouble - used,
                                             "; %d wait at named barrier %d, where %d of %d have arrived",
                                             __builtin_popcount(barrier.waiting) * WARP_LANES, number, barrier.arrived, barrier.threads));
    }
    int in_warpgroup = 0;
    for (const Warpgroup& group : block->warpgroups) in_warpgroup += group.arrived * WARP_LANES;
    if (in_warpgroup != 0 && used < sizeof block->trouble) {
        used += static_cast<size_t>(snprintf(block->trouble + used, sizeof block->trouble - used, "; %d wait for the rest of their warpgroup",
                                             in_warpgroup));
    }
    if (used < sizeof block->trouble) describe_mbarriers(block->trouble + used, sizeof block->trouble - used);
    return block->trouble;
}

const char* run_block(dim3 grid, dim3 index) {
    block->at_barrier = block->ended = 0;
    block->trouble[0] = '\0';
    for (NamedBarrier& barrier : block->named) barrier = {};
    reset_async();
    reset_warpgroups();
    memset(block->shared, 0xff, block->shared_bytes);
    for (int w = 0; w < block->threads / WARP_LANES; ++w) {
        block->warps[w].ready = EVERY_LANE;
        block->warps[w].arrived = block->warps[w].ended = 0;
        block->warps[w].phase = 0;
    }
    for (int t = 0; t < block->threads; ++t) {
        Fiber& fiber = block->fibers[t];
        fiber.thread = dim3(static_cast<unsigned>(t), 0, 0);
        fiber.block = index;
        fiber.grid = grid;
        fiber.context.stack = block->stacks + t * STACK_BYTES;
        fiber.context.size = STACK_BYTES;
        fiber.context.sanitizer = nullptr;
        prepare(&fiber.context, fiber_entry);
    }
    running = &block->fibers[0];
    switch_to(&block->main, &block->fibers[0].context, false);
    if (block->trouble[0] != '\0') return block->trouble;
    return block->ended == block->threads ? nullptr : describe_deadlock();
}

struct NamedArrival {
    int number, threads;
    bool wait;
    bool operator!=(const NamedArrival& other) const { return number != other.number || threads != other.threads || wait != other.wait; }
};

const NamedArrival& arrival_of(int lane) { return *static_cast<const NamedArrival*>(own_warp().operands[lane]); }

}  // namespace

Block::~Block() {
    if (stacks != nullptr) munmap(stacks, STACK_BYTES * MAX_THREADS);
}

bool Block::reserve_stacks() {
    if (stacks != nullptr) return true;
    void* memory = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    stacks = static_cast<char*>(memory);
    return true;
}

void suspend() {
    own_warp().ready &= ~(1u << running->thread.x % WARP_LANES);
    leave(false);
}

bool meet(const char* instruction, void* operands) {
    const unsigned lane = running->thread.x % WARP_LANES;
    Warp& warp = own_warp();
    if (warp.arrived == 0) warp.instruction = instruction;
    if (warp.instruction != instruction) {
        give_up("lanes of a warp meet at two different instructions, %s and %s", warp.instruction, instruction);
    }
    warp.operands[lane] = operands;
    warp.arrived |= 1u << lane;
    if (warp.arrived == EVERY_LANE) {
        warp.arrived = 0;
        return true;
    }
    suspend();
    return false;
}

void give_up(const char* format, ...) {
    Fiber* me = self();
    const int used = snprintf(block->trouble, sizeof block->trouble, "block (%u, %u), thread %u: ", me->block.x, me->block.y, me->thread.x);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(block->trouble + used, sizeof block->trouble - static_cast<size_t>(used), format, arguments);
    va_end(arguments);
    running = nullptr;
    switch_to(&me->context, &block->main, true);
    abort();  // nobody comes back here
}

void* block_shared_memory() { return block->shared; }

uint32_t address_of_shared(const void* pointer) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(block->shared);
    if (offset > block->shared_bytes) give_up("shared_address: the pointer does not lie in the block's shared memory");
    return SHARED_BASE + static_cast<uint32_t>(offset);
}

unsigned char* shared_at(uint32_t address, uint32_t bytes, const char* instruction) {
    const uint32_t offset = address - SHARED_BASE;  // an address below the base wraps around and is too large
    if (offset > block->shared_bytes || block->shared_bytes - offset < bytes) {
        give_up("%s: shared address %u is out of bounds: shared memory has the addresses %u to %zu", instruction, address, SHARED_BASE,
                SHARED_BASE + block->shared_bytes);
    }
    if (offset % bytes != 0) give_up("%s: shared address %u is no multiple of %u", instruction, address, bytes);
    return block->shared + offset;
}

void block_barrier() {
    if (++block->at_barrier == block->threads) {
        block->at_barrier = 0;
        for (int w = 0; w < block->threads / WARP_LANES; ++w) block->warps[w].ready = EVERY_LANE;
        return;
    }
    suspend();
}

const uint64_t* warp_exchange(uint64_t value) {
    Warp& warp = own_warp();
    const uint64_t* values = warp.values[warp.phase];
    warp.values[warp.phase][running->thread.x % WARP_LANES] = value;
    if (meet("a shuffle, a vote or __syncwarp", nullptr)) {
        warp.phase ^= 1;
        release();
    }
    return values;
}

void named_barrier(int number, int threads, bool wait) {
    NamedArrival mine = {number, threads, wait};
    if (number < 1 || number >= NAMED_BARRIERS) give_up("named barrier %d: the numbers are 1 to 15, 0 is __syncthreads", number);
    if (!meet("a named barrier", &mine)) return;
    // The last lane speaks for the warp, as the hardware counts whole warps.
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        if (arrival_of(lane) != mine) give_up("lanes of a warp arrive at named barriers %d and %d", arrival_of(lane).number, number);
    }
    NamedBarrier& barrier = block->named[number];
    if (barrier.arrived != 0 && barrier.threads != threads) {
        give_up("named barrier %d is for %d threads here and for %d elsewhere", number, threads, barrier.threads);
    }
    barrier.threads = threads;
    barrier.arrived += WARP_LANES;
    if (barrier.arrived == threads) {
        for (; barrier.waiting != 0; barrier.waiting &= barrier.waiting - 1) block->warps[__builtin_ctz(barrier.waiting)].ready = EVERY_LANE;
        barrier.arrived = 0;
        release();
    } else if (wait) {
        barrier.waiting |= 1u << running->thread.x / WARP_LANES;
        suspend();
    } else {
        release();
    }
}

const char* run_grid(dim3 grid, int threads, size_t shared, void (*body)(const void*), const void* argument) {
    block = owner.get();
    if (block == nullptr || !block->reserve_stacks()) return "no memory for the stacks of the block's threads";
    if (threads < WARP_LANES || threads > MAX_THREADS || threads % WARP_LANES != 0) return "the block is not made of full warps";
    // Its own allocation of exactly this size, so that AddressSanitizer sees an access beyond it. 16 bytes, as on a GPU.
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, shared) != 0) return "no memory for the block's shared memory";
    const char* seed = getenv("CUDA_REF_HOST_SEED");
    block->random = seed == nullptr ? 0 : static_cast<uint32_t>(strtoul(seed, nullptr, 10));
    block->threads = threads;
    block->shared = static_cast<unsigned char*>(memory);
    block->shared_bytes = shared;
    block->body = body;
    block->argument = argument;
    const char* trouble = nullptr;
    for (unsigned y = 0; y < grid.y && trouble == nullptr; ++y) {
        for (unsigned x = 0; x < grid.x && trouble == nullptr; ++x) trouble = run_block(grid, dim3(x, y, 0));
    }
    reset_async();
    reset_warpgroups();
    free(memory);
    running = nullptr;
    return trouble;
}

}  // namespace host
}  // namespace nvr
