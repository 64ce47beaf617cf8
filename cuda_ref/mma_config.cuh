// Configurations of the tensor-core kernel mma, and where its arrays lie in shared memory.
#pragma once

#include "ptx.cuh"
#include "work.cuh"

namespace nvr {

// ROWS query rows (draft token x head) meet KEYS keys a step; BLOCKS blocks of 16 keys in the ring. ROW_WARPS score warps side by side over
// the rows make a group; the groups take steps in turn, so that one multiplies while another is at its softmax.
template <int ROWS_, int KEYS_, int BLOCKS_, int ROW_WARPS_>
struct MmaTile {
    static constexpr int ROWS = ROWS_, KEYS = KEYS_, BLOCKS = BLOCKS_, ROW_WARPS = ROW_WARPS_;
    // The output of 64 rows takes 128 registers of each thread of the value warps: the other roles hand over theirs (setmaxnreg).
    static constexpr bool HANDS_OVER = ROWS == 64;
    // A value warp may wait with a step until the score warp that it shares tensor cores with is at its softmax. With fewer rows that costs more than
    // it gives (docs/facts.md).
    static constexpr bool HOLDS_BACK = ROWS == 64;
};

// In the order of nvr_mma_tile.
using MmaM64 = MmaTile<64, 32, 8, 2>;
using MmaM32 = MmaTile<32, 32, 9, 1>;
using MmaM32Medium = MmaTile<32, 32, 6, 1>;
using MmaM32Small = MmaTile<32, 16, 3, 2>;
using MmaM16 = MmaTile<16, 32, 11, 1>;
using MmaM16Medium = MmaTile<16, 32, 7, 1>;
using MmaM16Small = MmaTile<16, 16, 4, 1>;

// mma_m*.cu: the kernel, not what merges its partial results. Each tile in one file, so that several compilers can work.
template <class Tile>
int launch_mma_tile(const Device& device, const VerifyParams& params, void* stream);

namespace mma {

// Warps by role. Four score warps, so that every SM quarter has one; eight value warps hold 64 x 512 float32 of output in 128 registers a
// thread; four producer warps make a warpgroup, the unit in which registers are handed over.
constexpr int SCORE_WARPS = 4, VALUE_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int SCORE_THREADS = SCORE_WARPS * WARP, VALUE_THREADS = VALUE_WARPS * WARP, PRODUCER_THREADS = PRODUCER_WARPS * WARP;
constexpr int THREADS = SCORE_THREADS + VALUE_THREADS + PRODUCER_THREADS;

// Registers a thread by role, where they are handed over; with 512 threads their mean is 128. (The numba kernel has 160 for scores and values: with 160
// nvcc spills in the value warps, and of 168 it makes no fragments fetched ahead, which would be slower.)
constexpr int SCORE_REGISTERS = 144, VALUE_REGISTERS = 168, PRODUCER_REGISTERS = 32;
static_assert(SCORE_THREADS * SCORE_REGISTERS + VALUE_THREADS * VALUE_REGISTERS + PRODUCER_THREADS * PRODUCER_REGISTERS <= 65536,
              "an SM has 65536 registers");

// Keys of one block of the ring: the k extent of one mma, so a block is handed back after one step of P V.
constexpr int BLOCK_KEYS = 16;
// Bytes of the 128-byte swizzle: the 16-byte chunks of 128 bytes of a row change places by the row's number modulo 8, so that the 8 rows
// of an ldmatrix lie in 8 different bank groups.
constexpr uint32_t SEGMENT_BYTES = 128, CHUNK_BYTES = 16, ITEM_BYTES = 2;
// Of a Mark (mma_work.cuh), with room.
constexpr uint32_t MARK_BYTES = 32;
// Threads that fetch one KV or Q row together, one segment a step.
constexpr uint32_t THREADS_PER_ROW = SEGMENT_BYTES / CHUNK_BYTES;

// Byte offsets in dynamic shared memory. Q [ROWS][row], RING [BLOCKS][16][row] and WEIGHTS [GROUPS][ROWS][KEYS] are 16-bit and swizzled;
// PEAKS [ROWS], ALPHA, TOTALS, ROUNDED and REFERENCES [GROUPS][ROWS] are float32; FLAGS and POISON are one uint32 a score warp; of
// the MARKS one is the score warps', one each value warp's; FULL [FULL_BARRIERS], EMPTY [BLOCKS] and, where the tile holds back, READY [GROUPS] and
// SCORED [SCORED_STEPS][ROW_WARPS] are mbarriers. All are multiples of 16; Q and RING of 128, which the swizzle counts from.
template <class Tile, class RowDims>
struct Layout : Tile, RowDims {
    static constexpr int BLOCK_KEYS = mma::BLOCK_KEYS;
    static constexpr int GROUPS = SCORE_WARPS / Tile::ROW_WARPS, KEY_BLOCKS = Tile::KEYS / BLOCK_KEYS, WARP_ROWS = Tile::ROWS / Tile::ROW_WARPS;
    static constexpr uint32_t ROW_BYTES = RowDims::width * ITEM_BYTES, BLOCK_BYTES = BLOCK_KEYS * ROW_BYTES;
    static constexpr uint32_t SEGMENTS = ROW_BYTES / SEGMENT_BYTES;
    static constexpr uint32_t ROW_PITCH = ROW_BYTES, SEGMENT_PITCH = SEGMENT_BYTES;  // from row to row, from segment to segment
    static constexpr uint32_t GROUP_WEIGHT_BYTES = Tile::ROWS * Tile::KEYS * ITEM_BYTES;

