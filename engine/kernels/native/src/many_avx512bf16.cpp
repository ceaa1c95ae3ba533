// Compiled with AVX-512 F, BW, VL and BF16, where the compiler knows it.
#include "many_kernels.h"
#if defined(__AVX512BF16__)
#include "many_pairs.h"

namespace {

constexpr int kRows = 8;

int64_t panel_room(int32_t, int64_t columns) { return rows_room(columns); }

void pack_tile(int32_t, const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out) {
    pack_pairs(rows, count, columns, out);
}

// 8 rows with the vectors of some tiles.
template <int tiles>
void multiply_rows(const uint8_t *weights, int64_t stride, int64_t groups, const uint8_t *x, float *out) {
    __m512 sums[kRows][tiles];
    for (auto &of_row : sums)
        for (auto &sum : of_row) sum = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < groups * 16; ++pair) {
        __m512bh values[tiles];
        for (int t = 0; t < tiles; ++t)
            values[t] = (__m512bh)_mm512_load_si512(x + t * groups * kTileBytes + pair * 64);
        for (int r = 0; r < kRows; ++r) {
            int32_t two;
            std::memcpy(&two, weights + r * stride + pair * 4, 4);
            const auto weight = (__m512bh)_mm512_set1_epi32(two);
            for (int t = 0; t < tiles; ++t) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], weight, values[t]);
        }
    }
    for (int t = 0; t < tiles; ++t) {
        float found[kRows][kPairLanes];
        for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(found[r], sums[r][t]);
        for (int64_t v = 0; v < kPairLanes; ++v)
            for (int r = 0; r < kRows; ++r) out[(t * kPairLanes + v) * kTileRows + r] = found[r][v];
    }
}

void multiply(int32_t, int64_t columns, const Panel &panel, const uint8_t *x, int64_t tiles, float *out) {
    const int64_t groups = groups_of(columns);
    while (tiles > 0) {
        const int64_t now = std::min<int64_t>(tiles, 3);
        for (int row = 0; row < kTileRows; row += kRows) {
            const uint8_t *weights =
                (row < kHalfRows ? panel.upper : panel.lower) + row % kHalfRows * panel.stride;
            if (now == 3)
                multiply_rows<3>(weights, panel.stride, groups, x, out + row);
            else if (now == 2)
                multiply_rows<2>(weights, panel.stride, groups, x, out + row);
            else
                multiply_rows<1>(weights, panel.stride, groups, x, out + row);
        }
        tiles -= now;
        x += now * groups * kTileBytes;
        out += now * kPairLanes * kTileRows;
    }
}

}  // namespace

static const ManyKernels kMany = {kPairLanes, {4}, packed_tiles, panel_room, pack_tile, copy_rows,
                                  multiply, activate_rows, add_rows, narrow_rows};
extern const ManyKernels *const kAvx512Bf16Many = &kMany;
#else
extern const ManyKernels *const kAvx512Bf16Many = nullptr;
#endif
