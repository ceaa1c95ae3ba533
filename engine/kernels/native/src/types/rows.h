// What the types share: the loops over a row's blocks for the instruction set of the including file.
// Everything is local to that file, so that the linker never mixes them.
//
// A type has, besides what ggml_values.h says, for products in vectors of 512 bits, and again for those of fewer, either
//   wide(block)                 a block of 256: codes, a scale and a minimum per 16 of them (Wide); in narrower vectors without
//                               codes, of which codes(block, i) are 32
//   apart(blocks)               blocks of 64 or 128 that are 256: the same, but that scales have no common factor, and codes
//                               are kOffset too large (Apart)
//   four(blocks) or one(block)  four blocks of 32, or one: codes, a scale and an offset of each (Four, One)
// where kOneScale says that a block has but one, kSigns that signs are apart from codes (Wide::signs), and for panels
//   kWidth, kOffset, kMost      codes that share a scale; what makes them unsigned; the largest, 128 where they stay signed
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../ggml_values.h"
#include "../row_kernels.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Of small functions in inner loops: compilers call them, and pass what they return through memory.
#define SWITCHYARD_INLINE __attribute__((always_inline))

namespace {

// Scales and minima of Q4_K and Q5_K, 6 bits each in 12 bytes: a byte for each of eight groups.
template <class Word> inline Word upper_scales(Word a, Word c) { return (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030); }
template <class Word> inline Word upper_minima(Word b, Word c) { return (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030); }
inline void unpack_steps(const uint8_t *packed, uint64_t *scales, uint64_t *lowest) {
    const uint32_t a = u32_at(packed), b = u32_at(packed + 4), c = u32_at(packed + 8);
    uint32_t upper = upper_scales(a, c), lower = upper_minima(b, c);
    __asm__("" : "+r"(upper), "+r"(lower));  // compilers make slow vectors of these
    *scales = static_cast<uint64_t>(upper) << 32 | (a & 0x3f3f3f3f);
    *lowest = static_cast<uint64_t>(lower) << 32 | (b & 0x3f3f3f3f);
}

// Scales of Q3_K, 6 bits each in 12 bytes: 32 too large, a byte for each of sixteen groups.
template <class Word> inline void unpack_steps_of_16(Word a, Word b, Word c, Word *steps) {
    steps[0] = (a & 0x0f0f0f0f) | (c << 4 & 0x30303030), steps[1] = (b & 0x0f0f0f0f) | (c << 2 & 0x30303030);
    steps[2] = (a >> 4 & 0x0f0f0f0f) | (c & 0x30303030), steps[3] = (b >> 4 & 0x0f0f0f0f) | (c >> 2 & 0x30303030);
}

// Steps of IQ4_XS, 4 bits each in 4 bytes and 2 more in 2: 32 too large, a byte for each of eight groups.
inline uint64_t unpack_split_steps(const uint8_t *low, const uint8_t *high) {
    uint64_t nibbles = u32_at(low), pairs = u16_at(high);
    nibbles = (nibbles | nibbles << 16) & 0x0000ffff0000ffff;
    nibbles = (nibbles | nibbles << 8) & 0x00ff00ff00ff00ff;
    nibbles = (nibbles | nibbles << 4) & 0x0f0f0f0f0f0f0f0f;
    pairs = (pairs | pairs << 24) & 0x000000ff000000ff;
    pairs = (pairs | pairs << 12) & 0x000f000f000f000f;
    pairs = (pairs | pairs << 6) & 0x0303030303030303;
    return nibbles | pairs << 4;
}

template <class Type, class = void> constexpr bool kHasSigns = false;
template <class Type> constexpr bool kHasSigns<Type, std::void_t<decltype(Type::kSigns)>> = true;
template <class Type, class = void> constexpr bool kHasOneScale = false;
template <class Type> constexpr bool kHasOneScale<Type, std::void_t<decltype(Type::kOneScale)>> = true;
template <class Type, class = void> constexpr bool kIsApart = false;
template <class Type> constexpr bool kIsApart<Type, std::void_t<decltype(Type::kApart)>> = true;

template <class Type> constexpr int64_t kWideBytes = kWide / Type::kElements * Type::kBytes;  // of 256 weights

// The blocks of 256 weights at `row`, of which `left` are there: a copy in `room` with zeros behind them if they are fewer.
template <class Type> inline const uint8_t *whole_blocks(const uint8_t *row, int64_t left, uint8_t *room) {
    if (Type::kElements == kWide || left >= kWide) return row;
    std::memset(room, 0, static_cast<size_t>(kWideBytes<Type>));
    std::memcpy(room, row, static_cast<size_t>(left / Type::kElements * Type::kBytes));
    return room;
}

constexpr int64_t kAheadOfRow = 6144;  // bytes between a prefetch and its use: about what a core reads meanwhile
constexpr int kFetchTo = 2;            // the second cache: a core waits for fewer lines of the first than of that

}  // namespace

