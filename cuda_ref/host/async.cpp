// cp.async and mbarriers, with the worst timing that a GPU may show.
//
// A copy is read at once but lands when somebody is entitled to see it, and its target is NaN (and poisoned for AddressSanitizer) from the
// start: whoever reads too early, or has not yet read what lay there before, gets NaN. A phase that only landing copies keep from ending
// stays open until somebody waits or looks for it.
//
// An mbarrier's 8 bytes of shared memory hold a mark and its number in Block::mbarriers, so that one that was not initialised, or that the
// kernel wrote over, is seen.
#include <stdio.h>

#include "block.h"
#include "ptx_on_cpu.h"

namespace nvr {
namespace host {

namespace {

constexpr uint32_t MARK = 0x6d626172;  // "mbar"
constexpr uint32_t MOST_ARRIVALS = (1u << 20) - 1;  // "mbarrier": contents of the object

void hide(void* memory, size_t bytes) {
#if NVR_ASAN
    __asan_poison_memory_region(memory, bytes);
#else
    (void)memory, (void)bytes;
#endif
}

void show(void* memory, size_t bytes) {
#if NVR_ASAN
    __asan_unpoison_memory_region(memory, bytes);
#else
    (void)memory, (void)bytes;
#endif
}

// The fiber's first `count` copies of all that it began are in shared memory afterwards.
void land(Fiber* fiber, uint64_t count) {
    for (; fiber->landed < count; ++fiber->landed) {
        const Copy& copy = fiber->copies.front();
        unsigned char* target = block->shared + (copy.target - SHARED_BASE);
        show(target, COPY_BYTES);
        memcpy(target, copy.data, COPY_BYTES);
        fiber->copies.pop_front();
    }
}

Mbarrier& mbarrier_at(uint32_t address, const char* instruction) {
    uint32_t words[2];
    memcpy(words, shared_at(address, sizeof words, instruction), sizeof words);
    if (words[0] != MARK || words[1] >= block->mbarriers.size() || block->mbarriers[words[1]].address != address) {
        give_up("%s: no mbarrier at byte %u of shared memory: not initialised, or written over", instruction, address - SHARED_BASE);
    }
    return block->mbarriers[words[1]];
}

// Nothing is missing but copies that have begun to travel.
bool can_complete(const Mbarrier& barrier) { return barrier.missing == barrier.promised.size(); }

void complete(Mbarrier* barrier) {
    for (const Promise& promise : barrier->promised) land(promise.fiber, promise.copies);
    barrier->promised.clear();
    barrier->missing = barrier->count;
    ++barrier->phase;
    if (barrier->waiters == 0) return;
    for (int w = 0; w < block->threads / WARP_LANES; ++w) {
        block->warps[w].ready |= barrier->waiting[w];
        barrier->waiting[w] = 0;
    }
    barrier->waiters = 0;
}

// The barrier as an arrival finds it: its phase may be one that ended unobserved, and the arrival then belongs to the next.
Mbarrier& open_phase(uint32_t address, const char* instruction) {
    Mbarrier& barrier = mbarrier_at(address, instruction);
    if (can_complete(barrier)) complete(&barrier);
    return barrier;
}

void complete_if_seen(Mbarrier* barrier) {
    if (can_complete(*barrier) && (barrier->promised.empty() || barrier->waiters != 0)) complete(barrier);
}

// Whether the phase of that parity has ended. One that only landing copies keep from it ends now.
bool is_complete(uint32_t address, uint32_t parity, const char* instruction) {
    if (parity > 1) give_up("%s: expected parity 0 or 1, got %u", instruction, parity);
    Mbarrier& barrier = mbarrier_at(address, instruction);
    if ((barrier.phase & 1) != parity) return true;
    if (!can_complete(barrier)) return false;
    complete(&barrier);
    return true;
}

}  // namespace

void begin_copy(uint32_t shared_address, const void* source, uint32_t source_bytes) {
    unsigned char* target = shared_at(shared_address, COPY_BYTES, "cp_async_16");
    if (source_bytes > COPY_BYTES) give_up("cp_async_16_zfill: expected 0 to 16 source bytes, got %u", source_bytes);
    if (source_bytes != 0 && reinterpret_cast<uintptr_t>(source) % COPY_BYTES != 0) {
        give_up("cp_async_16: global address %p is no multiple of 16", source);
    }
    Copy copy = {shared_address, {}};
    if (source_bytes != 0) memcpy(copy.data, source, source_bytes);
    memset(target, 0xff, COPY_BYTES);
    hide(target, COPY_BYTES);
    self()->copies.push_back(copy);
}

void commit_copies() { self()->groups.push_back(self()->begun()); }

void wait_for_copies(int newest) {
    Fiber* me = self();
    for (; me->groups.size() > static_cast<size_t>(newest); me->groups.pop_front()) land(me, me->groups.front());
}

void mbarrier_init(uint32_t address, uint32_t count) {
    const uint32_t words[2] = {MARK, static_cast<uint32_t>(block->mbarriers.size())};
    unsigned char* target = shared_at(address, sizeof words, "mbarrier_init");
    if (count == 0 || count > MOST_ARRIVALS) give_up("mbarrier_init: expected 1 to %u arrivals, got %u", MOST_ARRIVALS, count);
    for (const Mbarrier& other : block->mbarriers) {
        if (other.address == address) give_up("mbarrier_init: the mbarrier at byte %u exists already", address - SHARED_BASE);
    }
    memcpy(target, words, sizeof words);
    block->mbarriers.push_back({address, count, count, 0, {}, {}, 0});
}

void mbarrier_arrive(uint32_t address, uint32_t count) {
    Mbarrier& barrier = open_phase(address, "mbarrier_arrive");
    if (count == 0 || count > barrier.missing - barrier.promised.size()) {
        give_up("mbarrier_arrive: %u arrivals at once, and the phase misses %zu", count, barrier.missing - barrier.promised.size());
    }
    barrier.missing -= count;
    complete_if_seen(&barrier);
}

void mbarrier_arrive_after_copies(uint32_t address) {
    Mbarrier& barrier = open_phase(address, "cp_async_mbarrier_arrive_noinc");
    barrier.promised.push_back({self(), self()->begun()});
    complete_if_seen(&barrier);
}

bool mbarrier_test(uint32_t address, uint32_t parity) { return is_complete(address, parity, "mbarrier_test"); }

void mbarrier_wait(uint32_t address, uint32_t parity) {
    while (!is_complete(address, parity, "mbarrier_wait")) {
        Mbarrier& barrier = mbarrier_at(address, "mbarrier_wait");
        barrier.waiting[running->thread.x / WARP_LANES] |= 1u << running->thread.x % WARP_LANES;
        ++barrier.waiters;
        suspend();  // and look again, as one that polls: the phase after the awaited one may have ended meanwhile
    }
}

void reset_async() {
    show(block->shared, block->shared_bytes);
    block->mbarriers.clear();
    for (int t = 0; t < block->threads; ++t) {
        Fiber& fiber = block->fibers[t];
        fiber.copies.clear();
        fiber.groups.clear();
        fiber.landed = 0;
    }
}

void describe_mbarriers(char* text, size_t size) {
    for (const Mbarrier& barrier : block->mbarriers) {
        if (barrier.waiters == 0) continue;
        const int used = snprintf(text, size, "; %d wait for phase %u of the mbarrier at byte %u, which misses %zu of %u arrivals", barrier.waiters,
                                  barrier.phase, barrier.address - SHARED_BASE, barrier.missing - barrier.promised.size(), barrier.count);
        if (static_cast<size_t>(used) >= size) return;
        text += used;
        size -= static_cast<size_t>(used);
    }
}

}  // namespace host
}  // namespace nvr
