// Configurations of the Hopper kernel wgmma, and where its arrays lie in shared memory.
#pragma once

#include "mma_config.cuh"
#include "wgmma_ptx.cuh"

namespace nvr {

// 64 query rows (draft token x head) meet KEYS keys a step; SLOTS slots of KEYS KV rows in the ring. Q_SEGMENTS: segments (64 dims) of Q that the
// score warps keep in registers, 16 a thread each; the others lie in shared memory. *_REGISTERS: a thread's, by role (setmaxnreg). DELAYED: value
// warpgroups that begin a step only when the next one has been scored (if its keys are there), so that the tensor cores have work while its softmax
// is made.
template <int KEYS_, int SLOTS_, int Q_SEGMENTS_, int SCORE_REGISTERS_, int VALUE_REGISTERS_, int PRODUCER_REGISTERS_, int DELAYED_ = 0>
struct WgmmaTile {
    static constexpr int ROWS = 64;  // the m extent of wgmma
    static constexpr int KEYS = KEYS_, SLOTS = SLOTS_, Q_SEGMENTS = Q_SEGMENTS_, DELAYED = DELAYED_;
    static constexpr int SCORE_REGISTERS = SCORE_REGISTERS_, VALUE_REGISTERS = VALUE_REGISTERS_, PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    // Slots that Q passes through on its way.
    static constexpr int Q_SLOTS = (ROWS + KEYS - 1) / KEYS;
};

// The tiles, in the order in which the default looks for one that fits. At 512/64 the first takes 211840 of the 232448 B that a block may have.
// Registers: 128 of a value thread's are O, and ptxas keeps 24 below the operands of wgmma; 6 segments of Q take 96 of a score thread's.
#ifndef NVR_WGMMA_TILES  // tests, and who looks for a faster one, compile others
#define NVR_WGMMA_TILES WgmmaTile<48, 3, 6, 168, 160, 24, 2>
#endif
using WgmmaTiles = TypeList<NVR_WGMMA_TILES>;

// wgmma_*.cu: the kernel with any tile, not what merges its partial results. Each element type in one file, so that several compilers can work.
template <class Element>
int launch_wgmma_of(const Device& device, const VerifyParams& params, void* stream);

namespace wgmma {

// What mma has and wgmma takes as it is; where both have one of a name, this is wgmma's.
using namespace mma;

// Warpgroups by role: one scores, two share the columns of the output, 64 x 512 float32 in 128 registers a thread; one fetches.
constexpr int WARPGROUP = 4 * WARP, VALUE_GROUPS = 2;
constexpr int THREADS = (1 + VALUE_GROUPS + 1) * WARPGROUP;
constexpr int SCORE_WARPS = WARPGROUP / WARP, VALUE_WARPS = VALUE_GROUPS * WARPGROUP / WARP;
// Registers a thread that the kernel is launched with.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS;
// k steps of 16 dims, one wgmma each, in a segment of 128 bytes.
constexpr int SEGMENT_STEPS = SEGMENT_BYTES / (16 * ITEM_BYTES);
// Dims of a segment.
constexpr int SEGMENT_DIMS = SEGMENT_BYTES / ITEM_BYTES;
// Places for the sums that end a piece, taken in turn; see Layout.
constexpr int SUM_PLACES = 2;
// Where the 128-byte swizzle's pattern repeats: 8 rows of 128 bytes.
constexpr uint32_t PATTERN_BYTES = 1024;

// Byte offsets in dynamic shared memory. RING [SLOTS][SEGMENTS][KEYS][64] and Q [SEGMENTS - Q_SEGMENTS][64][64] are 16-bit, swizzled by 128 bytes;
// ALPHA [SLOTS][64] and TOTALS, ROUNDED and REFERENCES [SUM_PLACES][64] float32; FLAGS [SLOTS][4] and POISON [4] one uint32 a score warp; MARKS one
// a score warp, then one a value warp; FULL, EMPTY, READY and SCORED [SLOTS] mbarriers; WEIGHTS [SLOTS][64][KEYS] 16-bit, where there is room (see
// WEIGHTS_APART). All are multiples of 16; RING and Q of 1024, which the swizzle counts from.
template <class Tile, class RowDims>
struct Layout : Tile, RowDims {
    static_assert(Tile::KEYS == 32 || Tile::KEYS == 48 || Tile::KEYS == 64, "keys of a step");
    // The sums of a piece stay until the value warps have read them, and only then give back the slot of the piece's last step. Two pieces on, at
    // the earliest, the same place is written: by then at least this many slots have come and gone.
    static_assert(2 <= Tile::SLOTS && Tile::SLOTS <= SUM_PLACES * (Tile::Q_SLOTS + 1), "sums must not be written before they are read");
    static_assert(Tile::Q_SEGMENTS >= 1, "the first product, which begins the sums, is one of Q in registers");
    static_assert(0 <= Tile::DELAYED && Tile::DELAYED <= VALUE_GROUPS, "value warpgroups that wait");
    static_assert(Tile::SCORE_REGISTERS + VALUE_GROUPS * Tile::VALUE_REGISTERS + Tile::PRODUCER_REGISTERS <= 65536 / WARPGROUP,
                  "an SM has 65536 registers");

