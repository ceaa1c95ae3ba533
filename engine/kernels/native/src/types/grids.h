// What the IQ types share: grids, which a code's words are positions in, and signs apart.
#pragma once
#include "q2_k.h"

namespace {

#define SWITCHYARD_GRID constexpr
#include "../../../../formats/grids.h"
#undef SWITCHYARD_GRID

constexpr uint64_t kIq2Values = 0x2b1908, kIq3XxsValues = 0x3e342c241c140c04, kIq3SValues = 0x0f0d0b0907050301;  // a byte each

// Positions' weights as bytes: eight of 2 bits, or four of 3 bits.
template <int count, int bits, class Word> struct Grid {
    Word of[count];
    constexpr Grid(const unsigned short (&words)[count], uint64_t values) : of() {
        for (int position = 0; position < count; ++position)
            for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) {
                const int code = words[position] >> (bits * i) & ((1 << bits) - 1);
                of[position] |= static_cast<Word>((values >> (8 * code) & 255) << (8 * i));
            }
    }
};
template <int count> using Eight = Grid<count, 2, uint64_t>;
template <int count> using Four3 = Grid<count, 3, uint32_t>;

// Bits of 7 get an eighth, so that there is an even number of them; `ones` has a 1 in each.
template <class Vector, class Number> inline void put_parity(Vector &bytes, Number ones) {
    Vector odd = bytes ^ (bytes >> 4 & static_cast<Number>(ones * 15));
    odd ^= odd >> 2 & static_cast<Number>(ones * 3);
    odd ^= odd >> 1;
    bytes |= (odd & ones) << 7;
}

// Of eight words, of 32 weights each: four times 7 bits of signs -> a bit for each weight, and 4 bits of a step -> steps.
inline Words spread_signs(const uint32_t (&words)[8], void *signs) {
    typedef uint32_t Words8 __attribute__((vector_size(32)));
    Words8 x;
    std::memcpy(&x, words, sizeof x);
    const Words8 pairs = (x >> 28) * 0x10001u;
    x = (x & 0x7f) | (x << 1 & 0x7f00) | (x << 2 & 0x7f0000) | (x << 3 & 0x7f000000);
    put_parity(x, 0x01010101u);
    std::memcpy(signs, &x, sizeof x);
    Words steps;
    static_assert(sizeof steps == sizeof pairs, "sixteen words");
    std::memcpy(&steps, &pairs, sizeof steps);
    return odd_words(steps);
}

// Nibbles of four bytes as bytes, low ones first.
inline uint64_t spread_nibbles(uint32_t packed) {
    uint64_t x = packed;
    x = (x | x << 16) & 0x0000ffff0000ffff;
    x = (x | x << 8) & 0x00ff00ff00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}
// Those of eight bytes, of 16 weights each, as steps.
inline Words nibble_steps(const uint8_t *packed) {
    return odd_words(words_of(spread_nibbles(u32_at(packed)), spread_nibbles(u32_at(packed + 4))));
}

#if defined(__AVX512VNNI__)

// Eight words of a grid of 512 or more, which are found faster in memory than in registers.
SWITCHYARD_INLINE inline Bytes eights_at(const uint64_t *grid, const uint16_t *positions) {
    const auto two = [&](int i) SWITCHYARD_INLINE {
        const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(grid + positions[i]));
        return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(first), reinterpret_cast<const __m64 *>(grid + positions[i + 1])));
    };
    const __m256i lower = _mm256_set_m128i(two(2), two(0)), upper = _mm256_set_m128i(two(6), two(4));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
}

inline __m128 an_eighth(const uint8_t *half) { return _mm_set_ss(half_at(half) * 0.125f); }

inline void put_signs(const void *of_bytes, Wide *wide) {
    uint64_t signs[4];
    std::memcpy(signs, of_bytes, sizeof signs);
    for (int j = 0; j < 4; ++j) wide->signs[j] = signs[j];
}

// A grid as words to be looked up in registers.
template <int count> struct Lines {
    alignas(64) uint16_t of[count];
    constexpr explicit Lines(const unsigned short (&words)[count]) : of() {
        for (int i = 0; i < count; ++i) of[i] = words[i];
    }
};
// The same with four codes of 3 bits as nibbles.
template <int count> struct NibbleLines {
    alignas(64) uint16_t of[count];
    constexpr explicit NibbleLines(const unsigned short (&words)[count]) : of() {
        for (int i = 0; i < count; ++i)
            for (int code = 0; code < 4; ++code) of[i] = static_cast<uint16_t>(of[i] | (words[i] >> (3 * code) & 7) << (4 * code));
    }
};

// The words of 32 positions.
template <int count> inline Bytes look_up_lines(const uint16_t *lines, Bytes positions) {
    if constexpr (count == 64) {
        return _mm512_permutex2var_epi16(_mm512_load_si512(lines), positions, _mm512_load_si512(lines + 32));
    } else {
        const Bytes low = look_up_lines<count / 2>(lines, positions), high = look_up_lines<count / 2>(lines + count / 2, positions);
        return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(positions, _mm512_set1_epi16(count / 2)), low, high);
    }
}

// Pairs of positions, in the order in which `put_eights` has codes in theirs.
inline Bytes in_turn_of_pairs(Bytes positions) {
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), positions);
}
// Eight codes of 2 bits in each of 32 words -> what they stand for.
inline void put_eights(Bytes words, uint64_t values, Wide *wide) {
    const Bytes table = _mm512_set1_epi32(static_cast<int>(values));
    const auto codes = [&](int bits) { return low_bits(_mm512_srli_epi16(words, static_cast<unsigned>(bits)), 3); };
    const Bytes first = codes(0), second = codes(2), third = codes(4), fourth = codes(6);
    const Bytes low[2] = {_mm512_unpacklo_epi8(first, second), _mm512_unpackhi_epi8(first, second)};
    const Bytes high[2] = {_mm512_unpacklo_epi8(third, fourth), _mm512_unpackhi_epi8(third, fourth)};
    for (int half = 0; half < 2; ++half) {
        wide->codes[2 * half] = look_up(table, _mm512_unpacklo_epi16(low[half], high[half]));
        wide->codes[2 * half + 1] = look_up(table, _mm512_unpackhi_epi16(low[half], high[half]));
    }
}

// Fours of positions as bytes, in the order in which `put_fours` has codes in theirs.
inline Bytes in_turn_of_fours(Bytes positions) {
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), positions);
}
// Four codes in nibbles of each of 32 words -> what they stand for.
inline void put_fours(Bytes words, uint64_t values, Bytes *to) {
    const Bytes table = _mm512_set1_epi64(static_cast<long long>(values));
    const Bytes low = low_bits(words, 15), high = low_bits(shifted<4>(words), 15);
    to[0] = look_up(table, _mm512_unpacklo_epi8(low, high));
    to[1] = look_up(table, _mm512_unpackhi_epi8(low, high));
}

#else

inline float an_eighth(const uint8_t *half) { return half_at(half) * 0.125f; }

template <class Position> SWITCHYARD_INLINE inline Bytes eights_at(const uint64_t *grid, Position position) {
    return four_words(grid[position(0)], grid[position(1)], grid[position(2)], grid[position(3)]);
}
template <class Position> SWITCHYARD_INLINE inline Bytes fours_at(const uint32_t *grid, Position position) {
    const auto pair = [&](int i) SWITCHYARD_INLINE { return grid[position(2 * i)] | static_cast<uint64_t>(grid[position(2 * i + 1)]) << 32; };
    return four_words(pair(0), pair(1), pair(2), pair(3));
}

#endif

}  // namespace