#if !defined(__AVX512VNNI__) && !defined(__AVX2__)
#include "lanes_128.h"
#endif

namespace {

#if defined(__AVX512VNNI__) || defined(__AVX2__)

// 16 whole numbers.
using Words = __m256i;
inline __m128i sixteen(uint64_t low, uint64_t high) { return _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low)); }
inline __m128i sixteen_at(const uint8_t *at) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)); }
inline Words words_of(uint64_t first, uint64_t second) { return _mm256_cvtepu8_epi16(sixteen(first, second)); }
inline Words words_of_pairs(uint64_t each) {  // of each byte, two
    const __m128i bytes = sixteen(each, 0);
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes));
}
inline Words words_of_low_nibbles(const uint8_t *at) {
    return _mm256_cvtepu8_epi16(_mm_and_si128(sixteen_at(at), _mm_set1_epi8(15)));
}
inline Words words_of_high_nibbles(const uint8_t *at) {
    return _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(sixteen_at(at), 4), _mm_set1_epi8(15)));
}
inline Words words_of_signed(const uint8_t *at) { return _mm256_cvtepi8_epi16(sixteen_at(at)); }
inline Words no_words() { return _mm256_setzero_si256(); }
inline Words subtracted(Words words, int number) { return _mm256_sub_epi16(words, _mm256_set1_epi16(static_cast<short>(number))); }
template <int bits> inline Words doubled(Words words) { return _mm256_slli_epi16(words, bits); }

#endif
// Of each, twice it and one.
inline Words odd_words(Words words) { return subtracted(doubled<1>(words), -1); }
#if defined(__AVX512VNNI__)

using Bytes = __m512i;

inline Bytes bytes_at(const void *at) { return _mm512_loadu_si512(at); }
// The same for what is used more than once: compilers would rather load it again.
inline Bytes held(Bytes bytes) {
    __asm__("" : "+v"(bytes));
    return bytes;
}
// 32 bytes of each, or 32 bytes twice.
inline Bytes joined(const void *a, const void *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i *>(a))),
                              _mm256_loadu_si256(static_cast<const __m256i *>(b)), 1);
}
inline Bytes twice(const void *at) { return held(_mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i *>(at)))); }
inline Bytes low_bits(Bytes bytes, int mask) { return _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(mask))); }
template <int bits> inline Bytes shifted(Bytes bytes) { return _mm512_srli_epi16(bytes, bits); }
// In the lower and in the upper half by as many bits to the right.
template <int lower, int upper> inline Bytes shifted_apart(Bytes bytes) {
    return _mm512_srlv_epi64(bytes, _mm512_set_epi64(upper, upper, upper, upper, lower, lower, lower, lower));
}
// The same, or to the left where negative, without losing any.
template <int lower, int upper> inline Bytes rotated(Bytes bytes) {
    return _mm512_rorv_epi64(bytes, _mm512_set_epi64(upper & 63, upper & 63, upper & 63, upper & 63, lower & 63, lower & 63,
                                                     lower & 63, lower & 63));
}
// first | (second & mask)
inline Bytes with_bits(Bytes first, Bytes second, int mask) {
    return _mm512_ternarylogic_epi64(first, second, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8);
}

