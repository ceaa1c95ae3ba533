// IQ1_M: as IQ1_S, with a step of each 16 weights and a shift of each eight.  32 bytes of positions; 16 with, of each eight, three more
// bits and the shift's; four words with four times 3 bits of a step, and 4 bits of d: fp16.
#pragma once
#include "iq1_s.h"

namespace {

struct Iq1M {
    static constexpr int kNumber = 29, kElements = 256, kBytes = 56;
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 16, kMost = 25;

    static Words steps(const uint8_t *block) {
        uint64_t bytes[2];
        for (int half = 0; half < 2; ++half) {
            uint64_t words = (u16_at(block + 48 + 4 * half) | static_cast<uint64_t>(u16_at(block + 50 + 4 * half)) << 32) & 0x00000fff00000fff;
            words = (words | words << 10) & 0x003f003f003f003f;
            bytes[half] = (words | words << 5) & 0x0707070707070707;
        }
        return odd_words(words_of(bytes[0], bytes[1]));
    }
    static float factor(const uint8_t *block) {
        const uint8_t half[2] = {static_cast<uint8_t>(block[49] >> 4 | (block[51] & 0xf0)), static_cast<uint8_t>(block[53] >> 4 | (block[55] & 0xf0))};
        return half_at(half) * 0.125f;
    }
#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const __m128i pairs = sixteen_at(block + 32), low = _mm_slli_epi16(pairs, 4);
        const __m256i nibbles = _mm256_set_m128i(_mm_unpackhi_epi8(low, pairs), _mm_unpacklo_epi8(low, pairs));  // in high bits
        const Bytes first = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block)));
        const Bytes high = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepu8_epi16(nibbles), 4), _mm512_set1_epi16(0x700));
        alignas(64) uint16_t positions[32];
        _mm512_store_si512(positions, _mm512_or_si512(first, high));
        Iq1S::put_codes(positions, ~_mm256_movepi8_mask(nibbles), &made);
        const Words of_parts = steps(block);
        Q2K::put_scales(of_parts, &made);
        made.mins = doubled<4>(of_parts);
        made.factors = _mm_set_ss(factor(block));
        return made;
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        const Words of_parts = steps(block);
        return {of_parts, doubled<4>(of_parts), factor(block), 0};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const uint32_t nibbles = u16_at(block + 32 + 2 * part);
        const auto at = [&](int i) SWITCHYARD_INLINE {
            const uint64_t shift = ((nibbles >> (4 * i + 3) & uint64_t{1}) - 1) & 0x0202020202020202;
            return kIq1.of[block[4 * part + i] | (nibbles >> (4 * i) & 7) << 8] + shift;
        };
        return four_words(at(0), at(1), at(2), at(3));
    }
#endif
};

}  // namespace
