// Q2_0: 64 codes of 2 bits, 1 too large, four neighbours in a byte; a weight is scale * (code - 1).  d: fp16; 16 bytes.
#pragma once
#include "rows.h"

namespace {

struct Q2_0 {
    static constexpr int kNumber = 42, kElements = 64, kBytes = 18;
    static constexpr bool kLowest = false, kApart = true;
    static constexpr int kWidth = 32, kOffset = 1, kMost = 3;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        for (int j = 0; j < 4; ++j) {
            const Bytes x = _mm512_cvtepu8_epi32(sixteen_at(blocks + j * kBytes + 2));
            const Bytes upper = _mm512_or_si512(_mm512_slli_epi32(x, 12), _mm512_slli_epi32(x, 18));
            made.codes[j] = low_bits(_mm512_or_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 6)), upper), 3);
        }
        const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        made.scales = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(four_halves(blocks, kBytes)));
        return made;
    }
#else
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        for (int part = 0; part < 16; ++part) made.scales[part] = half_at(blocks + part / 4 * kBytes);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *blocks, int part) { return pairs_of_bits(blocks + part / 2 * kBytes + 2 + part % 2 * 8); }
#endif
};

}  // namespace
