// IQ4_XS: 8 groups of 32 codes of 4 bits into IQ4_NL's table; a weight is scale * (step - 32) * table[code].  d: fp16; two bits of
// each step in 2 bytes and four in 4; 16 bytes a group, as in Q4_0.
#pragma once
#include "iq4_nl.h"

namespace {

struct Iq4Xs : scalar::Iq4Xs {
    static constexpr bool kLowest = false, kLarge = true;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes table = raised(table_of(kIq4Nl));
        for (int half = 0; half < 2; ++half) {
            codes_of_nibbles(bytes_at(block + 8 + 64 * half), made.codes + 2 * half);
            for (int j = 2 * half; j < 2 * half + 2; ++j) made.codes[j] = look_up(table, made.codes[j]);
        }
        const Words steps = subtracted(words_of(unpack_split_steps(block + 4, block + 2), 0), 32);
        // For products that are not packed: eight words of each group.
        const auto spread = [&](int first) {
            const __m512i which = _mm512_add_epi16(
                _mm512_set1_epi16(static_cast<short>(first)),
                _mm512_set_epi16(3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
            return _mm512_permutexvar_epi16(which, _mm512_castsi256_si512(steps));
        };
        made.first = spread(0);
        made.second = spread(4);
        const __m256i each = _mm256_permutexvar_epi16(_mm256_set_epi16(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), steps);
        made.steps = each;
        made.mins = doubled<7>(each);  // times kRaised
        made.factors = one_half(block);
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        const Bytes table = raised(table_of(kIq4Nl));
        turn_nibbles(rows, 8, 16, [&](Bytes codes) SWITCHYARD_INLINE { return look_up(table, codes); }, put);
    }
    static constexpr int kWidth = 32, kOffset = kRaised;
#else
    static constexpr int kWidth = 32, kOffset = 0, kMost = 128;
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        const Words steps = subtracted(words_of_pairs(unpack_split_steps(block + 4, block + 2)), 32);
        return {steps, no_words(), half_at(block), 0};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) { return look_up(table_of(kIq4Nl), codes_of_nibbles(block + 8 + 16 * part)); }
#endif
};

}  // namespace
