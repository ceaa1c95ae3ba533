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
#endif

struct Q5_0 : scalar::Q5_0 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 16, kMost = 31;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 6, kBytes), made.codes);
        add_fifth_bits(blocks + 2, kBytes, made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-16.0f));
        return made;
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) {
        const float scale = half_at(block);
        return {joined(codes_of_nibbles(block + 6), where_set(u32_at(block + 2), 16)), scale, -16.0f * scale};
    }
#endif
};

}  // namespace