// Of 16 rows, row(i) says where 32 bytes are -> take(j, four bytes of each row), the j-th four of them.
template <class Row, class Take> SWITCHYARD_INLINE inline void turn(Row row, Take take) {
    __m512i in[8], pairs[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) in[i] = joined(row(i / 4 * 8 + i % 4), row(i / 4 * 8 + i % 4 + 4));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    Bytes later[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const auto column = [&](int i) SWITCHYARD_INLINE {  // of rows i to i + 3 and i + 4 to i + 7
            const Bytes a = pairs[i + c / 2], b = pairs[i + 2 + c / 2];
            return c % 2 ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b);
        };
        const Bytes upper = column(0), lower = column(4);
        later[c] = _mm512_shuffle_i32x4(upper, lower, 0xdd);
        take(c, _mm512_shuffle_i32x4(upper, lower, 0x88));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) take(4 + c, later[c]);
}
// The same of 16 bytes.
template <class Row, class Take> SWITCHYARD_INLINE inline void turn_few(Row row, Take take) {
    __m512i in[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const auto two = [&](int at) SWITCHYARD_INLINE {
            return _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_at(row(at))), sixteen_at(row(at + 4)), 1);
        };
        in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(two(i)), two(i + 8), 1);
    }
    const Bytes even = _mm512_unpacklo_epi32(in[0], in[1]), odd = _mm512_unpackhi_epi32(in[0], in[1]);
    const Bytes more = _mm512_unpacklo_epi32(in[2], in[3]), most = _mm512_unpackhi_epi32(in[2], in[3]);
    take(0, _mm512_unpacklo_epi64(even, more));
    take(1, _mm512_unpackhi_epi64(even, more));
    take(2, _mm512_unpacklo_epi64(odd, most));
    take(3, _mm512_unpackhi_epi64(odd, most));
}
// A number of each of 16 rows, and four of them that lie side by side.
typedef uint32_t Turned __attribute__((vector_size(64)));
struct FourTurned {
    Turned of[4];
    SWITCHYARD_INLINE FourTurned(const uint8_t *const *rows, int64_t at) {
        turn_few([&](int row) SWITCHYARD_INLINE { return rows[row] + at; }, [&](int i, Bytes each) SWITCHYARD_INLINE { of[i] = (Turned)each; });
    }
};
inline __m512 turned_halves(Turned lower) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)lower)); }
// Bytes, or pairs of them, of each.  Put together in registers: what is stored in parts is not read in one piece as fast.
SWITCHYARD_INLINE inline __m128i bytes_of_each(const uint8_t *const *rows, int64_t at) {
    const auto byte = [&](int row) SWITCHYARD_INLINE { return static_cast<int>(rows[row][at]); };
    const auto eight = [&](int row) SWITCHYARD_INLINE {
        __m128i all = _mm_insert_epi8(_mm_cvtsi32_si128(byte(row)), byte(row + 1), 1);
        all = _mm_insert_epi8(_mm_insert_epi8(all, byte(row + 2), 2), byte(row + 3), 3);
        all = _mm_insert_epi8(_mm_insert_epi8(all, byte(row + 4), 4), byte(row + 5), 5);
        return _mm_insert_epi8(_mm_insert_epi8(all, byte(row + 6), 6), byte(row + 7), 7);
    };
    return _mm_unpacklo_epi64(eight(0), eight(8));
}
SWITCHYARD_INLINE inline __m512 turned_halves(const uint8_t *const *rows, int64_t at) {
    const auto half = [&](int row) SWITCHYARD_INLINE { return static_cast<int>(u16_at(rows[row] + at)); };
    const auto eight = [&](int row) SWITCHYARD_INLINE {
        __m128i all = _mm_insert_epi16(_mm_cvtsi32_si128(half(row)), half(row + 1), 1);
        all = _mm_insert_epi16(_mm_insert_epi16(all, half(row + 2), 2), half(row + 3), 3);
        all = _mm_insert_epi16(_mm_insert_epi16(all, half(row + 4), 4), half(row + 5), 5);
        return _mm_insert_epi16(_mm_insert_epi16(all, half(row + 6), 6), half(row + 7), 7);
    };
    return _mm512_cvtph_ps(_mm256_set_m128i(eight(8), eight(0)));
}
// The n-th byte of each, some of its bits, times a scale.
inline __m512 turned_step(Turned steps, int n, __m512 scale, int bits = 0, int mask = 255, int less = 0) {
    const Turned whole = (steps >> (8 * n + bits) & static_cast<uint32_t>(mask)) - static_cast<uint32_t>(less);
    return _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)whole), scale);
}
// To the right by a number of bits, or to the left where it is negative, round each 64 of them.
inline Bytes turned_by(Bytes bytes, int bits) { return _mm512_rorv_epi64(bytes, _mm512_set1_epi64(bits & 63)); }

