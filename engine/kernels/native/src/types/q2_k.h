// Q2_K: 16 groups of 16 codes of 2 bits; a weight is scale * step * code - lowest * least.  16 bytes with a step in their low bits
// and its least value in their high ones; 64 bytes: of each 128 codes, two bits for each 32 of them; d, dmin: fp16.
#pragma once
#include "rows.h"

namespace {

struct Q2K : scalar::Q2K {
    static constexpr bool kLowest = true, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 0, kMost = 3;

#if defined(__AVX512VNNI__)
    // Codes of two bits of 64 bytes, and of scales per 16.
    static void put_scales(__m256i steps, Wide *wide) {
        wide->steps = steps;
        wide->first = spread_scales<0, 2, 1, 3, 8, 10, 9, 11>(steps);
        wide->second = spread_scales<4, 6, 5, 7, 12, 14, 13, 15>(steps);
    }
    static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes q = bytes_at(block + 16);
        made.codes[0] = low_bits(q, 3);
        made.codes[1] = low_bits(shifted<2>(q), 3);
        made.codes[2] = low_bits(shifted<4>(q), 3);
        made.codes[3] = low_bits(shifted<6>(q), 3);
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block));
        const __m128i low = _mm_set1_epi8(15);
        put_scales(_mm256_cvtepu8_epi16(_mm_and_si128(both, low)), &made);
        made.mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(both, 4), low));
        made.scale = half_at(block + 80);
        made.lowest = half_at(block + 82);
        return made;
    }
    static constexpr int place(int j, int half) { return 32 * j + 128 * half; }
#else
    static Wide wide(const uint8_t *block) {
        return {words_of_low_nibbles(block), words_of_high_nibbles(block), half_at(block + 80), half_at(block + 82)};
    }
    static Bytes codes(const uint8_t *block, int part) {
        return low_bits(shifted(bytes_at(block + 16 + part / 4 * 32), part % 4 * 2), 3);
    }
#endif
};

}  // namespace
