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

// Products of 4 rows with 16 vectors, side by side for each vector.
inline void store_by_vector(__m512 a, __m512 b, __m512 c, __m512 d, float *out) {
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    const __m512d each[4] = {_mm512_unpacklo_pd(ab_low, cd_low), _mm512_unpackhi_pd(ab_low, cd_low),
                             _mm512_unpacklo_pd(ab_high, cd_high), _mm512_unpackhi_pd(ab_high, cd_high)};
    for (int v = 0; v < 4; ++v) {
        const __m512 rows = _mm512_castpd_ps(each[v]);
        _mm_storeu_ps(out + v * kTileRows, _mm512_castps512_ps128(rows));
        _mm_storeu_ps(out + (4 + v) * kTileRows, _mm512_extractf32x4_ps(rows, 1));
        _mm_storeu_ps(out + (8 + v) * kTileRows, _mm512_extractf32x4_ps(rows, 2));
        _mm_storeu_ps(out + (12 + v) * kTileRows, _mm512_extractf32x4_ps(rows, 3));
    }
}

// 8 rows with the vectors of some tiles.
template <int tiles>
void multiply_rows(const uint8_t *weights, int64_t stride, int64_t groups, const uint8_t *x, const Ahead &ahead,
                   float *out) {
    __m512 sums[kRows][tiles];
    for (auto &of_row : sums)
        for (auto &sum : of_row) sum = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < groups * 16; ++pair) {
        if (pair % 16 == 0) ahead.fetch(pair * 2);
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
    for (int t = 0; t < tiles; ++t)
        for (int row = 0; row < kRows; row += 4)
            store_by_vector(sums[row][t], sums[row + 1][t], sums[row + 2][t], sums[row + 3][t],
                            out + t * kPairLanes * kTileRows + row);
}

void multiply(int32_t, int64_t columns, const Panel &panel, const uint8_t *x, int64_t tiles, float *out) {
    const int64_t groups = groups_of(columns), parts = (tiles + 2) / 3;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t now = std::min<int64_t>(tiles, 3);
        for (int row = 0; row < kTileRows; row += kRows) {
            const uint8_t *weights =
                (row < kHalfRows ? panel.upper : panel.lower) + row % kHalfRows * panel.stride;
            const Ahead ahead(panel, columns, row, kRows, part, parts);
            if (now == 3)
                multiply_rows<3>(weights, panel.stride, groups, x, ahead, out + row);
            else if (now == 2)
                multiply_rows<2>(weights, panel.stride, groups, x, ahead, out + row);
            else
                multiply_rows<1>(weights, panel.stride, groups, x, ahead, out + row);
        }
        tiles -= now;
        x += now * groups * kTileBytes;
        out += now * kPairLanes * kTileRows;
    }
}

}  // namespace

static const ManyKernels kMany = {kPairLanes, {4}, packed_tiles, panel_room, pack_tile, copy_rows,
                                  multiply, activate_rows, add_rows, soften_row, carry_rows, narrow_rows};
extern const ManyKernels *const kAvx512Bf16Many = &kMany;
#else
extern const ManyKernels *const kAvx512Bf16Many = nullptr;
#endif
