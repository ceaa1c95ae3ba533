// The kernels for many vectors on small problems.
#include <cmath>
#include <vector>

#include "many_rows.h"
#include "matrix.h"
#include "self_test.h"

namespace {

constexpr int64_t kRows = 70;  // two whole blocks and one that ends early

float weight_of(int64_t row, int64_t column) { return 0.125f * static_cast<float>((row * 7 + column * 5) % 11 - 5); }
float value_of(int64_t vector, int64_t column) { return 0.25f * static_cast<float>((vector * 3 + column) % 7 - 3); }

int32_t test_product(const ManyKernels &kernels, int64_t count, int64_t columns, int32_t pairing) {
    std::vector<uint16_t> weights(kRows * columns), values(count * columns);
    for (int64_t at = 0; at < kRows * columns; ++at) weights[at] = to_bf16(weight_of(at / columns, at % columns));
    for (int64_t at = 0; at < count * columns; ++at) values[at] = to_bf16(value_of(at / columns, at % columns));
    const SwitchyardMatrix matrix = {weights.data(), nullptr, nullptr, nullptr, kRows, columns, SWITCHYARD_BF16, pairing};
    const int64_t tile = kernels.packed_bytes(SWITCHYARD_BF16, columns);
    AlignedMemory memory;
    uint8_t *packed = memory.room((count + kernels.lanes - 1) / kernels.lanes * tile);
    for (int64_t first = 0; first < count; first += kernels.lanes) {
        const uint16_t *rows[64];
        const int64_t some = std::min(kernels.lanes, count - first);
        for (int64_t v = 0; v < some; ++v) rows[v] = &values[(first + v) * columns];
        kernels.pack(SWITCHYARD_BF16, rows, some, columns, packed + first / kernels.lanes * tile);
    }
    const RowOrder order(matrix);
    int32_t wrong = 0;
    for (int64_t block = 0; block * order.block < order.first_limit; ++block)
        multiply_block(kernels, matrix, block, packed, count, nullptr, [&](int64_t first, int64_t some, const float *dots) {
            for (int64_t at = 0; at < some * kTileRows; ++at) {
                const int64_t i = at % kTileRows, upper = block * order.block + i % kHalfRows * order.step;
                const int64_t row = upper + i / kHalfRows * order.partner;
                if (upper >= order.first_limit || row >= kRows) continue;
                double wanted = 0;
                for (int64_t c = 0; c < columns; ++c) wanted += weight_of(row, c) * value_of(first + at / kTileRows, c);
                if (std::fabs(dots[at] - wanted) > 1e-2) wrong = 12;
            }
        });
    return wrong;
}

int32_t test_widened(const ManyKernels &kernels, int32_t format) {
    constexpr int64_t kColumns = 70, kCount = 19, kGroups = 3;
    const OwnTiles tiles(format, (kRows + 31) / 32 * kGroups);
    std::vector<uint16_t> values(kCount * kColumns);
    for (int64_t at = 0; at < kCount * kColumns; ++at) values[at] = to_bf16(value_of(at / kColumns, at % kColumns));
    const SwitchyardMatrix matrix = {tiles.weights.data(), tiles.scales.data(), tiles.zeros.data(), tiles.table, kRows,
                                     kColumns,             format,              SWITCHYARD_PLAIN};
    const int64_t tile = kernels.packed_bytes(format, kColumns);
    AlignedMemory memory;
    uint8_t *packed = memory.room((kCount + kernels.lanes - 1) / kernels.lanes * tile);
    for (int64_t first = 0; first < kCount; first += kernels.lanes) {
        const uint16_t *rows[64];
        const int64_t some = std::min(kernels.lanes, kCount - first);
        for (int64_t v = 0; v < some; ++v) rows[v] = &values[(first + v) * kColumns];
        kernels.pack(format, rows, some, kColumns, packed + first / kernels.lanes * tile);
    }
    int32_t wrong = 0;
    multiply_block(kernels, matrix, 1, packed, kCount, nullptr, [&](int64_t first, int64_t some, const float *dots) {
        for (int64_t at = 0; at < some * kTileRows; ++at) {
            double wanted = 0;
            for (int64_t c = 0; c < kColumns; ++c)  // the second block's tiles come after the first one's
                wanted += round_bf16(tiles.weight(at % kTileRows, kGroups * kGroup + c)) *
                          value_of(first + at / kTileRows, c);
            if (std::fabs(dots[at] - wanted) > 1e-2 + 1e-3 * std::fabs(wanted)) wrong = 13;
        }
    });
    return wrong;
}

// Rows of blocks and of numbers, some of them in another order.
int32_t test_stored(const ManyKernels &kernels, const RowType &type, int64_t columns, bool ordered) {
    constexpr int64_t kCount = 19;
    const int64_t bytes = columns / type.elements * type.bytes;
    std::vector<uint8_t> blocks(kRows * bytes);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 89 + i / 97 + 3);
    for (size_t i = 1; i < blocks.size(); i += 2) blocks[i] = static_cast<uint8_t>((blocks[i] & 0x83) | 0x28);
    if (type.number == 39)
        for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(type.bytes)) blocks[i] = 124;
    std::vector<int64_t> order;
    for (int64_t row = 0; row < kRows; ++row) order.push_back(ordered ? kRows - 1 - row : row);
    SwitchyardMatrix matrix = {};
    matrix.weights = blocks.data(), matrix.rows = kRows, matrix.columns = columns;
    matrix.format = SWITCHYARD_BLOCKS, matrix.type = type.number, matrix.order = ordered ? order.data() : nullptr;
    const int64_t fewest = kernels.fewest[kind_of(matrix)];
    if (fewest == 0) return 0;
    const bool exact = kind_of(matrix) != SWITCHYARD_BLOCKS;
    std::vector<uint16_t> values(kCount * columns);
    for (int64_t at = 0; at < kCount * columns; ++at) values[at] = to_bf16(value_of(at / columns, at % columns));
    AlignedMemory memory;
    const int64_t tile = kernels.packed_bytes(SWITCHYARD_BLOCKS, columns);
    uint8_t *packed = memory.room((kCount + kernels.lanes - 1) / kernels.lanes * tile);
    for (int64_t first = 0; first < kCount; first += kernels.lanes) {
        const uint16_t *rows[64];
        const int64_t some = std::min(kernels.lanes, kCount - first);
        for (int64_t v = 0; v < some; ++v) rows[v] = &values[(first + v) * columns];
        kernels.pack(SWITCHYARD_BLOCKS, rows, some, columns, packed + first / kernels.lanes * tile);
    }
    int32_t wrong = 0;
    for (int64_t block : {1, 2})
        multiply_block(kernels, matrix, block, packed, kCount, nullptr, [&](int64_t first, int64_t some, const float *dots) {
            std::vector<float> weights(columns);
            for (int64_t i = 0; i < kTileRows && block * kTileRows + i < kRows; ++i) {
                type.unpack(&blocks[order[block * kTileRows + i] * bytes], columns, weights.data());
                for (int64_t v = 0; v < some; ++v) {
                    double wanted = 0, size = 0;
                    for (int64_t c = 0; c < columns; ++c) {
                        const double product = weights[c] * value_of(first + v, c);
                        wanted += product;
                        size += std::fabs(product);
                    }
                    if (!(std::fabs(dots[v * kTileRows + i] - wanted) <= (exact ? 1e-5 : 4e-3) * size + 1e-6)) wrong = 15;
                }
            }
        });
    return wrong;
}

