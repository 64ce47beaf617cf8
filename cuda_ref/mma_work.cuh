// What the three roles of mma share, and wgmma with them: the walk over a CTA's share of the line of work, the ring, the swizzles, the barriers.
#pragma once

#include "mma_config.cuh"

namespace nvr {
namespace mma {

// A role's place in its CTA's share. Every role walks by itself, so that each may be at another tile.
struct Walk {
    uint32_t request, tile, unit;  // unit: of the tile, where the piece at hand begins
    uint32_t left;                 // units of the share from here on
};

__device__ __forceinline__ Walk begin_walk(const Plan& plan) {
    const Cursor* start = plan.workspace.starts + blockIdx.x;
    return {static_cast<uint32_t>(start[0].request), static_cast<uint32_t>(start[0].tile), static_cast<uint32_t>(start[0].block),
            static_cast<uint32_t>(start[1].unit - start[0].unit)};
}

__device__ __forceinline__ const Request& request_of(const Plan& plan, const Walk& walk) { return plan.workspace.requests[walk.request]; }

// tiles_of, blocks_of and split_of of work.cuh, for a tile known to the compiler.
template <class Tile>
__device__ __forceinline__ uint32_t tiles_of_request(const Plan& plan, const Request& request) {
    return (static_cast<uint32_t>(request.q_len) * plan.row_heads + Tile::ROWS - 1) / Tile::ROWS;
}

template <class Tile>
__device__ __forceinline__ uint32_t units_of_tile(const Request& request) {
    const uint32_t units = (static_cast<uint32_t>(request.kv_len) + Tile::KEYS - 1) / Tile::KEYS;
    return units > 1 ? units : 1;
}

template <class Tile>
__device__ __forceinline__ Split split_of_request(const Plan& plan, const Request& request) {
    const int32_t units = static_cast<int32_t>(units_of_tile<Tile>(request));
    if (request.piece_begin < 0) return {1, units};
    return split_by_length(Tile::KEYS, static_cast<int32_t>(tiles_of_request<Tile>(plan, request)), units);
}

// Past a request's last tile: on to the next request that has one. There is one as long as units are left.
template <class Tile>
__device__ __forceinline__ void find_tile(const Plan& plan, Walk* walk) {
    while (walk->tile >= tiles_of_request<Tile>(plan, request_of(plan, *walk))) {
        ++walk->request;
        walk->tile = 0;
    }
}

// Units of the piece that begins here.
template <class Tile>
__device__ __forceinline__ uint32_t piece_length(const Plan& plan, const Walk& walk) {
    const Request& request = request_of(plan, walk);
    uint32_t most = units_of_tile<Tile>(request) - walk.unit;
    if (plan.config.deterministic) {
        const uint32_t length = split_of_request<Tile>(plan, request).length;
        most = most < length ? most : length;
    }
    return most < walk.left ? most : walk.left;
}

// Behind the piece.
template <class Tile>
__device__ __forceinline__ void go_on(const Plan& plan, uint32_t length, Walk* walk) {
    walk->left -= length;
    walk->unit += length;
    if (walk->unit == units_of_tile<Tile>(request_of(plan, *walk))) {
        walk->unit = 0;
        ++walk->tile;
    }
}

// Draft tokens of a request that q, out and the plan all have.
__device__ __forceinline__ uint32_t tokens_there(const VerifyParams& params, const Request& request) {
    return static_cast<uint32_t>(max64(min64(request.q_len, params.rows - request.q_begin), 0));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in q and ring; and in the weights, rows of KEYS elements. Both swizzles put the 8 rows of
// any ldmatrix matrix into 8 different 16-byte bank groups.
template <class C>
__device__ __forceinline__ uint32_t row_offset(uint32_t row, uint32_t chunk) {
    return row * C::ROW_PITCH + chunk / THREADS_PER_ROW * C::SEGMENT_PITCH + (chunk ^ row) % THREADS_PER_ROW * CHUNK_BYTES;
}

template <class C>
__device__ __forceinline__ uint32_t weight_offset(uint32_t row, uint32_t chunk) {
    // Rows narrower than 128 bytes lie several to a bank line: only every 2nd (4th) row starts a new one and needs another turn.
    constexpr uint32_t BYTES = C::KEYS * ITEM_BYTES, CHUNKS = BYTES / CHUNK_BYTES;
    return row * BYTES + (chunk ^ row / (SEGMENT_BYTES / BYTES) % CHUNKS) * CHUNK_BYTES;
}

// Of a running number of a block, counted by each role from its start: its place in a ring of so many, and the parity of the phase of the
// mbarrier there, 0 in the first round, then 1, 0, ...
template <uint32_t PLACES>
__device__ __forceinline__ uint32_t place_of(uint32_t number) {
    return number % PLACES;
}

template <uint32_t PLACES>
__device__ __forceinline__ uint32_t phase_of(uint32_t number) {
    return number / PLACES % 2;
}

// Byte offset of the block in the ring, and the addresses of its mbarriers.
template <class C>
__device__ __forceinline__ uint32_t block_offset(uint32_t number) {
    return place_of<C::BLOCKS>(number) * C::BLOCK_BYTES;
}

template <class C>
__device__ __forceinline__ uint32_t full_at(uint32_t base, uint32_t number) {
    return base + C::FULL + 8 * place_of<C::FULL_BARRIERS>(number);
}

template <class C>
__device__ __forceinline__ uint32_t empty_at(uint32_t base, uint32_t number) {
    return base + C::EMPTY + 8 * place_of<C::BLOCKS>(number);
}

// The mbarrier of a step of this CTA and a row warp.
template <class C>
__device__ __forceinline__ uint32_t scored_at(uint32_t base, uint32_t step, uint32_t row_warp) {
    return base + C::SCORED + 8 * (place_of<C::SCORED_STEPS>(step) * C::ROW_WARPS + row_warp);
}

// The named barriers (0 is __syncthreads): 1 score, 2.. group, 4.. turn, 8.. ready (see below), 12.. free; 15 at most, as many as there are.
// w: a row warp of a group of score warps.
template <class C>
struct Signals {
    static_assert(C::GROUPS <= 4 && C::ROW_WARPS * C::GROUPS == SCORE_WARPS, "four barriers of each kind");
    using Group = ptx::numbered_barrier<C::ROW_WARPS * WARP>;
    using Turn = ptx::numbered_barrier<2 * WARP>;
    using Both = ptx::numbered_barrier<C::ROW_WARPS * WARP + VALUE_THREADS>;

    // All score warps.
    static __device__ __forceinline__ void score_sync() { ptx::named_barrier<1, SCORE_THREADS>::sync(); }

    // The warps of a group.
    static __device__ __forceinline__ void group_sync(uint32_t group) {
        if constexpr (C::ROW_WARPS == 1) {
            __syncwarp();
        } else {
            Group::sync(2 + group);
        }
    }

    // The row warp before this group's has decided its peaks; so has this one, for the next.
    static __device__ __forceinline__ void turn_sync(uint32_t w, uint32_t group) { Turn::sync(4 + w * C::GROUPS + group); }
    static __device__ __forceinline__ void turn_arrive(uint32_t w, uint32_t group) {
        Turn::arrive(4 + w * C::GROUPS + (group + 1 == C::GROUPS ? 0 : group + 1));
    }

    // Weights, factors and, at the end of a piece, sums of a step (of the CTA, the group's) are written. Where the tile holds back, an mbarrier: at a
    // named one the value warps would wait for each other, and one that holds back would hold back all.
    static __device__ __forceinline__ uint32_t ready_at(uint32_t base, uint32_t group) { return base + C::READY + 8 * group; }
    static __device__ __forceinline__ void ready_sync(uint32_t base, uint32_t step) {
        const uint32_t group = step % C::GROUPS;
        if constexpr (C::HOLDS_BACK) {
            ptx::mbarrier_wait(ready_at(base, group), phase_of<C::GROUPS>(step));
        } else {
            Both::sync(8 + group);
        }
    }
    static __device__ __forceinline__ void ready_arrive(uint32_t base, uint32_t group) {
        if constexpr (C::HOLDS_BACK) {
            ptx::mbarrier_arrive(ready_at(base, group));
        } else {
            Both::arrive(8 + group);
        }
    }

    // The value warps have read them.
    static __device__ __forceinline__ void free_sync(uint32_t group) { Both::sync(12 + group); }
    static __device__ __forceinline__ void free_arrive(uint32_t group) { Both::arrive(12 + group); }
};

// Dynamic shared memory from byte `offset` on.
template <class T>
__device__ __forceinline__ T* shared_array(uint32_t offset) {
    return reinterpret_cast<T*>(shared_memory()) + offset / sizeof(T);
}

// Where a role is on the line, in shared memory; number: a count of the role's own; slot: partial slot of the value warps' piece. The walk
// would live in registers through all steps of a piece, and they are needed there: one thread of a role puts it down before a barrier, and
// all pick it up after the last step.
struct Mark {
    Walk walk;
    uint32_t number, slot;
};
static_assert(sizeof(Mark) <= MARK_BYTES, "has room");

// Value warps do not wait for each other: each has a place of its own. With a constant lane the compiler knows that all lanes have the same address:
// what is read there lies in uniform registers, which take none from the output.
template <class C>
__device__ __forceinline__ Mark* value_mark(uint32_t w) {
    return reinterpret_cast<Mark*>(shared_array<unsigned char>(C::MARKS + (1 + __shfl_sync(ALL_LANES, w, 0)) * MARK_BYTES));
}

}  // namespace mma
}  // namespace nvr
