#include "fit_group.h"

namespace {

template <class Dot> void tile_row(const TileRow &row, const QuantisedVector *x, int count, float *out, Dot dot) {
    for (int v = 0; v < count; ++v) {
        float *sums = out + v * kTileRows;
        for (int r = 0; r < kTileRows; ++r) sums[r] = 0;
        for (int64_t group = 0; group < row.groups; ++group) dot(group, x[v], sums);
    }
}

void dot_int8(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    tile_row(row, x, count, out, [&](int64_t group, const QuantisedVector &vector, float *sums) {
        const auto *w = reinterpret_cast<const int8_t *>(row.weights) + group * kTileRows * kGroup;
        const int8_t *q = vector.q + group * kGroup;
        for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
            int32_t products[kHalfRows] = {};
            for (int j = 0; j < 8; ++j)
                for (int r = 0; r < kHalfRows; ++r)
                    for (int c = 0; c < 4; ++c) products[r] += w[j * 64 + r * 4 + c] * q[4 * j + c];
            for (int r = 0; r < kHalfRows; ++r) {
                const int64_t place = half * kHalfRows + r;
                const float scale = from_bf16(row.scales[group * kTileRows + place]) * vector.scales[group];
                sums[place] += scale * static_cast<float>(products[r]);
            }
        }
    });
}

void dot_int4(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    tile_row(row, x, count, out, [&](int64_t group, const QuantisedVector &vector, float *sums) {
        const uint8_t *w = row.weights + group * kTileRows * kGroup / 2;
        const int8_t *q = vector.q + group * kGroup;
        const float sixteenths = static_cast<float>(vector.sums[group]) / 16.0f;
        for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
            int32_t products[kHalfRows] = {};
            for (int j = 0; j < 4; ++j)
                for (int r = 0; r < kHalfRows; ++r)
                    for (int c = 0; c < 4; ++c) {
                        const uint8_t pair = w[j * 64 + r * 4 + c];
                        products[r] += (pair & 15) * q[4 * j + c] + (pair >> 4) * q[16 + 4 * j + c];
                    }
            for (int r = 0; r < kHalfRows; ++r) {
                const int64_t place = half * kHalfRows + r, at = group * kTileRows + place;
                const float value = static_cast<float>(products[r]) - static_cast<float>(row.zeros[at]) * sixteenths;
                sums[place] += from_bf16(row.scales[at]) * vector.scales[group] * value;
            }
        }
    });
}

}  // namespace

const TileKernels kPortableTiles = {quantise_floats, quantise_bf16, dot_int8, dot_int4, expand_int8, expand_int4, fit_int8, fit_int4};
