// Vectors in packed tiles, and products of a block of rows with any number of them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel_set.h"
#include "many_kernels.h"
#include "matrix.h"

// Memory aligned to cache lines that is kept between calls and grows; its contents are lost when it does.
class AlignedMemory {
  public:
    uint8_t *room(int64_t bytes) {
        const auto needed = static_cast<size_t>(bytes) + 64;
        if (memory_.size() < needed) {
            memory_ = {};  // frees the old one first
            memory_.resize(needed);
        }
        return memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
    }
    // Frees the memory if it is larger than this.
    void shrink(size_t most) {
        if (memory_.size() > most) memory_ = {};
    }

  private:
    std::vector<uint8_t> memory_;
};

// Multiplies a block of 32 rows with `count` packed vectors; `take(first, some, dots)` gets [some, 32] at a time, small
// enough to stay in the cache.  `next`, a block of a matrix as wide, is fetched meanwhile; or it is null.
template <class Take>
void multiply_block(const ManyKernels &many, const SwitchyardMatrix &matrix, int64_t block, const uint8_t *x,
                    int64_t count, const BlockAt *next, Take take) {
    static thread_local AlignedMemory room, sums;
    const int64_t tiles = (count + many.lanes - 1) / many.lanes;
    const int64_t at_once = std::min<int64_t>(tiles, 96 / many.lanes);
    Panel panel = many.prepare(matrix, block, count, room.room(many.panel_bytes(matrix.format, matrix.columns)));
    if (next && matrix.format == SWITCHYARD_BF16) {
        const RowOrder order(next->matrix);
        const int64_t row = matrix.columns * 2, other = order.step == 1 ? order.partner : kHalfRows;
        panel.next_upper = static_cast<const uint8_t *>(next->matrix.weights) + next->block * order.block * row;
        panel.next_lower = panel.next_upper + other * row;
    }
    auto *dots = reinterpret_cast<float *>(sums.room(at_once * many.lanes * kTileRows * 4));
    const int64_t tile_bytes = many.packed_bytes(matrix.format, matrix.columns);
    for (int64_t tile = 0; tile < tiles; tile += at_once) {
        const int64_t first = tile * many.lanes, some = std::min(at_once * many.lanes, count - first);
        many.multiply(matrix.format, matrix.columns, panel, x + tile * tile_bytes, some, dots);
        take(first, some, dots);
    }
}