// A block of 256, its codes in their order. Products of four neighbours are packed, two registers side by side, so that each 128
// bits have four words of the one and then four of the other: `first` and `second` are the words of scales that meet those of
// codes 0 and 1, and of 2 and 3.
struct Wide {
    Bytes codes[4], first, second;
    __m256i steps, mins;  // per 16 weights
    __m128 factors;       // the scale, and, beside it, that of minima
    __mmask64 signs[4];   // of codes that are to be negated, where a type has signs
    float scale() const { return _mm_cvtss_f32(factors); }
    float lowest() const { return _mm_cvtss_f32(_mm_movehdup_ps(factors)); }
};

inline __m128 two_halves(const uint8_t *at) { return _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(u32_at(at)))); }
inline __m128 one_half(const uint8_t *at) { return _mm_set_ss(half_at(at)); }

// The scales whose numbers are given for each 128 bits of a pack.
template <int a0, int b0, int a1, int b1, int a2, int b2, int a3, int b3> inline Bytes spread_scales(__m256i scales) {
    const __m512i which = _mm512_set_epi16(b3, b3, b3, b3, a3, a3, a3, a3, b2, b2, b2, b2, a2, a2, a2, a2, b1, b1, b1, b1, a1,
                                           a1, a1, a1, b0, b0, b0, b0, a0, a0, a0, a0);
    return _mm512_permutexvar_epi16(which, _mm512_castsi256_si512(scales));
}

// With Type::kLowest minima have a scale of their own; without they count in steps of the block's, as far as an offset of the
// codes makes them.
template <class Type, int count> void dot_wide(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m512 sums[count];
    __m256 less[count];
    for (int v = 0; v < count; ++v) sums[v] = _mm512_setzero_ps(), less[v] = _mm256_setzero_ps();
    const __m512i none = _mm512_setzero_si512();
    for (int64_t block = 0; block * kWide < columns; ++block, row += Type::kBytes) {
        for (int64_t at = 0; at < Type::kBytes; at += 64)
            __builtin_prefetch(row + at + kAheadOfRow, 0, kFetchTo);
        const Wide wide = Type::wide(row);
        for (int v = 0; v < count; ++v) {
            const int8_t *q = x[v].q + block * kWide;
            __m512i products[4];
            for (int j = 0; j < 4; ++j) {
                Bytes values = bytes_at(q + 64 * j);
                if constexpr (kHasSigns<Type>) values = _mm512_mask_sub_epi8(values, wide.signs[j], none, values);
                products[j] = _mm512_dpbusd_epi32(kHasOneScale<Type> && j > 1 ? products[j - 2] : none, wide.codes[j], values);
            }
            __m512i whole;
            if constexpr (kHasOneScale<Type>) {
                whole = _mm512_add_epi32(products[2], products[3]);
            } else if constexpr (Type::kLarge) {  // products do not fit words
                whole = _mm512_setzero_si512();
                const __m512i first = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(wide.first));
                const __m512i second = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(wide.first, 1));
                const __m512i third = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(wide.second));
                const __m512i fourth = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(wide.second, 1));
                whole = _mm512_add_epi32(
                    _mm512_add_epi32(_mm512_mullo_epi32(products[0], first), _mm512_mullo_epi32(products[1], second)),
                    _mm512_add_epi32(_mm512_mullo_epi32(products[2], third), _mm512_mullo_epi32(products[3], fourth)));
            } else {
                whole = _mm512_dpwssd_epi32(none, _mm512_packs_epi32(products[0], products[1]), wide.first);
                whole = _mm512_dpwssd_epi32(whole, _mm512_packs_epi32(products[2], products[3]), wide.second);
            }
            const __m128 scales = _mm_mul_ps(wide.factors, _mm_set1_ps(x[v].scales[block]));
            if constexpr (!kHasSigns<Type>) {
                const auto *parts = reinterpret_cast<const __m256i *>(x[v].parts + block * (kWide / kPart));
                const __m256i below = _mm256_madd_epi16(wide.mins, _mm256_loadu_si256(parts));
                if constexpr (Type::kLowest)
                    less[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(below), _mm256_broadcastss_ps(_mm_movehdup_ps(scales)), less[v]);
                else
                    whole = _mm512_sub_epi32(whole, _mm512_zextsi256_si512(below));
            }
            sums[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_broadcastss_ps(scales), sums[v]);
        }
    }
    for (int v = 0; v < count; ++v) {
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[v]), 1));
        const __m256 lower = _mm256_sub_ps(_mm512_castps512_ps256(sums[v]), less[v]);
        const __m256 both = _mm256_add_ps(lower, upper);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[v] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
}

