// IQ4_XS: 8 groups of 32 codes of 4 bits into IQ4_NL's table; a weight is scale * (step - 32) * table[code].  d: fp16; two bits of
// each step in 2 bytes and four in 4; 16 bytes a group, as in Q4_0.
#pragma once
#include "iq4_nl.h"

namespace {

struct Iq4Xs : scalar::Iq4Xs {
    static constexpr bool kLowest = false, kLarge = true;

#if defined(__AVX512VNNI__) || defined(__AVX2__)
    // A word for each group.
    static __m128i steps_of(const uint8_t *block) {
        const uint32_t packed = u32_at(block + 4), high = u16_at(block + 2);
        const __m128i nibbles = _mm_cvtsi64_si128(static_cast<long long>(packed));
        const __m128i low = _mm_and_si128(_mm_unpacklo_epi8(nibbles, _mm_srli_epi16(nibbles, 4)), _mm_set1_epi8(15));
        // Bits 2g and 2g + 1 are brought to the top of a word, and from there to bits 4 and 5.
        const __m128i factors = _mm_set_epi16(1, 4, 16, 64, 256, 1024, 4096, 16384);
        const __m128i tops = _mm_mullo_epi16(_mm_set1_epi16(static_cast<short>(high)), factors);
        const __m128i bits = _mm_slli_epi16(_mm_srli_epi16(tops, 14), 4);
        return _mm_sub_epi16(_mm_or_si128(_mm_cvtepu8_epi16(low), bits), _mm_set1_epi16(32));
    }
#endif
#if defined(__AVX512VNNI__)
    static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes table = raised(table_of(kIq4Nl));
        for (int half = 0; half < 2; ++half) {
            codes_of_nibbles(bytes_at(block + 8 + 64 * half), made.codes + 2 * half);
            for (int j = 2 * half; j < 2 * half + 2; ++j) made.codes[j] = look_up(table, made.codes[j]);
        }
        const __m256i steps = _mm256_castsi128_si256(steps_of(block));
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
        made.mins = _mm256_slli_epi16(each, 7);  // times kRaised
        made.scale = half_at(block);
        made.lowest = 0;
        return made;
    }
    static constexpr int kWidth = 32, kOffset = kRaised;
    static constexpr int place(int j, int half) { return 64 * j + 32 * half; }
#elif defined(__AVX2__)
    static constexpr int kWidth = 32, kOffset = 0, kMost = 128;
    static Wide wide(const uint8_t *block) {
        const __m128i steps = steps_of(block);
        const __m256i each = _mm256_set_m128i(_mm_unpackhi_epi16(steps, steps), _mm_unpacklo_epi16(steps, steps));
        return {each, _mm256_setzero_si256(), half_at(block), 0};
    }
    static Bytes codes(const uint8_t *block, int part) { return look_up(table_of(kIq4Nl), codes_of_nibbles(block + 8 + 16 * part)); }
#endif
};

}  // namespace
