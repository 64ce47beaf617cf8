// What a lane of a score warp holds of a step: scores, weights, and something a row.
#pragma once

#include "mma_work.cuh"

namespace nvr {
namespace mma {

// What a score warp works on: 16 x 8 tiles of scores, and how a lane's share of them is laid out.
template <class C>
struct ScoreShape : C {
    static constexpr int ROW_TILES = C::WARP_ROWS / 16, KEY_TILES = C::KEYS / 8;
    static constexpr int LANE_ROWS = 2 * ROW_TILES;               // row i: 8 i after the lane's first
    static constexpr int SEEN_WORDS = (C::KEYS + WARP - 1) / WARP;  // words of visibility bits of a row, for the keys of a step
};

// Four numbers a tile, one tile after the other.
template <class S>
using Scores = float[S::ROW_TILES * S::KEY_TILES * 4];
template <class S>
using Weights = uint32_t[S::ROW_TILES][S::KEY_TILES][2];
template <class S>
using RowFloats = float[S::LANE_ROWS];
template <class S>
using Seen = uint32_t[S::LANE_ROWS][S::SEEN_WORDS];

// Score of the lane's row i and its key e of 8-key tile n.
template <class S>
__device__ __forceinline__ float& score_at(Scores<S>& scores, int i, int n, int e) {
    return scores[(i / 2 * S::KEY_TILES + n) * 4 + 2 * (i % 2) + e];
}

}  // namespace mma
}  // namespace nvr
