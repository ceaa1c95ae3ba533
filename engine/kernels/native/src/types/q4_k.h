// Q4_K: 8 groups of 32 codes of 4 bits; a weight is scale * step * code - lowest * least.  d, dmin: fp16; steps: 12 bytes; 128
// bytes with a group in their low bits and the next one in their high ones.
#pragma once
#include "rows.h"

namespace {

struct Q4K : scalar::Q4K {
    static constexpr bool kLowest = true, kLarge = false;
    static constexpr int kWidth = 32, kOffset = 0, kMost = 15;

#if defined(__AVX512VNNI__)
    // Of scales and minima in 16 words.
    static void put_steps(__m256i both, Wide *wide) {
        wide->first = spread_scales<0, 2, 0, 2, 1, 3, 1, 3>(both);
        wide->second = spread_scales<4, 6, 4, 6, 5, 7, 5, 7>(both);
        wide->steps = _mm256_permutexvar_epi16(_mm256_set_epi16(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), both);
        wide->mins = _mm256_permutexvar_epi16(_mm256_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8), both);
    }
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        for (int j = 0; j < 4; ++j) made.codes[j] = low_bits(shifted_apart<0, 4>(twice(block + 16 + 32 * j)), 15);
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        put_steps(_mm256_cvtepu8_epi16(sixteen(steps, least)), &made);
        made.factors = two_halves(block);
        return made;
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        return {words_of_pairs(steps), words_of_pairs(least), half_at(block), half_at(block + 2)};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return low_bits(shifted(bytes_at(block + 16 + part / 2 * 32), part % 2 * 4), 15);
    }
#endif
};

}  // namespace
