// NVFP4: 64 numbers of E2M1; a weight is scale / 2 * (twice the number).  4 bytes of E4M3 without a sign, the scales of 16 weights
// each; 32 bytes, of each 16 weights the first eight in their low bits.
#pragma once
#include "rows.h"

namespace {

// Half of what the bytes stand for.
struct HalfE4M3 {
    float of[256];
    constexpr HalfE4M3() : of() {
        for (int byte = 0; byte < 256; ++byte) {
            const int exponent = byte >> 3 & 15, steps = (byte & 7) + (exponent ? 8 : 0);
            of[byte] = byte == 127 ? 0.0f : static_cast<float>(steps << (exponent ? exponent : 1)) / 2048.0f;
        }
    }
};
constexpr HalfE4M3 kHalfE4M3;

struct Nvfp4 {
    static constexpr int kNumber = 40, kElements = 64, kBytes = 36;
    static constexpr bool kLowest = false, kApart = true;
    static constexpr int kWidth = 16, kOffset = 12, kMost = 24;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        const Bytes table = _mm512_add_epi8(table_of(kMxfp4), _mm512_set1_epi8(12));
        for (int pair = 0; pair < 2; ++pair) {
            const Bytes both = joined(blocks + 72 * pair + 4, blocks + 72 * pair + 40);
            const Bytes low = low_bits(both, 15), high = low_bits(shifted<4>(both), 15);
            const Bytes first = _mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), high);
            const Bytes second = _mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4), high);
            made.codes[2 * pair] = look_up(table, first);
            made.codes[2 * pair + 1] = look_up(table, second);
        }
        const __m128i bytes = _mm_set_epi32(static_cast<int>(u32_at(blocks + 108)), static_cast<int>(u32_at(blocks + 72)),
                                            static_cast<int>(u32_at(blocks + 36)), static_cast<int>(u32_at(blocks)));
        const __m512i each = _mm512_cvtepu8_epi32(bytes), one = _mm512_set1_epi32(1);
        const __m512i exponents = _mm512_and_si512(_mm512_srli_epi32(each, 3), _mm512_set1_epi32(15));
        const __m512i fractions = _mm512_and_si512(each, _mm512_set1_epi32(7));
        const __m512i steps = _mm512_mask_or_epi32(fractions, _mm512_test_epi32_mask(exponents, exponents), fractions, _mm512_set1_epi32(8));
        const __m512i whole = _mm512_sllv_epi32(steps, _mm512_max_epi32(exponents, one));
        const __mmask16 there = _mm512_cmpneq_epi32_mask(each, _mm512_set1_epi32(127));
        made.scales = _mm512_maskz_mul_ps(there, _mm512_cvtepi32_ps(whole), _mm512_set1_ps(1.0f / 2048));
        return made;
    }
#else
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        for (int part = 0; part < 16; ++part) made.scales[part] = kHalfE4M3.of[blocks[part / 4 * kBytes + part % 4]];
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *blocks, int part) {
        uint64_t first, second;
        std::memcpy(&first, blocks + part / 2 * kBytes + 4 + part % 2 * 16, 8);
        std::memcpy(&second, blocks + part / 2 * kBytes + 12 + part % 2 * 16, 8);
        constexpr uint64_t low = 0x0f0f0f0f0f0f0f0f;
        const Bytes nibbles = four_words(first & low, first >> 4 & low, second & low, second >> 4 & low);
        return added(look_up(table_of(kMxfp4), nibbles), 12);
    }
#endif
};

}  // namespace