// Blocks that make 256 weights: codes in their order, and a scale per 16 of them.
struct Apart {
    Bytes codes[4];
    __m512 scales;
};

template <class Type, int count> void dot_apart(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m512 sums[count];
    for (int v = 0; v < count; ++v) sums[v] = _mm512_setzero_ps();
    const __m512i none = _mm512_setzero_si512(), lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    uint8_t room[kWideBytes<Type>];
    for (int64_t block = 0; block * kWide < columns; ++block, row += kWideBytes<Type>) {
        for (int64_t at = 0; at < kWideBytes<Type>; at += 64) __builtin_prefetch(row + at + kAheadOfRow, 0, kFetchTo);
        const Apart apart = Type::apart(whole_blocks<Type>(row, columns - block * kWide, room));
        __m512 scales[4];
        for (int j = 0; j < 4; ++j) scales[j] = _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(4 * j)), apart.scales);
        const __m512 offsets = _mm512_mul_ps(apart.scales, _mm512_set1_ps(Type::kOffset));
        for (int v = 0; v < count; ++v) {
            const int8_t *q = x[v].q + block * kWide;
            const __m256i parts = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x[v].parts + block * (kWide / kPart)));
            __m512 whole = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(parts)), _mm512_sub_ps(_mm512_setzero_ps(), offsets));
            for (int j = 0; j < 4; ++j) {
                const __m512i products = _mm512_dpbusd_epi32(none, apart.codes[j], bytes_at(q + 64 * j));
                whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scales[j], whole);
            }
            sums[v] = _mm512_fmadd_ps(whole, _mm512_set1_ps(x[v].scales[block]), sums[v]);
        }
    }
    for (int v = 0; v < count; ++v) out[v] = _mm512_reduce_add_ps(sums[v]);
}

// Four blocks of 32: codes in their order, a weight is scale * code + offset.
struct Four {
    Bytes codes[2];
    __m128 scales, offsets;
};

// Four pairs of nibbles of 16 bytes -> codes in their order.
inline void codes_of_nibbles(Bytes pairs, Bytes *codes) {
    const Bytes low = low_bits(pairs, 15), high = low_bits(shifted<4>(pairs), 15);
    codes[0] = _mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high);
    codes[1] = _mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), high);
}
// Eight groups of 32 whose pairs of nibbles lie at at, at + step, ... -> put(group, 0, j, code(nibbles)).
template <class Code, class Put>
SWITCHYARD_INLINE inline void turn_nibbles(const uint8_t *const *rows, int64_t at, int64_t step, Code code, Put put) {
    for (int group = 0; group < 8; ++group) {
        Bytes pairs[4];
        turn_few([&](int row) SWITCHYARD_INLINE { return rows[row] + at + group * step; }, [&](int j, Bytes q) SWITCHYARD_INLINE { pairs[j] = q; });
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) put(group, 0, j, code(low_bits(j < 4 ? pairs[j] : shifted<4>(pairs[j - 4]), 15)));
    }
}
// 16 bytes at each of four places.
inline Bytes four_at(const uint8_t *at, int64_t step) {
    const auto one = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at + i * step)); };
    const __m256i lower = _mm256_inserti128_si256(_mm256_castsi128_si256(one(0)), one(1), 1);
    const __m256i upper = _mm256_inserti128_si256(_mm256_castsi128_si256(one(2)), one(3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
}
inline __m128 four_halves(const uint8_t *at, int64_t step) {
    const uint64_t bits = u16_at(at) | static_cast<uint64_t>(u16_at(at + step)) << 16 |
                          static_cast<uint64_t>(u16_at(at + 2 * step)) << 32 | static_cast<uint64_t>(u16_at(at + 3 * step)) << 48;
    return _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<long long>(bits)));
}

