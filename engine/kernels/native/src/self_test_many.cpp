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
    const SwitchyardMatrix matrix = {weights.data(), nullptr, nullptr, kRows, columns, SWITCHYARD_BF16, pairing};
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
        multiply_block(kernels, matrix, block, packed, count, [&](int64_t first, int64_t some, const float *dots) {
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

int32_t test_widened(const ManyKernels &kernels, int32_t precision) {
    const int64_t columns = 70, count = 19, tiles = (kRows + 31) / 32 * 3;
    const bool int4 = precision == SWITCHYARD_INT4;
    std::vector<uint8_t> weights(tiles * (int4 ? 512 : 1024)), zeros(tiles * 32);
    std::vector<uint16_t> scales(tiles * 32), values(count * columns);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<uint8_t>((i * 89 + 3) % 255 + 129);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = to_bf16(0.0078125f * static_cast<float>(i % 13 + 1));
    for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i * 73);
    for (int64_t at = 0; at < count * columns; ++at) values[at] = to_bf16(value_of(at / columns, at % columns));
    const SwitchyardMatrix matrix = {weights.data(), scales.data(),     zeros.data(), kRows,
                                     columns,        precision, SWITCHYARD_PLAIN};
    const int64_t tile = kernels.packed_bytes(precision, columns);
    AlignedMemory memory;
    uint8_t *packed = memory.room((count + kernels.lanes - 1) / kernels.lanes * tile);
    for (int64_t first = 0; first < count; first += kernels.lanes) {
        const uint16_t *rows[64];
        const int64_t some = std::min(kernels.lanes, count - first);
        for (int64_t v = 0; v < some; ++v) rows[v] = &values[(first + v) * columns];
        kernels.pack(precision, rows, some, columns, packed + first / kernels.lanes * tile);
    }
    int32_t wrong = 0;
    multiply_block(kernels, matrix, 1, packed, count, [&](int64_t first, int64_t some, const float *dots) {
        for (int64_t at = 0; at < some * kTileRows; ++at) {
            const int64_t r = at % kTileRows;
            double wanted = 0;
            for (int64_t c = 0; c < columns; ++c) {
                const int64_t group = 3 + c / kGroup, in = c % kGroup, of = group * kTileRows + r;
                const int64_t half = 2 * group + r / kHalfRows, lane = r % kHalfRows * 4 + in % 4;
                const float scale = from_bf16(scales[of]);
                float weight = scale * static_cast<int8_t>(weights[int4 ? 0 : half * 512 + in / 4 * 64 + lane]);
                if (int4) {
                    const uint8_t pair = weights[half * 256 + in % 16 / 4 * 64 + lane];
                    weight = scale * static_cast<float>((in < 16 ? pair & 15 : pair >> 4) - zeros[of] / 16.0);
                }
                wanted += round_bf16(weight) * value_of(first + at / kTileRows, c);
            }
            if (std::fabs(dots[at] - wanted) > 1e-2 + 1e-3 * std::fabs(wanted)) wrong = 13;
        }
    });
    return wrong;
}

int32_t test_activation(const ManyKernels &kernels, float x) {
    const float up = 0.5f * x;
    SwitchyardExperts layer = {};
    layer.precision = SWITCHYARD_INT8;
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
    for (int64_t count : {1, 5, 16, 17, 33, 100})
        for (int64_t columns : {1, 31, 32, 70, 128})
            for (int32_t pairing : {SWITCHYARD_PLAIN, SWITCHYARD_HALVES, SWITCHYARD_ALTERNATING})
                if (const int32_t wrong = test_product(kernels, count, columns, pairing)) return wrong;
    for (int32_t precision : {SWITCHYARD_INT8, SWITCHYARD_INT4})
        if (kernels.fewest[precision])
            if (const int32_t wrong = test_widened(kernels, precision)) return wrong;
    for (float x : {-200.0f, -60.0f, -3.0f, -0.1f, 0.0f, 0.7f, 5.0f, 60.0f, 200.0f})
        if (const int32_t wrong = test_activation(kernels, x)) return wrong;
    return 0;
}
