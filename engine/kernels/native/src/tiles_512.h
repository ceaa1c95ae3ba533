// Tiles with vectors of 512 bits: 16 rows of 4 columns each.  The including file says how bytes are multiplied, see
// tiles_256.h.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernel_set.h"

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

}  // namespace

#define SWITCHYARD_VECTOR_BITS 512
#include "formats.h"
