// TQ1_0: 256 codes of base 3, 1 too large; a weight is scale * (code - 1).  A byte is a fraction of 256 whose first five digits are
// codes: 32 bytes have those of 160 weights, the first digits of all before the second ones, 16 those of 80, and 4 four each; d: fp16.
#pragma once
#include "tq2_0.h"

namespace {

// By what bytes are multiplied, modulo 256, so that a digit becomes their first, for each 32 codes.
struct TritPowers {
    uint8_t of[8][32];
    constexpr TritPowers() : of() {
        constexpr uint8_t powers[] = {1, 3, 9, 27, 81};
        for (int i = 0; i < 256; ++i)
            of[i / 32][i % 32] = powers[i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4];
    }
};
constexpr TritPowers kTritPowers;

struct Tq1 {
    static constexpr int kNumber = 34, kElements = 256, kBytes = 54;
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 32, kOffset = 1, kMost = 2;

#if defined(__AVX512VNNI__)
    // The bytes whose first digits are the last 16 codes.
    static void put_last(const uint8_t *block, uint8_t *to) {
        uint32_t four = u32_at(block + 48);
        for (int digit = 0; digit < 4; ++digit) {
            std::memcpy(to + 4 * digit, &four, 4);
            const uint32_t even = four & 0x00ff00ff, odd = four >> 8 & 0x00ff00ff;
            four = (even * 3 & 0x00ff00ff) | (odd * 3 & 0x00ff00ff) << 8;
        }
    }
    static Bytes times(Bytes bytes, int power) {
        const Bytes two = _mm512_add_epi8(bytes, bytes);
        if (power == 1) return _mm512_add_epi8(two, bytes);
        const Bytes four = _mm512_add_epi8(two, two);
        return _mm512_add_epi8(_mm512_add_epi8(four, four), bytes);
    }
    static Bytes first_digits(Bytes bytes) {
        const __mmask64 one = _mm512_cmpgt_epu8_mask(bytes, _mm512_set1_epi8(85));
        const __mmask64 two = _mm512_cmpgt_epu8_mask(bytes, _mm512_set1_epi8(static_cast<char>(170)));
        return _mm512_mask_mov_epi8(_mm512_maskz_mov_epi8(one, _mm512_set1_epi8(1)), two, _mm512_set1_epi8(2));
    }
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes begin = twice(block);
        const Bytes first = _mm512_mask_mov_epi8(begin, 0xffffffff00000000, times(begin, 1));  // and its third
        const Bytes second = times(first, 2), third = times(second, 2);
        const __m128i b = sixteen_at(block + 32);
        const __m128i b3 = _mm_add_epi8(_mm_add_epi8(b, b), b);
        const __m256i both = _mm256_set_m128i(b3, b), four = _mm256_add_epi8(_mm256_add_epi8(both, both), _mm256_add_epi8(both, both));
        const __m256i ninth = _mm256_add_epi8(_mm256_add_epi8(four, four), both);  // times 9 and 27
        const __m128i b9 = _mm256_castsi256_si128(ninth), twice9 = _mm_add_epi8(b9, b9), four9 = _mm_add_epi8(twice9, twice9);
        uint8_t last[16];
        put_last(block, last);
        const __m256i end = _mm256_set_m128i(sixteen_at(last), _mm_add_epi8(_mm_add_epi8(four9, four9), b9));
        made.codes[0] = first_digits(first);
        made.codes[1] = first_digits(second);
        made.codes[2] = first_digits(_mm512_inserti64x4(third, both, 1));
        made.codes[3] = first_digits(_mm512_inserti64x4(_mm512_castsi256_si512(ninth), end, 1));
        Tq2::put_one_scale(block + 52, &made);
        return made;
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) { return Tq2::one_scale(block + 52); }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        typedef uint8_t Byte32 __attribute__((vector_size(32)));
        uint8_t bytes[32];
        std::memcpy(bytes, part < 5 ? block : block + 32, 16);
        std::memcpy(bytes + 16, part < 5 ? block + 16 : block + 32, 16);
        if (part == 7)
            for (int digit = 0; digit < 4; ++digit) std::memcpy(bytes + 16 + 4 * digit, block + 48, 4);
        Byte32 x, powers;
        std::memcpy(&x, bytes, sizeof x);
        std::memcpy(&powers, kTritPowers.of[part], sizeof powers);
        x *= powers;
        x = -((Byte32)(x > 85) + (Byte32)(x > 170));
        std::memcpy(bytes, &x, sizeof bytes);
        return bytes_at(bytes);
    }
#endif
};

}  // namespace
