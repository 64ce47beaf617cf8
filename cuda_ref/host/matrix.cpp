// ldmatrix and mma: the last of the 32 lanes works for all of them, on operands and results in the lanes' own frames.
#include "block.h"
#include "ptx_on_cpu.h"

namespace nvr {
namespace host {

namespace {

constexpr int MATRICES = 4, SIDE = 8;  // of ldmatrix, of 16-bit elements
constexpr int ROWS = 16, COLUMNS = 8, DEPTH = 16;  // of mma

struct LdmatrixOperands {
    const unsigned char* row;
    uint32_t* result;
};

struct MmaOperands {
    const uint32_t* a;
    uint32_t b[2];
    float* c;
};

// Two columns of B or of the result, side by side in a register of any x86-64.
typedef double Pair __attribute__((vector_size(2 * sizeof(double))));

// What the lanes of the running warp brought.
template <class Operands>
class Lanes {
  public:
    Operands& operator[](int lane) const { return *static_cast<Operands*>(all_[lane]); }

  private:
    void* const* all_ = own_warp().operands;  // read once: the warp is a lookup in thread-local storage away
};

// Which register holds which element: the table at mma in ptx.cuh.
template <float (*to_float)(uint16_t)>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* instruction) {
    MmaOperands mine = {a, {b0, b1}, c};
    if (!meet(instruction, &mine)) return;
    const Lanes<MmaOperands> lanes;
    double left[ROWS][DEPTH];
    Pair right[COLUMNS / 2][DEPTH];
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        const MmaOperands& operands = lanes[lane];
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) {
                left[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = to_float(static_cast<uint16_t>(operands.a[i] >> 16 * half));
            }
            for (int i = 0; i < 2; ++i) right[g / 2][2 * t + i * 8 + half][g % 2] = to_float(static_cast<uint16_t>(operands.b[i] >> 16 * half));
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int column = 0; column < COLUMNS; column += 2) {
            Pair sum = {};
            for (int k = 0; k < DEPTH; ++k) sum += left[row][k] * right[column / 2][k];
            float* c = lanes[row % 8 * 4 + column / 2].c + row / 8 * 2;
            for (int i = 0; i < 2; ++i) c[i] = static_cast<float>(c[i] + sum[i]);
        }
    }
    release();
}

}  // namespace

void ldmatrix(uint32_t (&result)[4], uint32_t address, bool transposed) {
    const char* instruction = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
    LdmatrixOperands mine = {shared_at(address, SIDE * sizeof(uint16_t), instruction), result};
    if (!meet(instruction, &mine)) return;
    const Lanes<LdmatrixOperands> lanes;
    uint16_t matrices[MATRICES][SIDE][SIDE];
    for (int lane = 0; lane < WARP_LANES; ++lane) memcpy(matrices[lane / SIDE][lane % SIDE], lanes[lane].row, sizeof matrices[0][0]);
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        const int outer = lane / 4, inner = 2 * (lane % 4);
        for (int m = 0; m < MATRICES; ++m) {
            const uint32_t low = transposed ? matrices[m][inner][outer] : matrices[m][outer][inner];
            const uint32_t high = transposed ? matrices[m][inner + 1][outer] : matrices[m][outer][inner + 1];
            lanes[lane].result[m] = high << 16 | low;
        }
    }
    release();
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma<bf16_to_float>(c, a, b0, b1, "mma_m16n8k16_bf16"); }
void mma_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma<fp16_to_float>(c, a, b0, b1, "mma_m16n8k16_f16"); }

}  // namespace host
}  // namespace nvr
