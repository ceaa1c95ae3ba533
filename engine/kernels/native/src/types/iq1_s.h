// IQ1_S: eights of weights in a grid of 2048; a weight is scale / 8 * (2 * step + 1) * (8 * value + shift).  d: fp16; 32 bytes of
// positions; of each 32 weights a word: four times three more bits, 3 bits of the step and one, set where the shift is -1 and not 1.
#pragma once
#include "grids.h"

namespace {

// What a position of the grid stands for where the shift is -1, 16 too large.
constexpr Eight<2048> kIq1{GRID_IQ1, 0x170f07};

struct Iq1S {
    static constexpr int kNumber = 19, kElements = 256, kBytes = 50;
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 32, kOffset = 16, kMost = 25;

    static Words steps(const uint8_t *block) {
        uint64_t bytes = 0;
        for (int half = 0; half < 2; ++half) {
            uint64_t words;
            std::memcpy(&words, block + 34 + 8 * half, 8);
            words = words >> 12 & 0x0007000700070007;
            words = (words | words >> 8) & 0x0000ffff0000ffff;
            bytes |= ((words | words >> 16) & 0xffffffff) << (32 * half);
        }
        return odd_words(words_of_pairs(bytes));
    }
#if defined(__AVX512VNNI__)
    // Eights of codes at these positions, 2 more where a bit of `more` is set.
    static void put_codes(const uint16_t *positions, uint32_t more, Wide *wide) {
        for (int j = 0; j < 4; ++j) {
            const int i = 8 * j;
            const Bytes codes = eights_at(kIq1.of, positions + i);
            wide->codes[j] = _mm512_mask_add_epi64(codes, static_cast<__mmask8>(more >> i), codes, _mm512_set1_epi8(2));
        }
    }
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 2)));
        const __m128i words = sixteen_at(block + 34);
        // Each word four times, of which bits 8 to 10 are wanted.
        const __m128i which = sixteen(0x0100010001000100, 0x0908090809080908);
        const Bytes four = _mm512_shuffle_epi8(_mm512_cvtepu16_epi64(words), _mm512_broadcast_i32x4(which));
        const Bytes left = _mm512_sllv_epi16(four, _mm512_set1_epi64(0x0000000200050008));
        const Bytes high = _mm512_srlv_epi16(left, _mm512_set1_epi64(0x0001000000000000));
        alignas(64) uint16_t positions[32];
        _mm512_store_si512(positions, _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi16(0x700))));
        uint32_t more = static_cast<uint32_t>(static_cast<uint8_t>(~_mm_movepi16_mask(words)));
        more = (more | more << 12) & 0x000f000f;
        more = (more | more << 6) & 0x03030303;
        more = ((more | more << 3) & 0x11111111) * 15;
        put_codes(positions, more, &made);
        const Words of_groups = steps(block);
        Q2K::put_scales(of_groups, &made);
        made.mins = doubled<4>(of_groups);
        made.factors = an_eighth(block);
        return made;
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        const Words of_groups = steps(block);
        return {of_groups, doubled<4>(of_groups), an_eighth(block), 0};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const uint32_t word = u16_at(block + 34 + 2 * part);
        const Bytes codes = eights_at(kIq1.of, [&](int i) SWITCHYARD_INLINE { return block[2 + 4 * part + i] | (word >> (3 * i) & 7) << 8; });
        return added(codes, word >> 15 ? 0 : 2);
    }
#endif
};

}  // namespace
