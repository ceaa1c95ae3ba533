// Tiles with vectors of 256 bits: 8 rows of 4 columns each.  The including file says how bytes are multiplied:
//   Products  sums of products so far, of 8 rows x 2 or 8 rows
//   none(), add(Products, weights, x) for int8, add_unsigned(Products, nibbles, x) for int4, whole_sums(Products)
#pragma once
#include <immintrin.h>

#include <cstring>

#include "fit_group.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes that weights are fetched ahead of their use

static inline __m256i columns(const int8_t *q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}

static inline __m256 scales_of(const uint16_t *scales) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch(reinterpret_cast<const char *>(from) + at + kAhead, _MM_HINT_T0);
}

template <class Math, int count> void dot_int8_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    __m256 sums[count][4];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm256_setzero_ps();
    const uint8_t *w = row.weights;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, w += kTileRows * kGroup, scales += kTileRows) {
        fetch(w, kTileRows * kGroup);
        for (int part = 0; part < 4; ++part) {  // 8 rows of the tile
            const uint8_t *at = w + (part >> 1) * kHalfRows * kGroup + (part & 1) * 32;
            typename Math::Products products[count];
            for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
            for (int j = 0; j < 8; ++j) {
                const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 64 * j));
                for (int v = 0; v < count; ++v)
                    products[v] = Math::add(products[v], weights, columns(x[v].q + group * kGroup + 4 * j));
            }
            const __m256 scale = scales_of(scales + 8 * part);
            for (int v = 0; v < count; ++v)
                sums[v][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[v]),
                                                _mm256_mul_ps(scale, _mm256_set1_ps(x[v].scales[group])), sums[v][part]);
        }
    }
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < 4; ++part) _mm256_storeu_ps(out + v * kTileRows + 8 * part, sums[v][part]);
}

template <class Math, int count> void dot_int4_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256 sums[count][4];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm256_setzero_ps();
    const uint8_t *w = row.weights, *zeros = row.zeros;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups;
         ++group, w += kTileRows * kGroup / 2, scales += kTileRows, zeros += kTileRows) {
        fetch(w, kTileRows * kGroup / 2);
        for (int part = 0; part < 4; ++part) {
            const uint8_t *at = w + (part >> 1) * kHalfRows * kGroup / 2 + (part & 1) * 32;
            __m256i products[count];
            for (int v = 0; v < count; ++v) products[v] = _mm256_setzero_si256();
            for (int j = 0; j < 4; ++j) {
                const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 64 * j));
                const __m256i first = _mm256_and_si256(pairs, low);
                const __m256i second = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
                for (int v = 0; v < count; ++v) {
                    const int8_t *q = x[v].q + group * kGroup + 4 * j;
                    products[v] = Math::add_unsigned(products[v], first, columns(q));
                    products[v] = Math::add_unsigned(products[v], second, columns(q + 16));
                }
            }
            const __m256 scale = scales_of(scales + 8 * part);
            const __m256 zero = _mm256_cvtepi32_ps(
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(zeros + 8 * part))));
            for (int v = 0; v < count; ++v) {
                const __m256 sixteenths = _mm256_set1_ps(static_cast<float>(x[v].sums[group]) * 0.0625f);
                const __m256 value =
                    _mm256_fnmadd_ps(zero, sixteenths, _mm256_cvtepi32_ps(Math::whole_sums(products[v])));
                sums[v][part] =
                    _mm256_fmadd_ps(value, _mm256_mul_ps(scale, _mm256_set1_ps(x[v].scales[group])), sums[v][part]);
            }
        }
    }
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < 4; ++part) _mm256_storeu_ps(out + v * kTileRows + 8 * part, sums[v][part]);
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
