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
    static constexpr int kSlots = 2;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        for (int i = 0; i < 4; ++i)
            turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 16 + 32 * i; }, [&](int j, Bytes q) SWITCHYARD_INLINE {
                put(2 * i, 0, j, low_bits(q, 15));
                put(2 * i + 1, 1, j, low_bits(shifted<4>(q), 15));
            });
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        const FourTurned head(rows, 0);
        const __m512 scale = turned_halves(head.of[0]), lowest = _mm512_sub_ps(_mm512_setzero_ps(), turned_halves(head.of[0] >> 16));
        const Turned a = head.of[1], b = head.of[2], c = head.of[3];
        const Turned scales[2] = {a, upper_scales(a, c)}, minima[2] = {b, upper_minima(b, c)};
        for (int i = 0; i < 8; ++i)
            put(i, turned_step(scales[i / 4], i % 4, scale, 0, 63), turned_step(minima[i / 4], i % 4, lowest, 0, 63));
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
