// Q5_0: 32 codes of 5 bits, 16 too large; a weight is scale * (code - 16).  d: fp16; 4 bytes with a fifth bit of each code; 16
// bytes, as in Q4_0.
#pragma once
#include "rows.h"

namespace {

#if defined(__AVX512VNNI__)
inline void add_fifth_bits(const uint8_t *high, int64_t step, Bytes *codes) {
    const Bytes sixteen = _mm512_set1_epi8(16);
    for (int pair = 0; pair < 2; ++pair) {
        const uint64_t lower = u32_at(high + 2 * pair * step), upper = u32_at(high + (2 * pair + 1) * step);
        codes[pair] = _mm512_or_si512(codes[pair], _mm512_maskz_mov_epi8(lower | upper << 32, sixteen));
    }
}
#elif defined(__AVX2__)
inline Bytes with_fifth_bits(const uint8_t *high, Bytes codes) {
    const __m256i which = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(u32_at(high))), which);
    const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
    return _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}
#endif

struct Q5_0 : scalar::Q5_0 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 16, kMost = 31;

#if defined(__AVX512VNNI__)
    static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 6, kBytes), made.codes);
        add_fifth_bits(blocks + 2, kBytes, made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-16.0f));
        return made;
    }
#elif defined(__AVX2__)
    static One one(const uint8_t *block) {
        const float scale = half_at(block);
        return {with_fifth_bits(block + 2, codes_of_nibbles(block + 6)), scale, -16.0f * scale};
    }
#endif
};

}  // namespace