template <class Type, int count> void dot_four(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m512 sums[count];
    __m128 offsets[count];
    for (int v = 0; v < count; ++v) sums[v] = _mm512_setzero_ps(), offsets[v] = _mm_setzero_ps();
    const __m512i none = _mm512_setzero_si512(), lanes = _mm512_set_epi32(3, 3, 1, 1, 3, 3, 1, 1, 2, 2, 0, 0, 2, 2, 0, 0);
    const auto add = [&](const Four &four, int64_t group) {
        const __m512 scales = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(four.scales));
        for (int v = 0; v < count; ++v) {
            const int8_t *q = x[v].q + group * kGroup;
            const __m512i first = _mm512_dpbusd_epi32(none, four.codes[0], bytes_at(q));
            const __m512i second = _mm512_dpbusd_epi32(none, four.codes[1], bytes_at(q + 64));
            // Pairs are added: in each 128 bits two sums of a block of the first and two of one of the second.
            const __m512i whole = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
            const __m128 own = _mm_loadu_ps(x[v].scales + group);
            const __m512 spread = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(own));
            sums[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scales, spread), sums[v]);
            const __m128 total = _mm_cvtepi32_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x[v].sums + group)));
            offsets[v] = _mm_fmadd_ps(_mm_mul_ps(four.offsets, own), total, offsets[v]);
        }
    };
    const int64_t groups = columns / kGroup;
    int64_t group = 0;
    for (; group + 4 <= groups; group += 4, row += 4 * Type::kBytes) {
        for (int64_t at = 0; at < 4 * Type::kBytes; at += 64)
            __builtin_prefetch(row + at + kAheadOfRow, 0, kFetchTo);
        add(Type::four(row), group);
    }
    if (group < groups) {
        uint8_t last[4 * Type::kBytes] = {};
        std::memcpy(last, row, static_cast<size_t>((groups - group) * Type::kBytes));
        add(Type::four(last), group);
    }
    for (int v = 0; v < count; ++v) {
        const __m256 both = _mm256_add_ps(_mm512_castps512_ps256(sums[v]),
                                          _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[v]), 1)));
        __m128 four = _mm_add_ps(_mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)), offsets[v]);
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[v] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
}

inline Bytes table_of(const int8_t *table) {
    const __m128i sixteen_values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return _mm512_broadcast_i32x4(sixteen_values);
}
// Signed bytes as unsigned ones, 128 too large.
constexpr int kRaised = 128;
inline Bytes raised(Bytes bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }

#elif defined(__AVX2__)

using Bytes = __m256i;

inline Bytes bytes_at(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }
inline Bytes low_bits(Bytes bytes, int mask) { return _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(mask))); }
inline Bytes shifted(Bytes bytes, int bits) { return _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(bits)); }
inline Bytes shifted_left(Bytes bytes, int bits) { return _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(bits)); }
inline Bytes joined(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes added(Bytes bytes, int number) { return _mm256_add_epi8(bytes, _mm256_set1_epi8(static_cast<char>(number))); }
inline void put_bytes(Bytes bytes, uint8_t *to) { _mm256_store_si256(reinterpret_cast<__m256i *>(to), bytes); }
inline Bytes four_words(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return _mm256_set_epi64x(static_cast<long long>(d), static_cast<long long>(c), static_cast<long long>(b), static_cast<long long>(a));
}
// Of each of 8 bytes the four pairs of bits, the lowest first.
inline Bytes pairs_of_bits(const uint8_t *at) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
    const __m256i upper = _mm256_or_si256(_mm256_slli_epi32(x, 12), _mm256_slli_epi32(x, 18));
    return low_bits(_mm256_or_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 6)), upper), 3);
}
// `value` where a bit is set.
inline Bytes where_set(uint32_t set, uint8_t value) {
    const __m256i which = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(set)), which);
    const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    return low_bits(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits), value);
}

