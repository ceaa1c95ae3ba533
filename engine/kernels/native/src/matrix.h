// A product of a matrix with vectors, in blocks of 32 rows, whatever the format.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "kernel_set.h"
#include "row_kernels.h"
#include "switchyard_kernels.h"

// Where the rows of a block lie in a matrix that is stored row by row: the i-th of the upper half is
// begin(block) + i * step, and that of the lower half `partner` rows further on.
struct RowOrder {
    int64_t block, step, partner;
    int64_t first_limit;  // rows of upper halves lie below this

    explicit RowOrder(const SwitchyardMatrix &matrix) : RowOrder(matrix.pairing, matrix.rows) {}
    RowOrder(int32_t pairing, int64_t rows)
        : block(pairing == SWITCHYARD_HALVES ? kHalfRows : kTileRows),
          step(pairing == SWITCHYARD_ALTERNATING ? 2 : 1),
          partner(pairing == SWITCHYARD_PLAIN ? kHalfRows : pairing == SWITCHYARD_HALVES ? rows / 2 : 1),
          first_limit(pairing == SWITCHYARD_HALVES ? rows / 2 : rows) {}
};

inline int64_t blocks_of(const SwitchyardMatrix &matrix) { return (matrix.rows + kTileRows - 1) / kTileRows; }
inline int64_t groups_of(int64_t columns) { return (columns + kGroup - 1) / kGroup; }
inline TileRow tile_row(const SwitchyardMatrix &matrix, int64_t block) {
    const int64_t groups = groups_of(matrix.columns);
    const auto *weights = static_cast<const uint8_t *>(matrix.weights);
    return {weights + block * groups * 2 * kFormats[matrix.format].half_bytes(),
            matrix.scales + block * groups * kTileRows,
            matrix.zeros ? matrix.zeros + block * groups * kTileRows : nullptr, matrix.table, groups};
}
// Row of a matrix stored row by row that the i-th row of a block's half is, or -1 beyond it.
inline int64_t source_row(const SwitchyardMatrix &matrix, int64_t block, int64_t half, int64_t i) {
    const RowOrder order(matrix);
    const int64_t first = block * order.block + i * order.step;
    const int64_t row = first + half * order.partner;
    return first < order.first_limit && row < matrix.rows ? row : -1;
}

// A block of a matrix.
struct BlockAt {
    SwitchyardMatrix matrix;
    int64_t block;
};

// Bytes of a matrix's weights, scales and zeros.
int64_t bytes_of(const SwitchyardMatrix &matrix);

// A row of numbers or of blocks, and its type.
struct StoredRow {
    const uint8_t *blocks;
    const RowType *type;
};
StoredRow stored_row(const RowKernels &types, const SwitchyardMatrix &matrix, int64_t row);

// Vectors in the form that the kernels of a format read.
class Vectors {
  public:
    // For products with all of these matrices.
    void resize(std::initializer_list<const SwitchyardMatrix *> matrices, int64_t count, int64_t n);
    void set(const Kernels &kernels, int64_t at, const uint16_t *x);
    void set(const Kernels &kernels, int64_t at, const float *x);
    const float *spread(int64_t at) const { return reinterpret_cast<const float *>(form(at, VectorForm::kSpread)); }
    QuantisedVector quantised(int64_t at) const;
    RowVector row(int64_t at, VectorForm form) const;
    // Whether 8 bits with a scale per 256 values lose what lies beside a huge one, as a text's first token has it: then what
    // was lost is a vector of its own, and both are multiplied.
    bool has_rest(int64_t at) const { return has(VectorForm::kBy256) && !rests_[static_cast<size_t>(at)].empty(); }
    RowVector rest(int64_t at) const { return by_256(rests_[static_cast<size_t>(at)].data()); }

  private:
    bool has(VectorForm form) const { return places_[static_cast<int>(form)] >= 0; }
    uint8_t *form(int64_t at, VectorForm form) const { return start_ + at * stride_ + places_[static_cast<int>(form)]; }

    void pad(int64_t at);
    void set_rows(const Kernels &kernels, int64_t at, const float *x);
    RowVector by_256(const uint8_t *start) const;

    int32_t tiled_ = SWITCHYARD_INT8;  // the format whose kernels round: of tiles, if there are any
    int64_t n_ = 0, stride_ = 0;
    int64_t places_[kForms] = {-1, -1, -1, -1};  // of each form in a vector's memory, or -1
    std::vector<uint8_t> memory_;
    uint8_t *start_ = nullptr;
    std::vector<std::vector<uint8_t>> rests_;  // of each vector; empty for nearly all
};

// Rows of `block` times vectors which[0], which[1], ...: out [count, 32], gate or upper rows first.  What lies beyond
// the matrix's last row is not defined.  What comes `next`, in this matrix unless said otherwise, is fetched where rows are joined.
void block_dot(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
               const int32_t *which, int64_t count, float *out, const BlockAt *next = nullptr);
