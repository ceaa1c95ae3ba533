// Every kernel of an instruction set on small problems, against plain arithmetic.
#pragma once
#include <cstddef>
#include <vector>

#include "block_kernels.h"
#include "kernel_set.h"
#include "many_kernels.h"
#include "matrix.h"

// 0 if right, else which kernel is wrong.
int32_t test_rows(const KernelSet &kernels);
int32_t test_attend(const AttendKernels &kernels);
int32_t test_tiles(const TileKernels &kernels);
int32_t test_many(const ManyKernels &kernels);
int32_t test_blocks(const BlockKernels &kernels);
int32_t test_types(const RowKernels &kernels);

inline float value_of_code(int32_t format, uint8_t code, float scale, uint8_t zero, const int8_t *table) {
    if (kFormats[format].has_table) return scale * static_cast<float>(table[code]);
    if (kFormats[format].has_zeros) return scale * (static_cast<float>(code) - static_cast<float>(zero) / 16.0f);
    return scale * static_cast<float>(static_cast<int8_t>(code));
}

// Tiles side by side, with every byte value among the weights.
struct OwnTiles {
    int32_t format;
    int64_t tiles;
    std::vector<uint8_t> weights, zeros;
    std::vector<uint16_t> scales;
    alignas(16) int8_t table[16];

    // small: whether the table's values are at most kSmallTable.
    OwnTiles(int32_t format, int64_t tiles, bool small = false)
        : format(format), tiles(tiles), weights(tiles * 2 * kFormats[format].half_bytes()), zeros(tiles * kTileRows),
          scales(tiles * kTileRows) {
        const int bytes = kFormats[format].code_bits == 8 ? 255 : 256, from = bytes == 255 ? 129 : 0;  // int8: no -128
        for (std::size_t i = 0; i < weights.size(); ++i)
            weights[i] = static_cast<uint8_t>((i * 89 + 3) % static_cast<std::size_t>(bytes) + static_cast<std::size_t>(from));
        for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = scale_to(kFormats[format], 0.001f * static_cast<float>(i % 13 + 1));
        for (std::size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i * 73);
        for (int code = 0; code < 16; ++code)
            table[code] = static_cast<int8_t>(small ? 2 * code - (code < 8 ? 16 : 14) : code * code - 127 + code);
    }
    TileRow row() const {
        return {weights.data(), scales.data(), kFormats[format].has_zeros ? zeros.data() : nullptr, table, tiles};
    }
    // The weight in a row of 32 and a column of all tiles' columns.
    float weight(int64_t row, int64_t column) const {
        const int64_t tile = column / kGroup, c = column % kGroup, at = tile * kTileRows + row;
        const uint8_t *half = &weights[(2 * tile + row / kHalfRows) * kFormats[format].half_bytes()];
        const int64_t lane = row % kHalfRows * 4 + c % 4;
        uint8_t code = half[(kFormats[format].code_bits == 8 ? c / 4 : c % 16 / 4) * 64 + lane];
        if (kFormats[format].code_bits == 4) code = c < 16 ? code & 15 : static_cast<uint8_t>(code >> 4);
        return value_of_code(format, code, scale_from(kFormats[format], scales[at]), zeros[at], table);
    }
};
