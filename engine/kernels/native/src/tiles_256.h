// Tiles with vectors of 256 bits: 8 rows of 4 columns each.  The including file says how bytes are multiplied:
//   Products  sums of products so far, of 8 rows x 2 or 8 rows
//   none(sum of x), prepared(weights), add(Products, prepared weights, x) for signed bytes,
//   add_unsigned(Products, nibbles, x) for numbers from 0 to 15, whole_sums(Products)
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernel_set.h"

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

}  // namespace

#define SWITCHYARD_VECTOR_BITS 256
#include "formats.h"
