// The mask of mma and wgmma: which scores of a step are hidden, and what is done about NaN in draft rows that only some rows see. All of it only for
// steps that hold draft tokens or the end of the list.
#pragma once

#include "mma_scores.cuh"

namespace nvr {
namespace mma {

// Bit i set = the row with these visibility words sees key `key` + i, for KEYS keys, at most 32.
template <int KEYS>
__device__ __forceinline__ uint32_t row_bits(const uint32_t* visibility, uint32_t words, uint32_t key, uint32_t prefix, uint32_t kv_len) {
    uint32_t seen = 0;
    if (key + KEYS <= prefix) {
        seen = ~0u;
    } else if (key < kv_len) {
        if (key < prefix) {
            const uint32_t count = prefix - key;  // of the prefix, below 32: the rest follows from draft token 0 on
            seen = ((1u << count) - 1) | (words > 0 ? visibility[0] : 0) << count;
        } else {
            const uint32_t draft = key - prefix, index = draft / WARP, turn = draft % WARP;
            seen = (index < words ? visibility[index] : 0) >> turn;
            if (turn != 0) seen |= (index + 1 < words ? visibility[index + 1] : 0) << (WARP - turn);
        }
        const uint32_t left = kv_len - key;
        if (left < WARP) seen &= (1u << left) - 1;
    }
    return seen;
}

// seen[i]: bits of the lane's row i, bit 8 n + e = its key e of 8-key tile n, 32 keys a word. key: first of the step; flat: the lane's first row
// in the request.
template <class S>
__device__ __forceinline__ void look(const Plan& plan, const Request& request, uint32_t key, uint32_t flat, uint32_t lane, Seen<S>& seen) {
    constexpr int WIDTH = S::KEYS < WARP ? S::KEYS : WARP;
    const uint32_t prefix = static_cast<uint32_t>(request.prefix), kv_len = static_cast<uint32_t>(request.kv_len);
    const uint32_t last = static_cast<uint32_t>(request.q_len) - 1;  // draft token
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
        const uint32_t row_token = (flat + 8 * i) / plan.row_heads, token = row_token < last ? row_token : last;
        const uint32_t* visibility = plan.workspace.visibility + (request.q_begin + token) * plan.words;
#pragma unroll
        for (int s = 0; s < S::SEEN_WORDS; ++s) {
            seen[i][s] = row_bits<WIDTH>(visibility, plan.words, key + s * WARP, prefix, kv_len) >> 2 * (lane % 4);
        }
    }
}

template <class S>
__device__ __forceinline__ bool is_seen(const Seen<S>& seen, int i, int n, int e) {
    return seen[i][n / 4] >> (8 * (n % 4) + e) & 1;
}

// Whether a score that this lane hides is not finite.
template <class S>
__device__ __forceinline__ bool is_poisoned(Scores<S>& scores, const Seen<S>& seen) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = score_at<S>(scores, i, n, e);
                if (!is_seen<S>(seen, i, n, e) && x - x != 0.0f) found = true;
            }
        }
    }
    return found;
}

// The largest power of two that is not above `most`.
__host__ __device__ constexpr uint32_t floor_power_of_two(uint32_t most) { return most < 2 ? 1 : 2 * floor_power_of_two(most / 2); }

// Values of the step's draft keys that hold a NaN or an infinity become zeros. Rare, so it takes its time.
// member: thread of the group; number: running number of the step's first block; key0: the step's first key.
template <class S>
__device__ __forceinline__ void zero_poisoned(uint32_t member, uint32_t number, uint32_t key0, uint32_t prefix) {
    // A power of two of threads a key, so that a warp has all of them; with 48 keys a quarter of the group is idle.
    constexpr uint32_t THREADS = WARP * S::ROW_WARPS, THREADS_A_KEY = floor_power_of_two(THREADS / S::KEYS);
    constexpr uint32_t LOW = TensorCore<typename S::Element>::EXPONENT, HIGH = LOW << 16;
    constexpr uint32_t CHUNKS = S::ROW_BYTES / CHUNK_BYTES, VALUE_CHUNKS = S::latent * ITEM_BYTES / CHUNK_BYTES;
    const uint32_t key = member / THREADS_A_KEY, part = member % THREADS_A_KEY, row = key % S::BLOCK_KEYS;
    const uint32_t start = S::RING + block_offset<S>(number + key / S::BLOCK_KEYS);
    const bool idle = THREADS_A_KEY * S::KEYS < THREADS && key >= S::KEYS;
    bool bad = false;
#pragma unroll 1
    for (uint32_t c = idle ? CHUNKS : part; c < CHUNKS; c += THREADS_A_KEY) {
        const uint32_t* words = shared_array<uint32_t>(start + row_offset<S>(row, c));
        for (int i = 0; i < 4; ++i) bad |= (words[i] & LOW) == LOW || (words[i] & HIGH) == HIGH;
    }
    // The threads of a key are neighbours.
    const uint32_t mates = ((1u << THREADS_A_KEY) - 1) << (member % WARP - part);
    bad = (__ballot_sync(ALL_LANES, bad) & mates) != 0;
    if (!bad || key0 + key < prefix) return;
#pragma unroll 1
    for (uint32_t c = part; c < VALUE_CHUNKS; c += THREADS_A_KEY) {
        uint32_t* words = shared_array<uint32_t>(start + row_offset<S>(row, c));
        for (int i = 0; i < 4; ++i) words[i] = 0;
    }
}

// Hidden scores become what the factor will make -inf of; returns the factor. Scores are not scaled here: float32 numbers of 1e5 are 0.008 apart,
// and the later fma rounds once.
template <class S>
__device__ __forceinline__ float hide(Scores<S>& scores, const Seen<S>& seen, float factor) {
    const bool done = factor == 0.0f;  // 0 times infinity is NaN
    const float hidden = factor < 0.0f ? INFINITY : -INFINITY;
#pragma unroll
    for (int i = 0; i < S::LANE_ROWS; ++i) {
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = score_at<S>(scores, i, n, e);
                x = is_seen<S>(seen, i, n, e) ? (done ? x * factor : x) : hidden;
            }
        }
    }
    return done ? 1.0f : factor;
}

}  // namespace mma
}  // namespace nvr
