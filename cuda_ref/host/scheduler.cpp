// Runs a grid on the CPU: blocks one after the other, a block's threads as fibers.
//
// A fiber runs until it waits. Then the next ready lane of its warp runs, or the next warp with a ready lane. The order is fixed, so a
// kernel without races gives the same bits every time. When no fiber is ready and some have not ended, they wait for different things:
// the block is given up and run_grid says who waits for what, instead of hanging as a GPU would.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <new>

#include "cuda_on_cpu.h"
#include "fiber.h"

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

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int MAX_WARPS = MAX_THREADS / WARP_LANES;
// Deepest kernel frame: under 8 KB, about 40 KB with AddressSanitizer's red zones. Pages that are never touched cost nothing.
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr unsigned EVERY_LANE = 0xffffffffu;

struct Fiber : Indices {
    Context context;
};

struct Warp {
    unsigned ready;    // lanes that can run; the running one is among them
    unsigned arrived;  // lanes that have brought their value
    unsigned ended;
    int phase;  // a lane may be one exchange ahead of another, never two: two buffers
    uint64_t values[2][WARP_LANES];
};

// All state of the launch that one OS thread works on. Stacks are kept for the next launch.
struct Block {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_WARPS];
    Context main;
    char* stacks = nullptr;
    int threads = 0, at_barrier = 0, ended = 0;
    void* shared = nullptr;
    void (*body)(const void*) = nullptr;
    const void* argument = nullptr;
    char trouble[160];

    ~Block() {
        if (stacks != nullptr) munmap(stacks, STACK_BYTES * MAX_THREADS);
    }
    bool reserve_stacks() {
        if (stacks != nullptr) return true;
        void* memory = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return false;
        stacks = static_cast<char*>(memory);
        return true;
    }
};

thread_local Block* block = nullptr;

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

Fiber* self() { return static_cast<Fiber*>(running); }

// The next fiber to run after `index`, or NULL.
Fiber* next_ready(int index) {
    const int warps = block->threads / WARP_LANES, home = index / WARP_LANES, lane = index % WARP_LANES;
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
    int in_exchange = 0;
    for (int w = 0; w < block->threads / WARP_LANES; ++w) in_exchange += __builtin_popcount(block->warps[w].arrived);
    snprintf(block->trouble, sizeof block->trouble,
             "block (%u, %u) cannot go on: %d of %d threads wait at __syncthreads, %d for the rest of their warp, %d have ended",
             block->fibers[0].block.x, block->fibers[0].block.y, block->at_barrier, block->threads, in_exchange, block->ended);
    return block->trouble;
}

const char* run_block(dim3 grid, dim3 index) {
    block->at_barrier = block->ended = 0;
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
    return block->ended == block->threads ? nullptr : describe_deadlock();
}

}  // namespace

void* block_shared_memory() { return block->shared; }

void block_barrier() {
    const unsigned index = running->thread.x;
    if (++block->at_barrier == block->threads) {
        block->at_barrier = 0;
        for (int w = 0; w < block->threads / WARP_LANES; ++w) block->warps[w].ready = EVERY_LANE;
        return;
    }
    block->warps[index / WARP_LANES].ready &= ~(1u << index % WARP_LANES);
    leave(false);
}

const uint64_t* warp_exchange(uint64_t value) {
    const unsigned index = running->thread.x, lane = index % WARP_LANES;
    Warp& warp = block->warps[index / WARP_LANES];
    const uint64_t* values = warp.values[warp.phase];
    warp.values[warp.phase][lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived == EVERY_LANE) {
        warp.arrived = 0;
        warp.phase ^= 1;
        warp.ready = EVERY_LANE;
        return values;
    }
    warp.ready &= ~(1u << lane);
    leave(false);
    return values;
}

const char* run_grid(dim3 grid, int threads, size_t shared, void (*body)(const void*), const void* argument) {
    block = owner.get();
    if (block == nullptr || !block->reserve_stacks()) return "no memory for the stacks of the block's threads";
    if (threads < WARP_LANES || threads > MAX_THREADS || threads % WARP_LANES != 0) return "the block is not made of full warps";
    // Its own allocation of exactly this size, so that AddressSanitizer sees an access beyond it. 16 bytes, as on a GPU.
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, shared) != 0) return "no memory for the block's shared memory";
    block->threads = threads;
    block->shared = memory;
    block->body = body;
    block->argument = argument;
    const char* trouble = nullptr;
    for (unsigned y = 0; y < grid.y && trouble == nullptr; ++y) {
        for (unsigned x = 0; x < grid.x && trouble == nullptr; ++x) {
            memset(memory, 0xff, shared);
            trouble = run_block(grid, dim3(x, y, 0));
        }
    }
    free(memory);
    running = nullptr;
    return trouble;
}

}  // namespace host
}  // namespace nvr
