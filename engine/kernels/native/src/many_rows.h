// Vectors in packed tiles, and products of a block of rows with any number of them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
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

inline int32_t kind_of(const SwitchyardMatrix &matrix) {
    const auto of = [](int32_t type) {
        return type == kBf16Type ? SWITCHYARD_BF16 : type == kF32Type || type == kF16Type ? kExact : SWITCHYARD_BLOCKS;
    };
    if (matrix.format != SWITCHYARD_BLOCKS) return matrix.format;
    const int32_t kind = of(matrix.type), second = matrix.second ? of(matrix.second_type) : kind;
    return kind == second ? kind : kind == SWITCHYARD_BLOCKS || second == SWITCHYARD_BLOCKS ? SWITCHYARD_BLOCKS : kExact;
}

// Kernels that multiply all of these matrices with many vectors, and from how many on; none where those for few vectors take
// many, too, a panel of rows at a time.
struct ManyChoice {
    const ManyKernels *kernels = nullptr;
    int64_t fewest = 0;
};
inline ManyChoice many_for(const Kernels &kernels, std::initializer_list<const SwitchyardMatrix *> matrices) {
    const auto supports = [&](const ManyKernels &many) {
        ManyChoice choice = {&many, 1};
        for (const SwitchyardMatrix *matrix : matrices) {
            const int64_t fewest = many.fewest[kind_of(*matrix)];
            if (fewest == 0) return ManyChoice{};
            choice.fewest = std::max(choice.fewest, fewest);
        }
        return choice;
    };
    for (const SwitchyardMatrix *matrix : matrices) {
        const int32_t kind = kind_of(*matrix);
        const ManyChoice choice = supports(kind == kExact ? *kernels.exact : *kernels.many[kind]);
        if (choice.kernels) return choice;
    }
    return {};
}

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
