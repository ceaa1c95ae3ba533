// Many vectors with bf16 matrices in fp32: rows of weights are widened once, vectors lie side by side in the lanes, and
// each weight is multiplied with all of them.  The including file says what a vector is:
//   Math::V, Math::lanes, Math::load, Math::store, Math::every(float), Math::madd(a, b, sum)
//   Math::rows, Math::tiles   how many rows and tiles of vectors fit the registers at once
//   kRowsOfMany               what unpacks rows of numbers
#pragma once
#include <algorithm>
#include <cstring>

#include "activation_rows.h"
#include "many_kernels.h"
#include "matrix.h"

namespace {

int64_t packed_floats(int32_t, int64_t columns) { return columns * kLanesOfMany * 4; }
// Rows are padded, because rows a power of two apart would evict each other from the cache.
int64_t row_floats(int64_t columns) { return ((columns + 15) & ~int64_t{15}) + 16; }
int64_t panel_floats(int32_t, int64_t columns) { return kTileRows * row_floats(columns) * 4; }

// [columns, lanes]
void pack_floats(int32_t, const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out) {
    auto *floats = reinterpret_cast<float *>(out);
    if (count < kLanesOfMany) std::memset(out, 0, static_cast<size_t>(packed_floats(0, columns)));
    // A few columns at a time, so that they stay in the L1 cache until all lanes are written.
    for (int64_t begin = 0; begin < columns; begin += 64) {
        const int64_t end = std::min(begin + 64, columns);
        for (int64_t v = 0; v < count; ++v)
            for (int64_t k = begin; k < end; ++k) floats[k * kLanesOfMany + v] = from_bf16(rows[v][k]);
    }
}

Panel prepare_floats(const SwitchyardMatrix &matrix, int64_t block, int64_t, uint8_t *room) {
    const RowOrder order(matrix);
    auto *floats = reinterpret_cast<float *>(room);
    const int64_t columns = matrix.columns;
    for (int64_t i = 0; i < kTileRows; ++i) {
        const int64_t first = block * order.block + i % kHalfRows * order.step;
        const int64_t row = first + i / kHalfRows * order.partner;
        float *out = floats + i * row_floats(columns);
        if (first < order.first_limit && row < matrix.rows) {
            const StoredRow stored = stored_row(kRowsOfMany, matrix, row);
            stored.type->unpack(stored.blocks, columns, out);
        } else {
            std::memset(out, 0, static_cast<size_t>(columns) * 4);
        }
    }
    return {room, room + kHalfRows * row_floats(columns) * 4, row_floats(columns) * 4};
}

template <class Math, int tiles>
void multiply_rows(const float *weights, int64_t columns, const float *x, const Ahead &ahead, float *out, int64_t row) {
    constexpr int rows = Math::rows, lanes = Math::lanes;
    typename Math::V sums[rows][tiles];
    for (auto &of_row : sums)
        for (auto &sum : of_row) sum = Math::every(0.0f);
    const int64_t stride = row_floats(columns);
    const float *w = weights + row * stride;
    for (int64_t k = 0; k < columns; ++k) {
        if (k % kGroup == 0) ahead.fetch(k);
        typename Math::V values[tiles];
        for (int t = 0; t < tiles; ++t) values[t] = Math::load(x + (t * columns + k) * lanes);
        for (int r = 0; r < rows; ++r) {
            const typename Math::V weight = Math::every(w[r * stride + k]);
            for (int t = 0; t < tiles; ++t) sums[r][t] = Math::madd(weight, values[t], sums[r][t]);
        }
    }
    for (int t = 0; t < tiles; ++t) {
        float found[rows][lanes];
        for (int r = 0; r < rows; ++r) Math::store(found[r], sums[r][t]);
        for (int v = 0; v < lanes; ++v)
            for (int r = 0; r < rows; ++r) out[(t * lanes + v) * kTileRows + row + r] = found[r][v];
    }
}

template <class Math>
void multiply_floats(int32_t, int64_t columns, const Panel &panel, const uint8_t *x, int64_t count, float *out) {
    int64_t tiles = (count + Math::lanes - 1) / Math::lanes;
    const auto *weights = reinterpret_cast<const float *>(panel.upper);
    const auto *values = reinterpret_cast<const float *>(x);
    static_assert(kTileRows % Math::rows == 0, "a block is made of whole groups of rows");
    // Parts as equal as can be: a single tile does not keep the multipliers busy.
    const int64_t parts = (tiles + Math::tiles - 1) / Math::tiles;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = tiles * part / parts, now = tiles * (part + 1) / parts - first;
        const float *mine = values + first * columns * Math::lanes;
        float *to = out + first * Math::lanes * kTileRows;
        for (int64_t row = 0; row < kTileRows; row += Math::rows) {
            const Ahead ahead(panel, columns, row, Math::rows, part, parts);
            if (now == Math::tiles)
                multiply_rows<Math, Math::tiles>(weights, columns, mine, ahead, to, row);
            else if (now == 1)
                multiply_rows<Math, 1>(weights, columns, mine, ahead, to, row);
            else
                multiply_rows<Math, 2>(weights, columns, mine, ahead, to, row);
        }
    }
}

template <class Math> constexpr ManyKernels floats_kernels(int64_t fewest) {
    return {Math::lanes, {fewest, 0, 0, 0, 0, fewest}, packed_floats, panel_floats, pack_floats, prepare_floats,
            multiply_floats<Math>, activate_rows, add_rows, soften_row, carry_rows, narrow_rows};
}

}  // namespace
