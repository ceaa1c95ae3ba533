// IQ2_XXS: eights of weights in a grid of 256, their signs apart; a weight is scale / 8 * (2 * step + 1) * sign * value.  d: fp16; of
// each 32 weights 4 bytes, positions, and 4 more: four times 7 bits of signs, the eighth makes them even, and 4 bits of the step.
#pragma once
#include "grids.h"

namespace {

struct Iq2Xxs {
    static constexpr int kNumber = 16, kElements = 256, kBytes = 66;
    static constexpr bool kLowest = false, kLarge = false, kSigns = true;
    static constexpr int kWidth = 32;

#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    static constexpr Lines<256> kLines{GRID_IQ2_XXS};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes both = bytes_at(block + 2);  // the words of positions to the lower half, in the order of in_turn_of_pairs
        const __m256i positions = _mm512_castsi512_si256(_mm512_permutexvar_epi16(
            _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 29, 21, 13, 5, 28, 20, 12, 4, 25, 17, 9, 1, 24, 16, 8, 0), both));
        put_eights(look_up_lines<256>(kLines.of, _mm512_cvtepu8_epi16(positions)), kIq2Values, &made);
        const __m256i odd = _mm512_castsi512_si256(
            _mm512_permutexvar_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 15, 13, 11, 9, 7, 5, 3, 1), both));
        alignas(32) uint32_t words[8], signs[8];
        _mm256_store_si256(reinterpret_cast<__m256i *>(words), odd);
        const Words steps = spread_signs(words, signs);
        put_signs(signs, &made);
        Q2K::put_scales(steps, &made);
        made.factors = an_eighth(block);
        return made;
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    static constexpr Eight<256> kGrid{GRID_IQ2_XXS, kIq2Values};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        uint32_t words[8];
        for (int i = 0; i < 8; ++i) words[i] = u32_at(block + 6 + 8 * i);
        Wide made = {no_words(), no_words(), an_eighth(block), 0};
        made.steps = spread_signs(words, made.signs);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return eights_at(kGrid.of, [&](int i) SWITCHYARD_INLINE { return block[2 + 8 * part + i]; });
    }
#endif
};

}  // namespace
