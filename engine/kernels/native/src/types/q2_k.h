// Q2_K: 16 groups of 16 codes of 2 bits; a weight is scale * step * code - lowest * least.  16 bytes with a step in their low bits
// and its least value in their high ones; 64 bytes: of each 128 codes, two bits for each 32 of them; d, dmin: fp16.
#pragma once
#include "rows.h"

namespace {

struct Q2K : scalar::Q2K {
    static constexpr bool kLowest = true, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 0, kMost = 3;

#if defined(__AVX512VNNI__)
    // Codes of two bits of 64 bytes, and scales per 16.
    static void put_codes(const uint8_t *pairs, Wide *wide) {
        for (int half = 0; half < 2; ++half) {
            const Bytes q = twice(pairs + 32 * half);
            wide->codes[2 * half] = low_bits(shifted_apart<0, 2>(q), 3);
            wide->codes[2 * half + 1] = low_bits(shifted_apart<4, 6>(q), 3);
        }
    }
    static void put_scales(__m256i steps, Wide *wide) {
        wide->steps = steps;
        wide->first = spread_scales<0, 4, 1, 5, 2, 6, 3, 7>(steps);
        wide->second = spread_scales<8, 12, 9, 13, 10, 14, 11, 15>(steps);
    }
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        put_codes(block + 16, &made);
        put_scales(words_of_low_nibbles(block), &made);
        made.mins = words_of_high_nibbles(block);
        made.factors = two_halves(block + 80);
        return made;
    }
    template <class Put> SWITCHYARD_INLINE static void turned_pairs(const uint8_t *const *rows, int at, Put put) {
        for (int half = 0; half < 2; ++half)
            turn([&](int row) SWITCHYARD_INLINE { return rows[row] + at + 32 * half; }, [&](int j, Bytes q) SWITCHYARD_INLINE {
                for (int i = 0; i < 4; ++i) put(4 * half + i, i, j, low_bits(turned_by(q, 2 * i), 3));
            });
    }
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) { turned_pairs(rows, 16, put); }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        const FourTurned head(rows, 0);
        const __m512 scale = turned_halves(rows, 80), lowest = _mm512_sub_ps(_mm512_setzero_ps(), turned_halves(rows, 82));
        for (int i = 0; i < 16; ++i)
            put(i, turned_step(head.of[i / 4], i % 4, scale, 0, 15), turned_step(head.of[i / 4], i % 4, lowest, 4, 15));
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        return {words_of_low_nibbles(block), words_of_high_nibbles(block), half_at(block + 80), half_at(block + 82)};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return low_bits(shifted(bytes_at(block + 16 + part / 4 * 32), part % 4 * 2), 3);
    }
#endif
};

}  // namespace
