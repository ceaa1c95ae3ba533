// Vectors of many rows, and their products with blocks of matrices, by the kernels for many vectors if those support the
// format: then a product does not depend on how many vectors there are.
#pragma once
#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "matrix.h"
#include "many_rows.h"

class RowProducts {
  public:
    // For products with all of these matrices, which are of one format.
    void resize(const Kernels &kernels, std::initializer_list<const SwitchyardMatrix *> matrices, int64_t count) {
        const int64_t columns = (*matrices.begin())->columns;
        kernels_ = kernels;
        format_ = (*matrices.begin())->format;
        count_ = count;
        columns_ = columns;
        many_ = many_for(kernels, matrices).kernels;
        if (many_) {
            lanes_ = many_->lanes;
            packed_ = memory_.room(tiles() * many_->packed_bytes(format_, columns));
            return;
        }
        lanes_ = 1;
        vectors_.resize(matrices, count, columns);
        const auto known = static_cast<int64_t>(one_by_one_.size());
        for (int64_t v = known; v < count; ++v) one_by_one_.push_back(static_cast<int32_t>(v));
    }

    // Vectors are set in tiles of this many, by any thread.
    int64_t lanes() const { return lanes_; }
    int64_t tiles() const { return (count_ + lanes_ - 1) / lanes_; }
    // Sets the vectors of a tile; x: all of them, [count, columns].
    void set(int64_t tile, const uint16_t *x) {
        const int64_t first = tile * lanes_;
        if (many_) {
            const uint16_t *rows[64];
            const int64_t some = std::min(lanes_, count_ - first);
            for (int64_t v = 0; v < some; ++v) rows[v] = x + (first + v) * columns_;
            many_->pack(format_, rows, some, columns_, packed_ + tile * many_->packed_bytes(format_, columns_));
            return;
        }
        vectors_.set(kernels_, first, x + first * columns_);
    }

    // Calls take(first, some, dots) with [some, 32] of a block's rows with vectors first, first + 1, ...
    template <class Take> void block(const SwitchyardMatrix &matrix, int64_t block, Take take) const {
        if (many_) {
            const BlockAt next = {matrix, block + 1};
            multiply_block(*many_, matrix, block, packed_, count_, next.block < blocks_of(matrix) ? &next : nullptr, take);
            return;
        }
        static thread_local std::vector<float> dots;
        dots.resize(static_cast<size_t>(count_ * kTileRows));
        block_dot(kernels_, matrix, block, vectors_, one_by_one_.data(), count_, dots.data());
        take(int64_t{0}, count_, dots.data());
    }

  private:
    Kernels kernels_ = {};
    const ManyKernels *many_ = nullptr;
    int32_t format_ = 0;
    int64_t count_ = 0, columns_ = 0, lanes_ = 1;
    Vectors vectors_;
    std::vector<int32_t> one_by_one_;
    AlignedMemory memory_;
    uint8_t *packed_ = nullptr;
};