// -1 where a bit is set, else 1.
inline Bytes signs_of(uint32_t set) { return _mm256_or_si256(where_set(set, 255), _mm256_set1_epi8(1)); }
inline Bytes with_signs(Bytes codes, uint32_t set) { return _mm256_sign_epi8(codes, signs_of(set)); }

// A block of 256: Type::codes(block, i) are 32 of them.
struct Wide {
    Words steps, mins;  // per 16 codes
    float of_codes, of_mins;
    uint32_t signs[8] = {};  // of each 32 codes those that are to be negated, where a type has signs
    float scale() const { return of_codes; }
    float lowest() const { return of_mins; }
};

// The scales of 32 codes, eight words of each.
template <int part> inline __m256i spread_scales(__m256i scales) {
    // Words 0 to 7 lie in the lower half, and 8 to 15 in the upper one.
    const __m256i half = _mm256_permute4x64_epi64(scales, part < 4 ? 0x44 : 0xee);
    constexpr int first = part % 4 * 4, second = first + 2;
    constexpr int lower = first | (first + 1) << 8, upper = second | (second + 1) << 8;
    const __m256i which = _mm256_set_m128i(_mm_set1_epi16(static_cast<short>(upper)), _mm_set1_epi16(static_cast<short>(lower)));
    return _mm256_shuffle_epi8(half, which);
}

template <class Type, int part> inline void add_part(const uint8_t *row, const Wide &wide, const RowVector *x, int count, int64_t at,
                                                     __m256i *whole) {
    const __m256i codes = Type::codes(row, part), scales = spread_scales<part>(wide.steps);
    const __m256i signs = kHasSigns<Type> ? signs_of(wide.signs[part]) : codes;
    for (int v = 0; v < count; ++v) {
        const __m256i q = bytes_at(x[v].q + at + part * 32);
        __m256i pairs;
        if constexpr (kHasSigns<Type>)
            pairs = _mm256_maddubs_epi16(codes, _mm256_sign_epi8(q, signs));
        else
            pairs = Type::kLarge ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(q, codes))
                                 : _mm256_maddubs_epi16(codes, q);
        whole[v] = _mm256_add_epi32(whole[v], _mm256_madd_epi16(pairs, scales));
    }
}

template <class Type, int count> void dot_wide(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m256 sums[count], less[count];
    for (int v = 0; v < count; ++v) sums[v] = less[v] = _mm256_setzero_ps();
    for (int64_t block = 0; block * kWide < columns; ++block, row += Type::kBytes) {
        for (int64_t at = 0; at < Type::kBytes; at += 64)
            __builtin_prefetch(row + at + kAheadOfRow, 0, kFetchTo);
        const Wide wide = Type::wide(row);
        const int64_t at = block * kWide;
        __m256i whole[count];
        for (int v = 0; v < count; ++v) whole[v] = _mm256_setzero_si256();
        add_part<Type, 0>(row, wide, x, count, at, whole);
        add_part<Type, 1>(row, wide, x, count, at, whole);
        add_part<Type, 2>(row, wide, x, count, at, whole);
        add_part<Type, 3>(row, wide, x, count, at, whole);
        add_part<Type, 4>(row, wide, x, count, at, whole);
        add_part<Type, 5>(row, wide, x, count, at, whole);
        add_part<Type, 6>(row, wide, x, count, at, whole);
        add_part<Type, 7>(row, wide, x, count, at, whole);
        for (int v = 0; v < count; ++v) {
            const float scale = x[v].scales[block];
            if constexpr (!Type::kLarge && !kHasSigns<Type>) {
                const __m256i below = _mm256_madd_epi16(wide.mins, bytes_at(x[v].parts + at / kPart));
                if constexpr (Type::kLowest)
                    less[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(below), _mm256_set1_ps(wide.lowest() * scale), less[v]);
                else
                    whole[v] = _mm256_sub_epi32(whole[v], below);
            }
            sums[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[v]), _mm256_set1_ps(wide.scale() * scale), sums[v]);
        }
    }
    for (int v = 0; v < count; ++v) {
        const __m256 both = _mm256_sub_ps(sums[v], less[v]);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[v] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
}

