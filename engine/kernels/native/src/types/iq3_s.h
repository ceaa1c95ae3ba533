// IQ3_S: fours of weights in a grid of 512, their signs apart; a weight is scale * (2 * step + 1) * sign * value.  d: fp16; 64 bytes of
// positions; 8 with the ninth bits of eight positions; 32 of signs; steps: 4 bytes with a nibble of each 32 weights.
#pragma once
#include "grids.h"

namespace {

struct Iq3S {
    static constexpr int kNumber = 21, kElements = 256, kBytes = 110;
    static constexpr bool kLowest = false, kLarge = false, kSigns = true;
    static constexpr int kWidth = 32;

    static Words steps(const uint8_t *block) { return odd_words(words_of_pairs(spread_nibbles(u32_at(block + 106)))); }
#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    static constexpr NibbleLines<512> kLines{GRID_IQ3_S};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        for (int half = 0; half < 2; ++half) {
            const Bytes low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 2 + 32 * half)));
            const Bytes positions = _mm512_mask_add_epi16(low, u32_at(block + 66 + 4 * half), low, _mm512_set1_epi16(256));
            put_fours(look_up_lines<512>(kLines.of, in_turn_of_fours(positions)), kIq3SValues, made.codes + 2 * half);
        }
        put_signs(block + 74, &made);
        Q2K::put_scales(steps(block), &made);
        made.factors = one_half(block);
        return made;
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    static constexpr Four3<512> kGrid{GRID_IQ3_S, kIq3SValues};
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made = {steps(block), no_words(), half_at(block), 0};
        std::memcpy(made.signs, block + 74, sizeof made.signs);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const int ninth = block[66 + part];
        return fours_at(kGrid.of, [&](int i) SWITCHYARD_INLINE { return block[2 + 8 * part + i] | (ninth << (8 - i) & 256); });
    }
#endif
};

}  // namespace
