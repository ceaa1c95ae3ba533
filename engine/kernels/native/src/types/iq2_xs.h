// IQ2_XS: eights of weights in a grid of 512, their signs apart; a weight is scale / 8 * (2 * step + 1) * sign * value.  d: fp16; 32
// words of 9 bits of a position and 7 of signs, as in IQ2_XXS; steps: 8 bytes with a nibble of each 16 weights.
#pragma once
#include "grids.h"

namespace {

struct Iq2Xs {
    static constexpr int kNumber = 17, kElements = 256, kBytes = 74;
    static constexpr bool kLowest = false, kLarge = false, kSigns = true;
    static constexpr int kWidth = 16;

    // A bit for each weight.
    static void spread_signs(const uint8_t *block, void *signs) {
        typedef uint16_t Words32 __attribute__((vector_size(64)));
        typedef uint8_t Bytes32 __attribute__((vector_size(32)));
        Words32 x;
        std::memcpy(&x, block + 2, sizeof x);
        x >>= 9;
        put_parity(x, uint16_t{1});
        const Bytes32 each = __builtin_convertvector(x, Bytes32);
        std::memcpy(signs, &each, sizeof each);
    }
    static constexpr Eight<512> kGrid{GRID_IQ2_XS, kIq2Values};
#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        alignas(64) uint16_t positions[32];
        _mm512_store_si512(positions, _mm512_and_si512(bytes_at(block + 2), _mm512_set1_epi16(511)));
        for (int j = 0; j < 4; ++j) made.codes[j] = eights_at(kGrid.of, positions + 8 * j);
        uint8_t signs[32];
        spread_signs(block, signs);
        put_signs(signs, &made);
        Q2K::put_scales(nibble_steps(block + 66), &made);
        made.factors = an_eighth(block);
        return made;
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made = {nibble_steps(block + 66), no_words(), an_eighth(block), 0};
        spread_signs(block, made.signs);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        return eights_at(kGrid.of, [&](int i) SWITCHYARD_INLINE { return u16_at(block + 2 + 8 * part + 2 * i) & 511; });
    }
#endif
};

}  // namespace