    // A slot is a block of the ring, fetched and given back at once. All score warps are one group and share no row.
    static constexpr int BLOCK_KEYS = Tile::KEYS, BLOCKS = Tile::SLOTS, FULL_BARRIERS = Tile::SLOTS;
    static constexpr int GROUPS = 1, ROW_WARPS = SCORE_WARPS, WARP_ROWS = Tile::ROWS / ROW_WARPS;
    static constexpr uint32_t ROW_BYTES = RowDims::width * ITEM_BYTES, BLOCK_BYTES = BLOCK_KEYS * ROW_BYTES;
    static constexpr int SEGMENTS = ROW_BYTES / SEGMENT_BYTES;
    // Segment after segment, each with 128 bytes of every row: one copy is K-major for Q K^T and, read along the other dimension, MN-major for P V.
    static constexpr uint32_t ROW_PITCH = SEGMENT_BYTES, SEGMENT_PITCH = Tile::KEYS * SEGMENT_BYTES;
    // Segments of Q in registers.
    static constexpr int HELD = Tile::Q_SEGMENTS < SEGMENTS ? Tile::Q_SEGMENTS : SEGMENTS;

    static constexpr uint32_t round_up(uint32_t bytes) { return (bytes + 15) / 16 * 16; }
    static constexpr uint32_t SUM_BYTES = SUM_PLACES * Tile::ROWS * 4, BARRIER_BYTES = round_up(8 * Tile::SLOTS);
    static constexpr uint32_t RING = 0;
    static constexpr uint32_t Q = RING + Tile::SLOTS * BLOCK_BYTES;
    static constexpr uint32_t ALPHA = Q + (SEGMENTS - HELD) * Tile::ROWS * SEGMENT_BYTES;
    static constexpr uint32_t TOTALS = ALPHA + Tile::SLOTS * Tile::ROWS * 4;
    static constexpr uint32_t ROUNDED = TOTALS + SUM_BYTES;
    static constexpr uint32_t REFERENCES = ROUNDED + SUM_BYTES;
    static constexpr uint32_t FLAGS = REFERENCES + SUM_BYTES;
    static constexpr uint32_t POISON = FLAGS + Tile::SLOTS * SCORE_WARPS * 4;
    static constexpr uint32_t MARKS = POISON + SCORE_WARPS * 4;
    static constexpr uint32_t FULL = MARKS + (SCORE_WARPS + VALUE_WARPS) * MARK_BYTES;
    static constexpr uint32_t EMPTY = FULL + BARRIER_BYTES;
    static constexpr uint32_t READY = EMPTY + BARRIER_BYTES;
    static constexpr uint32_t SCORED = READY + BARRIER_BYTES;
    // A warp writes 128 bytes of weights at once.
    static constexpr uint32_t OWN_WEIGHTS = (SCORED + BARRIER_BYTES + SEGMENT_BYTES - 1) / SEGMENT_BYTES * SEGMENT_BYTES;
    static constexpr uint32_t SLOT_WEIGHTS = Tile::ROWS * Tile::KEYS * ITEM_BYTES;
    // Whether weights have a place of their own: where they fit into a block of a Hopper GPU, or there is no other. Else they take that of their
    // slot's last segment, which no value is made of, and score warps have to wait for each other before they write there: it holds keys.
    static constexpr bool WEIGHTS_APART = RowDims::width == RowDims::latent || OWN_WEIGHTS + Tile::SLOTS * SLOT_WEIGHTS <= 232448;
    // Of slot 0, and from slot to slot.
    static constexpr uint32_t WEIGHTS = WEIGHTS_APART ? OWN_WEIGHTS : RING + (SEGMENTS - 1) * SEGMENT_PITCH;
    static constexpr uint32_t WEIGHTS_PITCH = WEIGHTS_APART ? SLOT_WEIGHTS : BLOCK_BYTES;
    static constexpr uint32_t END = OWN_WEIGHTS + (WEIGHTS_APART ? Tile::SLOTS * SLOT_WEIGHTS : 0);
    static_assert(SEGMENT_PITCH % PATTERN_BYTES == 0 && Q % PATTERN_BYTES == 0 && SLOT_WEIGHTS <= SEGMENT_PITCH, "the swizzle counts from there");
};

// All that the roles are compiled for.
template <class Element_, class Tile, class RowDims>
struct Config : Layout<Tile, RowDims> {
    using Element = Element_;
};

}  // namespace wgmma
}  // namespace nvr
