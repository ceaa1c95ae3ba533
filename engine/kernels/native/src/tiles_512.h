// Tiles with vectors of 512 bits: 16 rows of 4 columns each.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernel_set.h"

namespace {

using Bytes = __m512i;
using Products = __m512i;  // of 16 rows x 2, or of 16 rows
using Floats = __m512;

constexpr int64_t kAhead = 6144;  // bytes between a prefetch and the use of the weights: about what a core reads meanwhile

static inline Bytes load(const uint8_t *at) { return _mm512_loadu_si512(at); }
static inline Bytes low_nibbles(Bytes pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi8(15)); }
static inline Bytes high_nibbles(Bytes pairs) { return low_nibbles(_mm512_srli_epi16(pairs, 4)); }
static inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
static inline Bytes load_table(const int8_t *table) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
}

static inline Bytes columns(const int8_t *q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

static inline Floats scales_of(const uint16_t *scales) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline Floats half_scales_of(const uint16_t *scales) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales)));
}

static inline Floats zeros_of(const uint8_t *zeros) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros))));
}

static inline Floats every(float value) { return _mm512_set1_ps(value); }
static inline Floats to_floats(Products whole) { return _mm512_cvtepi32_ps(whole); }
static inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline Floats multiply_subtract(Floats a, Floats b, Floats from) { return _mm512_fnmadd_ps(a, b, from); }
static inline void store(float *to, Floats values) { _mm512_storeu_ps(to, values); }

static inline void fetch(const void *from, int64_t bytes, int64_t ahead) {
    for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch(static_cast<const char *>(from) + at + ahead, _MM_HINT_T1);
}

}  // namespace

#include "tile_rows.h"
#include "formats.h"