int32_t test_activation(const ManyKernels &kernels, float x) {
    const float up = 0.5f * x;
    SwitchyardExperts layer = {};
    layer.first.format = SWITCHYARD_INT8;
    layer.pairing = SWITCHYARD_HALVES;
    layer.limit = 7;
    float dots[kTileRows], bias[kTileRows] = {};
    for (int64_t i = 0; i < kTileRows; ++i) dots[i] = i < kHalfRows ? x : up;
    kernels.activate(layer, bias, 1, dots);
    const double gate = std::fmin(x, 7), wanted = gate / (1 + std::exp(-gate)) * std::fmax(-7, std::fmin(up, 7));
    for (int64_t i = 0; i < kHalfRows; ++i)
        if (!(std::fabs(dots[i] - wanted) <= 1e-5 + 1e-5 * std::fabs(wanted))) return 14;
    return 0;
}

}  // namespace

int32_t test_many(const ManyKernels &kernels) {
    for (int64_t count : {1, 2, 3, 4, 5, 16, 17, 33, 100})
        for (int64_t columns : {1, 31, 32, 70, 128, 545})
            for (int32_t pairing : {SWITCHYARD_PLAIN, SWITCHYARD_HALVES, SWITCHYARD_ALTERNATING})
                if (const int32_t wrong = test_product(kernels, count, columns, pairing)) return wrong;
    for (int32_t format = 1; format < kTiledFormats; ++format)
        if (kernels.fewest[format])
            if (const int32_t wrong = test_widened(kernels, format)) return wrong;
    for (const RowType &type : kPortableRows)
        for (int64_t blocks : {1, 3, 70})
            if (type.elements == 1 || blocks < 70)
                for (bool ordered : {false, true})
                    if (const int32_t wrong = test_stored(kernels, type, blocks * type.elements, ordered)) return wrong;
    for (float x : {-200.0f, -60.0f, -3.0f, -0.1f, 0.0f, 0.7f, 5.0f, 60.0f, 200.0f})
        if (const int32_t wrong = test_activation(kernels, x)) return wrong;
    return 0;
}
