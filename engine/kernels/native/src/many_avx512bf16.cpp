// Compiled with AVX-512 F, BW, VL and BF16, where the compiler knows it.
//
// 16 vectors lie side by side in the lanes.  A last tile of fewer would be padded: if it has few, they are multiplied with
// long rows as both are stored, 32 columns at a time, and each sum's lanes are added up at the end, which would take too long
// for short rows, such as those of attention.
#include "many_kernels.h"
#if defined(__AVX512BF16__)
#include "many_pairs.h"

namespace {

constexpr int kRows = 8, kLongRows = 4, kLongVectors = 6;  // as many sums as registers hold
constexpr int64_t kLong = 512, kFew = 12;  // columns; vectors

// Whether a tile of so many vectors is not padded.
bool is_apart(int64_t columns, int64_t count) { return columns >= kLong && count < kFew; }

int64_t panel_room(int32_t, int64_t columns) { return rows_room(columns); }

void pack_tile(int32_t, const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out) {
    if (!is_apart(columns, count)) return pack_pairs(rows, count, columns, out);
    const auto bytes = static_cast<size_t>(columns) * 2;
    for (int64_t v = 0; v < count; ++v, out += copied_stride(columns)) {
        std::memcpy(out, rows[v], bytes);
        std::memset(out + bytes, 0, static_cast<size_t>(groups_of(columns) * 64) - bytes);
    }
}
static_assert(kFew * (kLong * 2 + 64) <= kLong / kGroup * kTileBytes, "a tile has room for vectors that are apart");

Panel prepare(const SwitchyardMatrix &matrix, int64_t block, int64_t count, uint8_t *room) {
    return is_apart(matrix.columns, count) ? prepare_rows(matrix, block, count, room) : copy_rows(matrix, block, count, room);
}

// The sums of the lanes of each of four.
inline __m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d pairs = _mm512_castps_pd(ab), others = _mm512_castps_pd(cd);
    const __m512 four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(pairs, others)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(pairs, others)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// 4 long rows with some vectors.
template <int count>
void multiply_long(const uint8_t *weights, int64_t stride, int64_t columns, const uint8_t *x, const Ahead &ahead, float *out) {
    __m512 sums[count][kLongRows];
    for (auto &of_vector : sums)
        for (auto &sum : of_vector) sum = _mm512_setzero_ps();
    const int64_t step = copied_stride(columns);
    for (int64_t column = 0; column < columns; column += kGroup) {
        ahead.fetch(column);
        __m512bh rows[kLongRows];
        for (int r = 0; r < kLongRows; ++r) rows[r] = (__m512bh)_mm512_loadu_si512(weights + r * stride + column * 2);
        for (int v = 0; v < count; ++v) {
            const auto value = (__m512bh)_mm512_load_si512(x + v * step + column * 2);
            for (int r = 0; r < kLongRows; ++r) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], rows[r], value);
        }
    }
    for (int v = 0; v < count; ++v)
        _mm_storeu_ps(out + v * kTileRows, totals(sums[v][0], sums[v][1], sums[v][2], sums[v][3]));
}

using MultiplyLong = void (*)(const uint8_t *, int64_t, int64_t, const uint8_t *, const Ahead &, float *);
constexpr MultiplyLong kMultiplyLong[] = {nullptr,          multiply_long<1>, multiply_long<2>, multiply_long<3>,
                                          multiply_long<4>, multiply_long<5>, multiply_long<6>};
static_assert(sizeof kMultiplyLong / sizeof *kMultiplyLong == kLongVectors + 1, "each number of vectors has its loop");

// Parts of the vectors, as equal as can be, stay in the L1 cache while all rows go by.
void multiply_apart(int64_t columns, const Panel &panel, const uint8_t *x, int64_t count, float *out) {
    const int64_t parts = (count + kLongVectors - 1) / kLongVectors;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = count * part / parts, some = count * (part + 1) / parts - first;
        for (int row = 0; row < kTileRows; row += kLongRows) {
            const uint8_t *weights =
                (row < kHalfRows ? panel.upper : panel.lower) + row % kHalfRows * panel.stride;
            kMultiplyLong[some](weights, panel.stride, columns, x + first * copied_stride(columns),
                                Ahead(panel, columns, row, kLongRows, part, parts), out + first * kTileRows + row);
        }
    }
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

void multiply(int32_t, int64_t columns, const Panel &panel, const uint8_t *x, int64_t count, float *out) {
    int64_t tiles = count / kPairLanes, apart = count % kPairLanes;
    if (apart > 0 && !is_apart(columns, apart)) {
        ++tiles;
        apart = 0;
    }
    if (apart > 0) {
        Panel again = panel;
        if (tiles > 0) again.next_upper = again.next_lower = nullptr;  // what comes next is fetched once
        multiply_apart(columns, again, x + tiles * packed_tiles(SWITCHYARD_BF16, columns), apart,
                       out + tiles * kPairLanes * kTileRows);
    }
    const int64_t groups = groups_of(columns), parts = (tiles + 2) / 3;  // as equal as can be
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t now = tiles * (part + 1) / parts - tiles * part / parts;
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
        x += now * groups * kTileBytes;
        out += now * kPairLanes * kTileRows;
    }
}

}  // namespace

static const ManyKernels kMany = {kPairLanes, {1}, packed_tiles, panel_room, pack_tile, prepare,
                                  multiply, activate_rows, add_rows, soften_row, carry_rows, narrow_rows};
extern const ManyKernels *const kAvx512Bf16Many = &kMany;
#else
extern const ManyKernels *const kAvx512Bf16Many = nullptr;
#endif
