// IQ2_S: eights of weights in a grid of 1024, their signs apart; a weight is scale / 8 * (2 * step + 1) * sign * value.  d: fp16; 32
// bytes of positions; 32 of signs; 8 with two more bits of four positions; steps: as in IQ2_XS.
#pragma once
#include "grids.h"

namespace {

struct Iq2S {
    static constexpr int kNumber = 22, kElements = 256, kBytes = 82;
    static constexpr bool kLowest = false, kLarge = false, kSigns = true;
    static constexpr int kWidth = 16;

    static constexpr Eight<1024> kGrid{GRID_IQ2_S, kIq2Values};
#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 2)));
        // Each byte four times, as words, of which bits 8 and 9 are wanted.
        const Bytes high = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(block + 66)));
        const __m128i which = sixteen(0x8000800080008000, 0x8008800880088008);
        const Bytes four = _mm512_shuffle_epi8(high, _mm512_broadcast_i32x4(which));
        const Bytes more = _mm512_sllv_epi16(four, _mm512_set1_epi64(0x0002000400060008));
        alignas(64) uint16_t positions[32];
        _mm512_store_si512(positions, _mm512_or_si512(low, _mm512_and_si512(more, _mm512_set1_epi16(0x300))));
        for (int j = 0; j < 4; ++j) made.codes[j] = eights_at(kGrid.of, positions + 8 * j);
        put_signs(block + 34, &made);
        Q2K::put_scales(nibble_steps(block + 74), &made);
        made.factors = an_eighth(block);
        return made;
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made = {nibble_steps(block + 74), no_words(), an_eighth(block), 0};
        std::memcpy(made.signs, block + 34, sizeof made.signs);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const int high = block[66 + part];
        return eights_at(kGrid.of, [&](int i) SWITCHYARD_INLINE { return block[2 + 4 * part + i] | (high << (8 - 2 * i) & 0x300); });
    }
#endif
};

}  // namespace
