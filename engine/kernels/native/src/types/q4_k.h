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
        wide->first = spread_scales<0, 1, 0, 1, 2, 3, 2, 3>(both);
        wide->second = spread_scales<4, 5, 4, 5, 6, 7, 6, 7>(both);
        wide->steps = _mm256_permutexvar_epi16(_mm256_set_epi16(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), both);
        wide->mins = _mm256_permutexvar_epi16(_mm256_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8), both);
    }
    static Wide wide(const uint8_t *block) {
        Wide made;
        for (int pair = 0; pair < 2; ++pair) {
            const Bytes pairs = bytes_at(block + 16 + 64 * pair);
            made.codes[2 * pair] = low_bits(pairs, 15);
            made.codes[2 * pair + 1] = low_bits(shifted<4>(pairs), 15);
        }
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        put_steps(_mm256_cvtepu8_epi16(sixteen(steps, least)), &made);
        made.scale = half_at(block);
        made.lowest = half_at(block + 2);
        return made;
    }
    static constexpr int place(int j, int half) { return j / 2 * 128 + j % 2 * 32 + half * 64; }
#else
    static Wide wide(const uint8_t *block) {
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        return {words_of_pairs(steps), words_of_pairs(least), half_at(block), half_at(block + 2)};
    }
    static Bytes codes(const uint8_t *block, int part) {
        return low_bits(shifted(bytes_at(block + 16 + part / 2 * 32), part % 2 * 4), 15);
    }
#endif
};

}  // namespace
