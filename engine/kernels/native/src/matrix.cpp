#include "matrix.h"

#include <algorithm>

#include "rows.h"

int64_t bytes_of(const SwitchyardMatrix &matrix) {
    if (matrix.format == SWITCHYARD_BF16) return matrix.rows * matrix.columns * 2;
    const int64_t tiles = blocks_of(matrix) * groups_of(matrix.columns);
    const Format &format = kFormats[matrix.format];
    return tiles * (2 * format.half_bytes() + kTileRows * (format.has_zeros ? 3 : 2));
}

void Vectors::resize(int32_t format, int64_t count, int64_t n) {
    format_ = format;
    n_ = n;
    const int64_t groups = groups_of(n);
    const int64_t bytes = format == SWITCHYARD_BF16 ? padded(n) * 4 : groups * (kGroup + 4 + 4);
    stride_ = (bytes + 63) & ~int64_t{63};
    const auto needed = static_cast<size_t>(count * stride_ + 64);
    if (memory_.size() < needed) memory_.resize(needed);
    start_ = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
}

QuantisedVector Vectors::quantised(int64_t at) const {
    uint8_t *start = start_ + at * stride_;
    const int64_t groups = groups_of(n_);
    auto *scales = reinterpret_cast<float *>(start + groups * kGroup);
    return {reinterpret_cast<int8_t *>(start), scales, reinterpret_cast<int32_t *>(scales + groups)};
}

void Vectors::set(const Kernels &kernels, int64_t at, const uint16_t *x) {
    if (format_ == SWITCHYARD_BF16)
        kernels.rows->spread(x, n_, const_cast<float *>(spread(at)));
    else
        kernels.tiles[format_]->quantise_bf16(x, n_, quantised(at));
}

void Vectors::set(const Kernels &kernels, int64_t at, const float *x) {
    if (format_ == SWITCHYARD_BF16)
        kernels.rows->spread_floats(x, n_, const_cast<float *>(spread(at)));
    else
        kernels.tiles[format_]->quantise_floats(x, n_, quantised(at));
}

namespace {

void bf16_block(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
                const int32_t *which, int64_t count, float *out) {
    const RowOrder order(matrix);
    const auto *weights = static_cast<const uint16_t *>(matrix.weights);
    for (int64_t i = 0; i < kHalfRows; ++i) {
        const int64_t row = block * order.block + i * order.step;
        if (row >= order.first_limit) break;
        const int64_t other = row + order.partner < matrix.rows ? row + order.partner : row;
        for (int64_t v = 0; v < count; ++v)
            kernels.rows->dot_pair(weights + row * matrix.columns, weights + other * matrix.columns, x.spread(which[v]),
                                   matrix.columns, &out[v * kTileRows + i], &out[v * kTileRows + kHalfRows + i]);
    }
}

}  // namespace

void block_dot(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t block, const Vectors &x,
               const int32_t *which, int64_t count, float *out) {
    if (matrix.format == SWITCHYARD_BF16) {
        bf16_block(kernels, matrix, block, x, which, count, out);
        return;
    }
    const TileRow row = tile_row(matrix, block);
    const TileKernels &tiles = *kernels.tiles[matrix.format];
    if (count == 1) {  // decoding: the memory waits for whatever is done between blocks
        const QuantisedVector vector = x.quantised(*which);
        return tiles.formats[matrix.format].dot(row, &vector, 1, out);
    }
    const int64_t parts = (count + tiles.most - 1) / tiles.most;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
        QuantisedVector vectors[kMostVectors];
        for (int64_t v = begin; v < end; ++v) vectors[v - begin] = x.quantised(which[v]);
        tiles.formats[matrix.format].dot(row, vectors, static_cast<int>(end - begin), out + begin * kTileRows);
    }
}
