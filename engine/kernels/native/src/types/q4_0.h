// Q4_0: 32 codes of 4 bits, 8 too large; a weight is scale * (code - 8).  d: fp16; 16 bytes, codes 0 to 15 in their low bits.
#pragma once
#include "rows.h"

namespace {

struct Q4_0 : scalar::Q4_0 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 8, kMost = 15;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 2, kBytes), made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-8.0f));
        return made;
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) {
        const float scale = half_at(block);
        return {codes_of_nibbles(block + 2), scale, -8.0f * scale};
    }
#endif
};

}  // namespace