// Blocks that make 256 weights, whose codes are Type::codes(block, i): a scale per 16 of them.
struct Apart {
    float scales[16];
};

template <class Type, int count> void dot_apart(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m256 sums[count];
    for (int v = 0; v < count; ++v) sums[v] = _mm256_setzero_ps();
    const __m256i ones = _mm256_set1_epi16(1);
    uint8_t room[kWideBytes<Type>];
    for (int64_t block = 0; block * kWide < columns; ++block, row += kWideBytes<Type>) {
        for (int64_t at = 0; at < kWideBytes<Type>; at += 64) __builtin_prefetch(row + at + kAheadOfRow, 0, kFetchTo);
        const uint8_t *blocks = whole_blocks<Type>(row, columns - block * kWide, room);
        const Apart apart = Type::apart(blocks);
        __m256 whole[count];
        for (int half = 0; half < 2; ++half) {
            const __m256 offsets = _mm256_mul_ps(_mm256_loadu_ps(apart.scales + 8 * half), _mm256_set1_ps(-Type::kOffset));
            for (int v = 0; v < count; ++v) {
                const auto *parts = reinterpret_cast<const __m128i *>(x[v].parts + block * (kWide / kPart) + 8 * half);
                const __m256 below = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(parts))), offsets);
                whole[v] = half ? _mm256_add_ps(whole[v], below) : below;
            }
        }
        for (int part = 0; part < 8; ++part) {
            const __m256i codes = Type::codes(blocks, part);
            const __m256 scales = _mm256_set_m128(_mm_set1_ps(apart.scales[2 * part + 1]), _mm_set1_ps(apart.scales[2 * part]));
            for (int v = 0; v < count; ++v) {
                const __m256i pairs = _mm256_maddubs_epi16(codes, bytes_at(x[v].q + block * kWide + part * 32));
                whole[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones)), scales, whole[v]);
            }
        }
        for (int v = 0; v < count; ++v) sums[v] = _mm256_fmadd_ps(whole[v], _mm256_set1_ps(x[v].scales[block]), sums[v]);
    }
    for (int v = 0; v < count; ++v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums[v]), _mm256_extractf128_ps(sums[v], 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[v] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
}

// A block of 32: a weight is scale * code + offset.
struct One {
    Bytes codes;
    float scale, offset;
};

inline Bytes codes_of_nibbles(const uint8_t *pairs) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(pairs));
    return low_bits(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), 15);
}

template <class Type, int count> void dot_four(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    __m256 sums[count];
    float offsets[count] = {};
    for (int v = 0; v < count; ++v) sums[v] = _mm256_setzero_ps();
    const __m256i ones = _mm256_set1_epi16(1);
    const int64_t groups = columns / kGroup;
    for (int64_t group = 0; group < groups; ++group, row += Type::kBytes) {
        __builtin_prefetch(row + kAheadOfRow, 0, kFetchTo);
        const One one = Type::one(row);
        for (int v = 0; v < count; ++v) {
            const __m256i q = bytes_at(x[v].q + group * kGroup);
            const __m256i pairs = Type::kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(one.codes), _mm256_sign_epi8(q, one.codes))
                                                : _mm256_maddubs_epi16(one.codes, q);
            const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
            sums[v] = _mm256_fmadd_ps(whole, _mm256_set1_ps(one.scale * x[v].scales[group]), sums[v]);
            if constexpr (!Type::kSigned)
                offsets[v] += one.offset * x[v].scales[group] * static_cast<float>(x[v].sums[group]);
        }
    }
    for (int v = 0; v < count; ++v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums[v]), _mm256_extractf128_ps(sums[v], 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        out[v] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four))) + offsets[v];
    }
}

inline Bytes table_of(const int8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }

#endif

}  // namespace
