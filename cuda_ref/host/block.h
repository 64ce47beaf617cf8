// The state of a launch and the ways to wait, for the files of the fiber layer alone. Kernels see the *_on_cpu.h.
#pragma once

#include <deque>
#include <list>
#include <vector>

#include "cuda_on_cpu.h"
#include "fiber.h"
#include "ptx_on_cpu.h"

namespace nvr {
namespace host {

constexpr int MAX_THREADS = 1024;
constexpr int MAX_WARPS = MAX_THREADS / WARP_LANES;
constexpr int NAMED_BARRIERS = 16;
constexpr unsigned EVERY_LANE = 0xffffffffu;
constexpr int COPY_BYTES = 16;
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_LANES;

// A cp.async that has not landed. The bytes are read when it starts, where an error is the running thread's.
struct Copy {
    uint32_t target;  // shared address
    unsigned char data[COPY_BYTES];
};

struct Fiber : Indices {
    Context context;
    std::deque<Copy> copies;      // in flight, oldest first
    uint64_t landed;              // copies that have landed; copies[0] is number `landed`
    std::deque<uint64_t> groups;  // committed groups in flight: copies begun before the commit
    uint64_t begun() const { return landed + copies.size(); }
};

struct Warp {
    unsigned ready;    // lanes that can run; the running one is among them
    unsigned arrived;  // lanes that wait for the rest of the warp
    unsigned ended;
    int phase;  // of values
    // A lane may be one exchange ahead of another, never two: two buffers.
    uint64_t values[2][WARP_LANES];
    const char* instruction;     // that the arrived lanes have come to
    void* operands[WARP_LANES];  // what each brought
};

struct NamedBarrier {
    int threads, arrived;
    unsigned waiting;  // warps
};

// "cp.async.mbarrier.arrive.noinc": an arrival as soon as the thread's first `copies` copies have landed.
struct Promise {
    Fiber* fiber;
    uint64_t copies;
};

struct Mbarrier {
    uint32_t address;
    uint32_t count;    // arrivals of a phase
    uint32_t missing;  // of the current phase, the promised ones among them
    uint32_t phase;    // phases that have completed
    std::vector<Promise> promised;
    unsigned waiting[MAX_WARPS];  // lanes
    int waiters;
};

// The same local array in all threads of a warpgroup, from the first product into it until a wait takes it; the arrays hold NaN meanwhile.
struct Accumulators {
    float* arrays[WARPGROUP_THREADS];
    int count;                 // elements of an array
    std::vector<float> value;  // the matrix [64][2 count] that the ended products have made
    uint64_t last;             // number of the last product
};

// A wgmma on its way.
struct Product {
    Accumulators* acc;
    WgmmaForm form;
    std::vector<float> a;  // where it came in registers
};

struct Warpgroup {
    int arrived = 0;                    // warps that wait for the others
    const char* instruction = nullptr;  // that they have come to
    bool fenced = false;                // since the last wait that took accumulators
    uint64_t issued = 0, ended = 0;     // products
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;  // committed, oldest first
    std::list<Accumulators> accumulators;
};

// All state of the launch that one OS thread works on. Stacks are kept for the next launch.
struct Block {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_WARPS];
    NamedBarrier named[NAMED_BARRIERS];
    std::vector<Mbarrier> mbarriers;
    Warpgroup warpgroups[MAX_THREADS / WARPGROUP_THREADS];
    Context main;
    char* stacks = nullptr;
    int threads = 0, at_barrier = 0, ended = 0;
    uint32_t random = 0;  // state of the shuffled order; 0 = in order
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    void (*body)(const void*) = nullptr;
    const void* argument = nullptr;
    char trouble[400];

    ~Block();
    bool reserve_stacks();
};

extern thread_local Block* block;

inline Fiber* self() { return static_cast<Fiber*>(running); }
inline Warp& own_warp() { return block->warps[running->thread.x / WARP_LANES]; }

// The running thread cannot go on until somebody sets its bit in `ready`; others run.
void suspend();

// The running lane comes to a warp-wide instruction. True in the last of the 32: it works for all, on their operands, and then calls
// release(). The others come back, with false, when that is done. Operands may point into the lanes' frames.
bool meet(const char* instruction, void* operands);
inline void release() { own_warp().ready = EVERY_LANE; }

// The running thread did what no GPU allows: run_grid returns the text.
[[noreturn]] __attribute__((format(printf, 1, 2))) void give_up(const char* format, ...);

// The memory behind a 32-bit shared address, `bytes` aligned bytes of it.
unsigned char* shared_at(uint32_t address, uint32_t bytes, const char* instruction);

// In async.cpp: a new block has no copies in flight and no mbarriers; what its mbarriers wait for.
void reset_async();
void describe_mbarriers(char* text, size_t size);

// In warpgroup.cpp: a new block has no products on their way.
void reset_warpgroups();

}  // namespace host
}  // namespace nvr
