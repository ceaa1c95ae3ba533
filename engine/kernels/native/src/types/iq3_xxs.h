// IQ3_XXS: fours of weights in a grid of 256, their signs apart; a weight is scale / 4 * (2 * step + 1) * sign * value.  d: fp16; 64
// bytes of positions; of each 32 weights 4 bytes of signs and a step, as in IQ2_XXS.
#pragma once
#include "grids.h"

namespace {

struct Iq3Xxs {
    static constexpr int kNumber = 18, kElements = 256, kBytes = 98;
    static constexpr bool kLowest = false, kLarge = false, kSigns = true;
    static constexpr int kWidth = 32;

#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    static constexpr NibbleLines<256> kLines{GRID_IQ3_XXS};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        for (int half = 0; half < 2; ++half) {
            const __m256i positions = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 2 + 32 * half));
            const Bytes words = in_turn_of_fours(_mm512_cvtepu8_epi16(positions));
            put_fours(look_up_lines<256>(kLines.of, words), kIq3XxsValues, made.codes + 2 * half);
        }
        uint32_t words[8], signs[8];
        std::memcpy(words, block + 66, sizeof words);
        const Words steps = spread_signs(words, signs);
        put_signs(signs, &made);
        Q2K::put_scales(steps, &made);
        made.factors = _mm_set_ss(half_at(block) * 0.25f);
        return made;
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    static constexpr Four3<256> kGrid{GRID_IQ3_XXS, kIq3XxsValues};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        uint32_t words[8];
        std::memcpy(words, block + 66, sizeof words);
        Wide made = {no_words(), no_words(), half_at(block) * 0.25f, 0};
        made.steps = spread_signs(words, made.signs);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return fours_at(kGrid.of, [&](int i) SWITCHYARD_INLINE { return block[2 + 8 * part + i]; });
    }
#endif
};

}  // namespace
