// Where the line of work is cut: which share of it each CTA takes. The cheapest of three ways:
//
//     whole    no tile is cut. No more tiles than CTAs: a CTA for each. More: even cuts, each moved to the nearest border of a tile
//     apart    no CTA works on two tiles: each tile has CTAs of its own, as few as keep to a common length
//     even     every CTA gets the same length of line: all end together, but many CTAs end one tile and begin another
//
//     cost in units    whole  longest share        apart  longest share + c        even  longest share + 2 c + 1 / 24 of it
//
// c is what loading the queries of a piece and writing its result cost. Every CTA pays it for each of its tiles; beyond that, even pays it
// for the second half of a tile, and both ways that cut for the merge. The 1 / 24: CTAs of a request that begin at the same key read the same rows
// at the same time, from the cache; those that begin anywhere, each from memory. Deterministic plans take the even cuts.
//
// Where tiles are cut, a share is no shorter than min_keys, nor than the cheapest when few keys meet many CTAs: all partial results go through the
// same cache and one kernel that merges them, so S keys a share cost S + merge_keys * keys of all tiles / S.
#pragma once

#include "scans.cuh"
#include "work.cuh"

namespace nvr {

// What even cuts cost since CTAs of a request are out of step, as a part of the share.
constexpr int64_t OUT_OF_STEP = 24;
// c, in keys: on an H200 some 3 us, in which a CTA does about 128 keys.
constexpr int32_t PIECE_COST_KEYS = 128;

enum class Way { EVEN, APART, WHOLE };

struct Cuts {
    Way way;         // WHOLE: by moved cuts. A CTA for each tile is APART, with the longest tile as length
    int64_t length;  // units of a CTA's share before it is moved; APART: of a piece at most
    int64_t used;    // APART: CTAs with work
};

__device__ inline int32_t pieces_of(int32_t blocks, int64_t length) {
    const int32_t most = static_cast<int32_t>(length);  // of a tile or less than two shares: never near 2^31 where tiles are as few as CTAs
    return (blocks + most - 1) / most;
}

// Where CTA p begins.
__device__ inline Cursor find_start(const Plan& plan, int64_t batch, int64_t units, const Cuts& cuts, int64_t p) {
    const Request* requests = plan.workspace.requests;
    const bool apart = cuts.way == Way::APART;
    const int64_t at = apart ? p : p * cuts.length;
    if (at >= (apart ? cuts.used : units)) return {units, 0, 0, 0, 0};
    const int32_t r = apart ? find_request<&Request::piece_begin>(requests, batch, at) : find_request<&Request::unit_begin>(requests, batch, at);
    const Request request = requests[r];
    const int32_t blocks = blocks_of(plan, request);
    Cursor start = {0, r, 0, 0, 0};
    if (apart) {
        const int32_t pieces = pieces_of(blocks, cuts.length), inside = static_cast<int32_t>(at - request.piece_begin);
        start.tile = inside / pieces;
        start.block = inside % pieces * pieces_of(blocks, pieces);
    } else {
        const int64_t inside = at - request.unit_begin;
        start.tile = static_cast<int32_t>(inside / blocks);
        start.block = static_cast<int32_t>(inside - static_cast<int64_t>(start.tile) * blocks);
        if (plan.config.deterministic) {  // the first piece that starts here or later
            const int32_t length = split_of(plan, request).length;
            start.block = static_cast<int32_t>(min64((start.block + length - 1) / length * length, blocks));
        } else if (cuts.way == Way::WHOLE) {
            start.block = start.block >= blocks - start.block ? blocks : 0;
        }
    }
    start.unit = request.unit_begin + static_cast<int64_t>(start.tile) * blocks + start.block;
    if (start.block == blocks) {
        ++start.tile;
        start.block = 0;
    }
    if (start.tile == tiles_of(plan, request)) {
        start.request = find_request<&Request::unit_begin>(requests, batch, start.unit);
        start.tile = 0;
    }
    return start;
}

// Writes starts[ctas + 1]; returns the longest share of the thread's CTAs.
__device__ inline int64_t write_starts(const Plan& plan, int64_t batch, int64_t units, const Cuts& cuts) {
    Cursor* starts = plan.workspace.starts;
    for (int p = threadIdx.x; p <= plan.ctas; p += SCHEDULE_THREADS) starts[p] = find_start(plan, batch, units, cuts, p);
    __syncthreads();  // hazard: here and in merge_shares threads read starts that others wrote
    int64_t longest = 0;
    for (int p = threadIdx.x; p < plan.ctas; p += SCHEDULE_THREADS) longest = max64(longest, starts[p + 1].unit - starts[p].unit);
    return longest;
}

// c in units.
__device__ inline int32_t piece_cost(const Plan& plan) { return (PIECE_COST_KEYS + plan.tile_keys - 1) / plan.tile_keys; }

// A length from payload on with which all tiles have enough CTAs; 0 if none of those tried does. From payload + span on even cuts are no dearer.
// Each warp tries one: with a span of 8 at most that is every length there is, else they are spread over it, and what is found may be above the
// least by less than an eighth of the span. needed [SCHEDULE_WARPS].
__device__ inline int64_t first_fitting(const Plan& plan, int64_t batch, int64_t payload, int64_t span, int64_t* needed) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t step = ceil_div(span, SCHEDULE_WARPS);
    int64_t need = 0;
    for (int64_t r = lane; r < batch; r += WARP) {
        const Request& request = plan.workspace.requests[r];
        need += static_cast<int64_t>(tiles_of(plan, request)) * pieces_of(blocks_of(plan, request), payload + warp * step);
    }
    need = warp_scan(need, lane);
    if (lane == WARP - 1) needed[warp] = need;
    __syncthreads();  // hazard: every thread looks at what the last lane of each warp wrote
    for (int w = 0; w < SCHEDULE_WARPS; ++w) {
        if (needed[w] <= plan.ctas) return payload + w * step;
    }
    return 0;
}

