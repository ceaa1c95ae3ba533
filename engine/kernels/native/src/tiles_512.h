// Tiles with vectors of 512 bits: 16 rows of 4 columns each.  The including file says how bytes are multiplied, see
// tiles_256.h.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "fit_group.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes that weights are fetched ahead of their use

static inline __m512i columns(const int8_t *q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

static inline __m512 scales_of(const uint16_t *scales) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch(reinterpret_cast<const char *>(from) + at + kAhead, _MM_HINT_T0);
}

template <class Math, int count> void dot_int8_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    __m512 sums[count][2];
    for (auto &vector : sums) vector[0] = vector[1] = _mm512_setzero_ps();
    const uint8_t *w = row.weights;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows) {
        for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
            fetch(w, kHalfRows * kGroup);
            __m512i products[count];
            for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
            for (int j = 0; j < 8; ++j) {
                const __m512i weights = Math::prepared(_mm512_loadu_si512(w + 64 * j));
                for (int v = 0; v < count; ++v)
                    products[v] = Math::add(products[v], weights, columns(x[v].q + group * kGroup + 4 * j));
            }
            const __m512 scale = scales_of(scales + kHalfRows * half);
            for (int v = 0; v < count; ++v)
                sums[v][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[v]),
                                                _mm512_mul_ps(scale, _mm512_set1_ps(x[v].scales[group])), sums[v][half]);
        }
    }
    for (int v = 0; v < count; ++v)
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * kTileRows + kHalfRows * half, sums[v][half]);
}

template <class Math, int count> void dot_int4_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sums[count][2];
    for (auto &vector : sums) vector[0] = vector[1] = _mm512_setzero_ps();
    const uint8_t *w = row.weights, *zeros = row.zeros;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows, zeros += kTileRows) {
        for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
            fetch(w, kHalfRows * kGroup / 2);
            __m512i products[count];
            for (int v = 0; v < count; ++v) products[v] = _mm512_setzero_si512();
            for (int j = 0; j < 4; ++j) {
                const __m512i pairs = _mm512_loadu_si512(w + 64 * j);
                const __m512i first = _mm512_and_si512(pairs, low);
                const __m512i second = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
                for (int v = 0; v < count; ++v) {
                    const int8_t *q = x[v].q + group * kGroup + 4 * j;
                    products[v] = Math::add_unsigned(products[v], first, columns(q));
                    products[v] = Math::add_unsigned(products[v], second, columns(q + 16));
                }
            }
            const __m512 scale = scales_of(scales + kHalfRows * half);
            const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros + kHalfRows * half))));
            for (int v = 0; v < count; ++v) {
                const __m512 sixteenths = _mm512_set1_ps(static_cast<float>(x[v].sums[group]) * 0.0625f);
                const __m512 value =
                    _mm512_fnmadd_ps(zero, sixteenths, _mm512_cvtepi32_ps(Math::whole_sums(products[v])));
                sums[v][half] =
                    _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(x[v].scales[group])), sums[v][half]);
            }
        }
    }
    for (int v = 0; v < count; ++v)
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * kTileRows + kHalfRows * half, sums[v][half]);
}

template <class Math> void dot_int8(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return dot_int8_rows<Math, 1>(row, x, out);
    if (count == 2) return dot_int8_rows<Math, 2>(row, x, out);
    if (count == 3) return dot_int8_rows<Math, 3>(row, x, out);
    dot_int8_rows<Math, 4>(row, x, out);
}

template <class Math> void dot_int4(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return dot_int4_rows<Math, 1>(row, x, out);
    if (count == 2) return dot_int4_rows<Math, 2>(row, x, out);
    if (count == 3) return dot_int4_rows<Math, 3>(row, x, out);
    dot_int4_rows<Math, 4>(row, x, out);
}

}  // namespace