    static constexpr uint32_t ROW_FLOATS = Tile::ROWS * 4, GROUP_FLOATS = GROUPS * ROW_FLOATS, WARP_WORDS = SCORE_WARPS * 4;
    // Barriers `full`: a ring of their own, long enough for a step of every group. A group that waits for the keys of its next step has waited
    // for none of the steps between. Were a barrier used again in one of those, the phase before it, complete since the group's last step
    // or longer, would have the parity that the group waits for.
    static constexpr int FULL_BARRIERS = Tile::BLOCKS > GROUPS * KEY_BLOCKS ? Tile::BLOCKS : GROUPS * KEY_BLOCKS;

    // Steps whose barriers `scored` are apart: a value warp that waits for a step keeps the one before, or that step itself, in the ring, so that
    // its barrier cannot be used once more meanwhile. Nor can it have been used for a phase that this one would be mistaken for: a step is ready only
    // when all before it are scored.
    static constexpr int SCORED_STEPS = Tile::HOLDS_BACK ? Tile::BLOCKS / KEY_BLOCKS : 0;
    static_assert(!Tile::HOLDS_BACK || SCORED_STEPS >= 2, "a step that is held back and the next, which it waits for");

    static constexpr uint32_t mbarrier_bytes(int count) { return (8 * count + 15) / 16 * 16; }
    static constexpr uint32_t Q = 0;
    static constexpr uint32_t RING = Q + Tile::ROWS * ROW_BYTES;
    static constexpr uint32_t WEIGHTS = RING + Tile::BLOCKS * BLOCK_BYTES;
    static constexpr uint32_t PEAKS = WEIGHTS + GROUPS * GROUP_WEIGHT_BYTES;
    static constexpr uint32_t ALPHA = PEAKS + ROW_FLOATS;
    static constexpr uint32_t TOTALS = ALPHA + GROUP_FLOATS;
    static constexpr uint32_t ROUNDED = TOTALS + GROUP_FLOATS;
    static constexpr uint32_t REFERENCES = ROUNDED + GROUP_FLOATS;
    static constexpr uint32_t FLAGS = REFERENCES + GROUP_FLOATS;
    static constexpr uint32_t POISON = FLAGS + WARP_WORDS;
    static constexpr uint32_t MARKS = POISON + WARP_WORDS;
    static constexpr uint32_t FULL = MARKS + (1 + VALUE_WARPS) * MARK_BYTES;
    static constexpr uint32_t EMPTY = FULL + mbarrier_bytes(FULL_BARRIERS);
    static constexpr uint32_t READY = EMPTY + mbarrier_bytes(Tile::BLOCKS);
    static constexpr uint32_t SCORED = READY + mbarrier_bytes(Tile::HOLDS_BACK ? GROUPS : 0);
    static constexpr uint32_t END = SCORED + mbarrier_bytes(SCORED_STEPS * Tile::ROW_WARPS);
};

// All that the roles are compiled for.
template <class Element_, class Tile, class RowDims>
struct Config : Layout<Tile, RowDims> {
    using Element = Element_;
};

template <class Element>
struct TensorCore;

template <>
struct TensorCore<Bf16> {
    static constexpr uint32_t EXPONENT = 0x7f80;  // all ones: not finite
    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        ptx::mma_m16n8k16_bf16(c, a, b0, b1);
    }
    static __device__ __forceinline__ uint32_t pack(float high, float low) { return ptx::f32_to_bf16x2(high, low); }
};

template <>
struct TensorCore<Fp16> {
    static constexpr uint32_t EXPONENT = 0x7c00;
    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        ptx::mma_m16n8k16_f16(c, a, b0, b1);
    }
    static __device__ __forceinline__ uint32_t pack(float high, float low) { return ptx::f32_to_f16x2(high, low); }
};

}  // namespace mma
}  // namespace nvr