// Gives each request its first CTA; returns how many have work.
__device__ inline int64_t assign_ctas(const Plan& plan, int64_t batch, int64_t length, int64_t* of_warps) {
    int64_t used = 0;
    for (int64_t base = 0; base < batch; base += SCHEDULE_THREADS) {
        const int64_t r = base + threadIdx.x;
        Request* request = plan.workspace.requests + r;
        const int64_t count = r < batch ? static_cast<int64_t>(tiles_of(plan, *request)) * pieces_of(blocks_of(plan, *request), length) : 0;
        const int64_t before = block_scan(count, &used, of_warps);
        if (r < batch) request->piece_begin = before;
        __syncthreads();  // hazard: find_start looks requests up by piece_begin; the next scan overwrites of_warps
    }
    return used;
}

// The cuts where no more tiles are than CTAs. schedule has numbered the tiles already, in case that each has a CTA.
__device__ inline Cuts choose_apart(const Plan& plan, int64_t batch, const Line& line, int64_t payload, int64_t most, int64_t* scratch) {
    const int64_t cost = piece_cost(plan);
    Cuts cuts = {Way::EVEN, payload, 0};
    int64_t best = most;
    if (line.longest <= best) {
        cuts = {Way::APART, line.longest, line.slots};
        best = line.longest;
    }
    if (payload + cost >= best) return cuts;
    const int64_t common = first_fitting(plan, batch, payload, most - payload - cost, scratch + SCHEDULE_WARPS);
    if (common == 0 || common + cost >= best) return cuts;
    return {Way::APART, common, assign_ctas(plan, batch, common, scratch)};
}

// Units of a share where tiles are cut, from an even share on: while one of a unit more is cheaper. That is the second condition, which implies the
// first but could be too large a number. Of a deterministic plan the share does not say how many pieces there are.
__device__ inline int64_t shortest_share(const Plan& plan, int64_t units, int64_t share) {
    int64_t payload = max64(share, (plan.min_keys + plan.tile_keys - 1) / plan.tile_keys);
    if (plan.config.deterministic) return payload;
    while ((payload + 1) * plan.tile_keys < static_cast<int64_t>(plan.ctas) * plan.merge_keys &&
           payload * (payload + 1) * plan.tile_keys < units * plan.merge_keys) {
        ++payload;
    }
    return payload;
}

// Writes starts[ctas + 1]; returns whether a tile may be cut. line: of all requests. scratch: int64 [2][SCHEDULE_WARPS], of which block_scan
// takes the first row and first_fitting the other.
__device__ inline bool cut_line(const Plan& plan, int64_t batch, const Line& line, int64_t* scratch) {
    const int64_t share = ceil_div(line.units, plan.ctas), payload = shortest_share(plan, line.units, share);
    const int64_t most = payload + 2 * piece_cost(plan) + payload / OUT_OF_STEP;  // what an uncut share may be long
    const Cuts even = {Way::EVEN, payload, 0};
    Cuts cuts = even;
    if (!plan.config.deterministic) {
        if (line.slots <= plan.ctas) {
            cuts = choose_apart(plan, batch, line, payload, most, scratch);
        } else if (line.longest <= most) {
            cuts = {Way::WHOLE, share, 0};
        }
    }
    // A loop and not a second call: that would be inlined as well, and code that runs once costs by its length.
    while (true) {
        const int64_t longest = write_starts(plan, batch, line.units, cuts);
        if (cuts.way != Way::WHOLE) return cuts.way == Way::EVEN || cuts.used > line.slots;
        int64_t longer = 0;
        block_scan(static_cast<int64_t>(longest > most), &longer, scratch);  // its barrier also lets all threads read starts
        if (longer == 0) return false;
        cuts = even;
    }
}

}  // namespace nvr
