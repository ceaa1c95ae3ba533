// TQ2_0: 256 codes of 2 bits, 1 too large, as in Q2_K; a weight is scale * (code - 1).  64 bytes; d: fp16.
#pragma once
#include "q2_k.h"

namespace {

struct Tq2 {
    static constexpr int kNumber = 35, kElements = 256, kBytes = 66;
    static constexpr bool kLowest = false, kLarge = false, kOneScale = true;
    static constexpr int kWidth = 32, kOffset = 1, kMost = 3;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        Q2K::put_codes(block, &made);
        put_one_scale(block + 64, &made);
        return made;
    }
    static void put_one_scale(const uint8_t *half, Wide *wide) {
        wide->first = wide->second = _mm512_set1_epi16(1);
        wide->steps = wide->mins = _mm256_set1_epi16(1);
        wide->factors = one_half(half);
    }
    static constexpr int kSlots = 4;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) { Q2K::turned_pairs(rows, 0, put); }
#else
    static Wide one_scale(const uint8_t *half) {
        const Words ones = subtracted(no_words(), -1);
        return {ones, ones, half_at(half), 0};
    }
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) { return one_scale(block + 64); }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return low_bits(shifted(bytes_at(block + part / 4 * 32), part % 4 * 2), 3);
    }
#endif
};

}  // namespace
