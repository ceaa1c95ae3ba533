// A block of 32 rows unpacked once for many vectors: in tiles, of which a column's four bytes of a vector meet those of 16 rows.
#pragma once
#include <algorithm>
#include <type_traits>

#include "rows.h"

namespace {

constexpr int64_t kPanelRows = 32;

// The sum of a vector's values that meet one scale.
template <bool wide, int width> inline int32_t total_of(const RowVector &x, int64_t group, int part) {
    if constexpr (!wide) return x.sums[group];
    if constexpr (width == kPart) return x.parts[2 * group + part];
    return x.parts[2 * group] + x.parts[2 * group + 1];
}

#if defined(__AVX512VNNI__)

constexpr int64_t kTogether = 4;  // blocks of 32 that are unpacked together
constexpr int kFewest = 4;        // vectors from which a panel pays
constexpr int64_t kMostMultiplied = 5;
template <class Type> constexpr int kFit = 0;  // products are added as whole numbers of 32 bits
template <class Type> constexpr int kLarger = 0;  // what `put_together` adds to codes

// What a type has beyond `wide`, `apart` or `four`, of 256 weights of 16 rows side by side:
//   turned(rows, put)        calls put(group, slot, j, codes) with columns 32 * group + 4 * j to + 3, j in order, and groups whose calls
//                            are mixed in slots of their own, fewer than kSlots
//   turned_steps(rows, put)  calls put(i, scales, minima) for the i-th that share a scale
struct NoPut {
    template <class... Any> void operator()(Any...) const {}
};
template <class Type, class = void> constexpr bool kTurns = false;
template <class Type>
constexpr bool kTurns<Type, std::void_t<decltype(Type::turned(nullptr, NoPut()))>> = true;
template <class Type, class = void> constexpr bool kTurnsSteps = false;
template <class Type>
constexpr bool kTurnsSteps<Type, std::void_t<decltype(Type::turned_steps(nullptr, NoPut()))>> = true;

// 256 columns of all rows from `at` on to their place: tiles, of which each half of 16 rows has eight vectors.
inline void put_tiles(const uint8_t *codes, const RowPanel &panel, int64_t at, int64_t) {
    for (int64_t column = 0; column < kWide; column += kGroup)
        for (int64_t half = 0; half < 2; ++half) {
            uint8_t *to = panel.codes + (at + column) * kPanelRows + half * 512;
            turn([&](int row) SWITCHYARD_INLINE { return codes + (half * 16 + row) * kWide + column; },
                 [&](int j, Bytes q) SWITCHYARD_INLINE { _mm512_store_si512(to + j * 64, q); });
        }
}

// Every `step`-th of 16 numbers of 16 rows, of each number those of all rows side by side.
template <int step> void put_numbers(const float *numbers, int64_t count, float *to, int64_t stride) {
    for (int64_t at = 0; at < count * step; at += 8)
        turn([&](int row) SWITCHYARD_INLINE { return numbers + row * kPart + at; }, [&](int i, Bytes each) SWITCHYARD_INLINE {
            if (i % step == 0) _mm512_store_si512(to + (at + i) / step * stride, each);
        });
}

template <class Type> void put_wide(const uint8_t *, const Wide &wide, uint8_t *to) {
    for (int j = 0; j < 4; ++j) {
        Bytes codes = wide.codes[j];
        if constexpr (kHasSigns<Type>) codes = raised(_mm512_mask_sub_epi8(codes, wide.signs[j], _mm512_setzero_si512(), codes));
        _mm512_store_si512(to + 64 * j, codes);
    }
}
template <class Type> void put_apart(const uint8_t *, const Apart &apart, uint8_t *to, float *scales) {
    for (int j = 0; j < 4; ++j) _mm512_store_si512(to + 64 * j, apart.codes[j]);
    _mm512_store_ps(scales, apart.scales);
}

inline void put_floats(__m256i words, float scale, float *to) {
    _mm512_store_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)), _mm512_set1_ps(scale)));
}

template <class Type, bool with_codes = true> void put_together(const uint8_t *blocks, uint8_t *to, float *scales, float *offsets) {
    const Four four = Type::four(blocks);
    if constexpr (with_codes) _mm512_store_si512(to, four.codes[0]), _mm512_store_si512(to + 64, four.codes[1]);
    _mm_store_ps(scales, four.scales);
    _mm_store_ps(offsets, four.offsets);
}

// The sums of 256 values, each of those that meet one minimum, as numbers that an instruction can spread.
template <int width> inline void totals_of_block(const int16_t *parts, float *out) {
    const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(parts));
    if constexpr (width == kPart)
        _mm512_store_ps(out, _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(sums)));
    else
        _mm256_store_ps(out, _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))));
}

template <int count, bool wide, bool has_mins, int width, int>
void multiply_some(const RowPanel &panel, int64_t columns, const RowVector *x, float *out) {
    alignas(64) float block_totals[wide && has_mins ? count : 1][kWide / kPart];
    __m512 sums[count][2], before[wide ? count : 1][2];  // a vector's scale of 256 is multiplied with at the end of those
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm512_setzero_ps();
    for (auto &vector : before)
        for (auto &sum : vector) sum = _mm512_setzero_ps();
    const uint8_t *codes = panel.codes;
    const float *scales = panel.scales, *mins = panel.mins;
    for (int64_t group = 0; group * kGroup < columns; ++group, codes += 1024) {
        if constexpr (wide && has_mins)
            if (group % (kWide / kGroup) == 0)
                for (int v = 0; v < count; ++v) totals_of_block<width>(x[v].parts + 2 * group, block_totals[v]);
        for (int part = 0; part < kGroup / width; ++part, scales += kPanelRows, mins += kPanelRows) {
            __m512i products[count][2];
            float totals[count];
            const int64_t in_block = group % (kWide / kGroup) * (kGroup / width) + part;
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                __m512i start = _mm512_setzero_si512();
                if constexpr (wide && has_mins)
                    totals[v] = block_totals[v][in_block];
                else if constexpr (has_mins)
                    totals[v] = x[v].scales[group] * static_cast<float>(x[v].sums[group]);
                else
                    start = _mm512_set1_epi32(-panel.offset * total_of<wide, width>(x[v], group, part));
                products[v][0] = products[v][1] = start;
            }
#pragma GCC unroll 8
            for (int j = part * width / 4; j < (part + 1) * width / 4; ++j) {
                const __m512i upper = _mm512_load_si512(codes + 64 * j), lower = _mm512_load_si512(codes + 512 + 64 * j);
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v) {
                    int32_t four;
                    std::memcpy(&four, x[v].q + group * kGroup + 4 * j, 4);
                    const __m512i values = _mm512_set1_epi32(four);
                    products[v][0] = _mm512_dpbusd_epi32(products[v][0], upper, values);
                    products[v][1] = _mm512_dpbusd_epi32(products[v][1], lower, values);
                }
            }
            const __m512 scale[2] = {_mm512_load_ps(scales), _mm512_load_ps(scales + 16)};
            __m512 least[2];
            if constexpr (has_mins) least[0] = _mm512_load_ps(mins), least[1] = _mm512_load_ps(mins + 16);
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                const float own = wide ? 1.0f : x[v].scales[group];
                for (int half = 0; half < 2; ++half) {
                    const __m512 spread = wide ? scale[half] : _mm512_mul_ps(scale[half], _mm512_set1_ps(own));
                    sums[v][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[v][half]), spread, sums[v][half]);
                    if constexpr (has_mins)
                        sums[v][half] = _mm512_fmadd_ps(least[half], _mm512_set1_ps(totals[v]), sums[v][half]);
                }
            }
        }
        if constexpr (wide)
            if ((group + 1) % (kWide / kGroup) == 0 || (group + 1) * kGroup == columns)
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v)
                    for (int half = 0; half < 2; ++half) {
                        const __m512 own = _mm512_set1_ps(x[v].scales[group / (kWide / kGroup)]);
                        before[v][half] = _mm512_fmadd_ps(sums[v][half], own, before[v][half]);
                        sums[v][half] = _mm512_setzero_ps();
                    }
    }
    for (int v = 0; v < count; ++v) {
        _mm512_storeu_ps(out + v * kPanelRows, wide ? before[wide ? v : 0][0] : sums[v][0]);
        _mm512_storeu_ps(out + v * kPanelRows + 16, wide ? before[wide ? v : 0][1] : sums[v][1]);
    }
}

#else

constexpr int64_t kTogether = 1;
constexpr int kFewest = kMostRowVectors + 1;
constexpr int64_t kMostMultiplied = 4;
template <class Type> constexpr bool kTurns = false;

// Every `step`-th of 16 numbers of 16 rows, of each number those of all rows side by side.
template <int step> void put_numbers(const float *numbers, int64_t count, float *to, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row, numbers += kPart)
        for (int64_t i = 0; i < count; ++i) to[i * stride + row] = numbers[i * step];
}

template <class Type> constexpr int kLarger = Type::kSigned ? Type::kOffset : 0;

template <class Type> void put_wide(const uint8_t *block, const Wide &wide, uint8_t *to) {
    for (int part = 0; part < 8; ++part) {
        Bytes codes = Type::codes(block, part);
        if constexpr (kHasSigns<Type>) codes = with_signs(codes, wide.signs[part]);
        put_bytes(codes, to + 32 * part);
    }
}
template <class Type> void put_apart(const uint8_t *blocks, const Apart &apart, uint8_t *to, float *scales) {
    for (int part = 0; part < 8; ++part) put_bytes(Type::codes(blocks, part), to + 32 * part);
    std::memcpy(scales, apart.scales, sizeof apart.scales);
}

template <class Type, bool with_codes = true> void put_together(const uint8_t *block, uint8_t *to, float *scales, float *offsets) {
    const One one = Type::one(block);
    put_bytes(added(one.codes, kLarger<Type>), to);
    *scales = one.scale;
    *offsets = one.offset;
}

#if defined(__AVX2__)
// Products of pairs of columns, of which so many are added as words.
template <class Type> constexpr int kFit = 32767 / (2 * 127 * Type::kMost);

// 8 rows of 32 bytes, `stride` apart -> 8 vectors with four bytes of each row.
inline void transpose(const uint8_t *rows, int64_t stride, uint8_t *out, int64_t step) {
    __m256i in[8], pairs[8];
    for (int i = 0; i < 8; ++i) in[i] = bytes_at(rows + i * stride);
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // in[i + c]: column c of every four, of rows i to i + 3
        in[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
        in[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
        in[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        in[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        auto *low = reinterpret_cast<__m256i *>(out + step * c), *high = reinterpret_cast<__m256i *>(out + step * (4 + c));
        _mm256_store_si256(low, _mm256_permute2x128_si256(in[c], in[4 + c], 0x20));
        _mm256_store_si256(high, _mm256_permute2x128_si256(in[c], in[4 + c], 0x31));
    }
}

inline void put_tiles(const uint8_t *codes, const RowPanel &panel, int64_t at, int64_t) {
    uint8_t *tiles = panel.codes + at * kPanelRows;
    for (int64_t column = 0; column < kWide; column += kGroup, tiles += 1024)
        for (int part = 0; part < 4; ++part)
            transpose(codes + part * 8 * kWide + column, kWide, tiles + part / 2 * 512 + part % 2 * 32, 64);
}

inline void put_floats(__m256i words, float scale, float *to) {
    const __m256i lower = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(words));
    const __m256i upper = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(words, 1));
    _mm256_store_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(lower), _mm256_set1_ps(scale)));
    _mm256_store_ps(to + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(upper), _mm256_set1_ps(scale)));
}

// Four columns of eight rows, whose bytes are signed where only one product of a pair fits.
template <int fit> inline __m256i multiplied(__m256i codes, __m256i values) {
    if constexpr (fit == 1) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(values, codes));
    return _mm256_maddubs_epi16(codes, values);
}

// Compilers reorder additions of whole numbers, and keep all products until the end, which no registers hold.
inline __m256i in_turn(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

template <int count, bool wide, bool has_mins, int width, int fit>
void multiply_some(const RowPanel &panel, int64_t columns, const RowVector *x, float *out) {
    __m256 sums[count][4];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm256_setzero_ps();
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t *codes = panel.codes;
    const float *scales = panel.scales, *mins = panel.mins;
    for (int64_t group = 0; group * kGroup < columns; ++group, codes += 1024)
        for (int part = 0; part < kGroup / width; ++part, scales += kPanelRows, mins += kPanelRows) {
            int32_t totals[count];
            for (int v = 0; v < count; ++v) totals[v] = total_of<wide, width>(x[v], group, part);
            for (int half = 0; half < 2; ++half) {
                __m256i products[count][2];
#pragma GCC unroll 8
                for (int first = 0; first < width / 4; first += fit) {
                    __m256i words[count][2];
#pragma GCC unroll 8
                    for (int j = first; j < (first + fit < width / 4 ? first + fit : width / 4); ++j) {
                        const int at = part * width / 4 + j;
                        const uint8_t *from = codes + half * 512 + 64 * at;
                        const __m256i upper = bytes_at(from), lower = bytes_at(from + 32);
#pragma GCC unroll 8
                        for (int v = 0; v < count; ++v) {
                            int32_t four;
                            std::memcpy(&four, x[v].q + group * kGroup + 4 * at, 4);
                            const __m256i values = _mm256_set1_epi32(four);
                            const __m256i more[2] = {multiplied<fit>(upper, values), multiplied<fit>(lower, values)};
                            for (int i = 0; i < 2; ++i)
                                words[v][i] = in_turn(j == first ? more[i] : _mm256_add_epi16(words[v][i], more[i]));
                        }
                    }
#pragma GCC unroll 8
                    for (int v = 0; v < count; ++v)
                        for (int i = 0; i < 2; ++i) {
                            const __m256i more = _mm256_madd_epi16(words[v][i], ones);
                            products[v][i] = in_turn(first == 0 ? more : _mm256_add_epi32(products[v][i], more));
                        }
                }
                for (int i = 0; i < 2; ++i) {
                    const __m256 scale = _mm256_load_ps(scales + 16 * half + 8 * i);
                    __m256 least;
                    if constexpr (has_mins) least = _mm256_load_ps(mins + 16 * half + 8 * i);
#pragma GCC unroll 8
                    for (int v = 0; v < count; ++v) {
                        __m256 &sum = sums[v][2 * half + i];
                        const float own = x[v].scales[wide ? group / (kWide / kGroup) : group];
                        __m256i whole = products[v][i];
                        if constexpr (!has_mins && fit != 1)
                            whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(panel.offset * totals[v]));
                        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(scale, _mm256_set1_ps(own)), sum);
                        if constexpr (has_mins)
                            sum = _mm256_fmadd_ps(least, _mm256_set1_ps(own * static_cast<float>(totals[v])), sum);
                    }
                }
            }
        }
    for (int v = 0; v < count; ++v)
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + v * kPanelRows + 8 * i, sums[v][i]);
}

#else

template <class Type> constexpr int kFit = 0;  // products are added as whole numbers of 32 bits

// 256 columns of all rows from `at` on to their place: four rows after the other, with four bytes of each side by side.
inline void put_tiles(const uint8_t *codes, const RowPanel &panel, int64_t at, int64_t columns) {
    uint8_t *tiles = panel.codes + 4 * at;
    for (int64_t row = 0; row < kPanelRows; row += 4, codes += 4 * kWide, tiles += 4 * wide_blocks(columns) * kWide)
        for (int64_t column = 0; column < kWide; column += 16) {
#if defined(SWITCHYARD_NEON)
            uint32x4x4_t four;
            for (int i = 0; i < 4; ++i) four.val[i] = vreinterpretq_u32_u8(vld1q_u8(codes + i * kWide + column));
            vst4q_u32(reinterpret_cast<uint32_t *>(tiles + 4 * column), four);
#else
            for (int64_t i = 0; i < 16; ++i) std::memcpy(tiles + 4 * column + 4 * i, codes + i % 4 * kWide + column + i / 4 * 4, 4);
#endif
        }
}

inline void put_floats(Words words, float scale, float *to) {
    int16_t each[16];
    std::memcpy(each, &words, sizeof each);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<float>(each[i]) * scale;
}

// Adds the products of eight rows (`upper` four and `lower` four) with `width` columns of some vectors from `at` on.
template <int count, int width>
inline void add_columns(const uint8_t *upper, const uint8_t *lower, const RowVector *x, int64_t at, Fours (*sums)[2]) {
#if defined(SWITCHYARD_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    constexpr int pairs = (count + 1) / 2;  // of vectors; each sum is two rows with two vectors
    int32x4_t both[pairs][4];
    for (auto &pair : both)
        for (auto &sum : pair) sum = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int column = 0; column < width; column += 8) {
        int8x16_t rows[4];
        for (int four = 0; four < 2; ++four) {
            const uint8_t *from = (four ? lower : upper) + 4 * column;
            const int32x4_t first = vreinterpretq_s32_u8(vld1q_u8(from)), second = vreinterpretq_s32_u8(vld1q_u8(from + 16));
            rows[2 * four] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
            rows[2 * four + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
        }
        for (int pair = 0; pair < pairs; ++pair) {
            const int8_t *q = x[2 * pair].q, *partner = x[2 * pair + 1 < count ? 2 * pair + 1 : 2 * pair].q;
            const int8x16_t values = vcombine_s8(vld1_s8(q + at + column), vld1_s8(partner + at + column));
            for (int i = 0; i < 4; ++i) both[pair][i] = vmmlaq_s32(both[pair][i], rows[i], values);
        }
    }
    for (int v = 0; v < count; ++v)
        for (int four = 0; four < 2; ++four) {
            const int32x4_t *two = both[v / 2] + 2 * four;
            sums[v][four] += (Fours)(v % 2 ? vuzp2q_s32(two[0], two[1]) : vuzp1q_s32(two[0], two[1]));
        }
#elif defined(SWITCHYARD_NEON) && defined(__ARM_FEATURE_DOTPROD)
#pragma GCC unroll 2
    for (int column = 0; column < width; column += 16) {
        int8x16_t q[count];
        for (int v = 0; v < count; ++v) q[v] = vld1q_s8(x[v].q + at + column);
        const auto four = [&](auto lane) {
            const int from = 4 * column + 16 * decltype(lane)::value;
            const int8x16_t high = vreinterpretq_s8_u8(vld1q_u8(upper + from)), low = vreinterpretq_s8_u8(vld1q_u8(lower + from));
            for (int v = 0; v < count; ++v) {
                sums[v][0] = (Fours)vdotq_laneq_s32((int32x4_t)sums[v][0], high, q[v], decltype(lane)::value);
                sums[v][1] = (Fours)vdotq_laneq_s32((int32x4_t)sums[v][1], low, q[v], decltype(lane)::value);
            }
        };
        four(std::integral_constant<int, 0>());
        four(std::integral_constant<int, 1>());
        four(std::integral_constant<int, 2>());
        four(std::integral_constant<int, 3>());
    }
#else
    for (int column = 0; column < width; column += 4) {
        const auto high = vector_at<Sixteen>(upper + 4 * column), low = vector_at<Sixteen>(lower + 4 * column);
        for (int v = 0; v < count; ++v) {
            int32_t values;
            std::memcpy(&values, x[v].q + at + column, 4);
            const auto q = (Sixteen)(Fours{} + values);
            sums[v][0] = with_products(sums[v][0], high, q);
            sums[v][1] = with_products(sums[v][1], low, q);
        }
    }
#endif
}

template <int count, bool wide, bool has_mins, int width, int>
void multiply_some(const RowPanel &panel, int64_t columns, const RowVector *x, float *out) {
    const int64_t of_four = 4 * wide_blocks(columns) * kWide;
    for (int64_t row = 0; row < kPanelRows; row += 8) {
        Floats sums[count][2] = {};
        const uint8_t *upper = panel.codes + row / 4 * of_four, *lower = upper + of_four;
        const float *scales = panel.scales + row, *mins = panel.mins + row;
        for (int64_t at = 0; at < columns; at += width, scales += kPanelRows, mins += kPanelRows) {
            const int64_t group = at / kGroup;
            Fours products[count][2] = {};
            add_columns<count, width>(upper + 4 * at, lower + 4 * at, x, at, products);
            const Floats scale[2] = {vector_at<Floats>(scales), vector_at<Floats>(scales + 4)};
            for (int v = 0; v < count; ++v) {
                const int32_t total = total_of<wide, width>(x[v], group, static_cast<int>(at % kGroup / width));
                const float own = x[v].scales[wide ? group / (kWide / kGroup) : group];
                for (int four = 0; four < 2; ++four) {
                    Fours whole = products[v][four];
                    if constexpr (!has_mins) whole -= panel.offset * total;
                    sums[v][four] += floats_of(whole) * (scale[four] * own);
                    if constexpr (has_mins)
                        sums[v][four] += vector_at<Floats>(mins + 4 * four) * (own * static_cast<float>(total));
                }
            }
        }
        for (int v = 0; v < count; ++v)
            for (int four = 0; four < 2; ++four) put_vector(sums[v][four], out + v * kPanelRows + row + 4 * four);
    }
}

#endif
#endif

// Columns that share a scale, and whether they have a minimum.
template <class Type> constexpr int width_of() {
    if constexpr (Type::kElements == kGroup) return static_cast<int>(kGroup);
    else return Type::kWidth;
}
template <class Type> constexpr bool has_mins() {
    if constexpr (Type::kElements == kGroup) return Type::kOffset == 0 && !Type::kSigned;
    else return Type::kLowest;
}

// Codes, unless they are put elsewhere, and, per 16 or, in blocks of 32, per 32 of them, scales and, where the type has them,
// minima of 256 weights.
template <class Type, bool with_codes = true> void put_block(const uint8_t *at, uint8_t *codes, float *scales, float *mins) {
    if constexpr (Type::kElements == kGroup) {
        for (int64_t i = 0; i < kWide / kGroup; i += kTogether)
            put_together<Type, with_codes>(at + i * Type::kBytes, codes + i * kGroup, scales + i, mins + i);
    } else if constexpr (kIsApart<Type>) {
        put_apart<Type>(at, Type::apart(at), codes, scales);
    } else {
        const Wide wide = Type::wide(at);
        if constexpr (with_codes) put_wide<Type>(at, wide, codes);
        put_floats(wide.steps, wide.scale(), scales);
        if constexpr (Type::kLowest) put_floats(wide.mins, -wide.lowest(), mins);
    }
}

// Where blocks of 256 weights of some rows are.
template <class Type, int rows> class BlocksOf {
  public:
    const uint8_t *at[rows];

    void set(const uint8_t *const *row, int64_t block, int64_t columns) {
        constexpr int64_t bytes = kWideBytes<Type>;
        static const uint8_t no_row[bytes] = {};
        for (int i = 0; i < rows; ++i)
            at[i] = row[i] ? whole_blocks<Type>(row[i] + block * bytes, columns - block * kWide, room_ + i * bytes) : no_row;
    }

  private:
    uint8_t room_[rows * kWideBytes<Type>];
};

// Fetches a block of a row that comes after all of these: a row is too short for its own to come in time, and those of all rows at
// once would be more than a core waits for.  Where nothing comes after them (null), one that follows `at`.
template <class Type> inline void fetch_block(const uint8_t *next, int64_t block, const uint8_t *at) {
    const uint8_t *from = next ? next + block * kWideBytes<Type> : at + 2 * kWideBytes<Type>;
    for (int64_t line = 0; line < kWideBytes<Type>; line += 64) __builtin_prefetch(from + line, 0, 2);
}

#if defined(__AVX512VNNI__)
// Scales and minima of 256 weights of 16 rows, those that meet the same codes `stride` after those before.
template <class Type> SWITCHYARD_INLINE inline void put_steps(const uint8_t *const *at, float *scales, float *mins, int64_t stride) {
    constexpr int width = width_of<Type>(), step = Type::kElements == kGroup ? 1 : width / kPart;
    if constexpr (kTurnsSteps<Type>)
        return Type::turned_steps(at, [&](int i, __m512 scale, __m512 least) SWITCHYARD_INLINE {
            _mm512_store_ps(scales + i * stride, scale);
            if constexpr (has_mins<Type>()) _mm512_store_ps(mins + i * stride, least);
        });
    alignas(64) float by_row[16 * kPart], mins_by_row[16 * kPart];
    for (int row = 0; row < 16; ++row) put_block<Type, false>(at[row], nullptr, by_row + row * kPart, mins_by_row + row * kPart);
    put_numbers<step>(by_row, kWide / width, scales, stride);
    if constexpr (has_mins<Type>()) put_numbers<step>(mins_by_row, kWide / width, mins, stride);
}
#endif

template <class Type> void unpack_panel(const uint8_t *const *rows, int64_t columns, RowPanel *panel) {
    constexpr int width = width_of<Type>(), step = Type::kElements == kGroup ? 1 : width / kPart;
    constexpr int64_t parts = kWide / width;
    panel->width = width;
    panel->offset = Type::kOffset;
    panel->has_mins = has_mins<Type>();
    BlocksOf<Type, kPanelRows> blocks;
    for (int64_t block = 0; block * kWide < columns; ++block) {
        float *scales = panel->scales + block * parts * kPanelRows, *mins = panel->mins + block * parts * kPanelRows;
        blocks.set(rows, block, columns);
#if defined(__AVX512VNNI__)
        if constexpr (kTurns<Type>) {
            for (int half = 0; half < 2; ++half) {
                uint8_t *to = panel->codes + block * kWide * kPanelRows + half * 512;
                Type::turned(blocks.at + 16 * half, [&](int group, int, int j, Bytes q) SWITCHYARD_INLINE {
                    for (int row = 16 * half + 2 * group; j == 0 && row < 16 * half + 2 * group + 2; ++row)
                        fetch_block<Type>(rows[kPanelRows + row], block, blocks.at[row]);
                    _mm512_store_si512(to + group * 1024 + j * 64, q);
                });
                put_steps<Type>(blocks.at + 16 * half, scales + 16 * half, mins + 16 * half, kPanelRows);
            }
            continue;
        }
#endif
        alignas(64) uint8_t codes[kPanelRows * kWide];
        alignas(64) float by_row[kPanelRows * kPart], mins_by_row[kPanelRows * kPart];
        for (int64_t row = 0; row < kPanelRows; ++row) {
            fetch_block<Type>(rows[kPanelRows + row], block, blocks.at[row]);
            put_block<Type>(blocks.at[row], codes + row * kWide, by_row + row * kPart, mins_by_row + row * kPart);
        }
        put_tiles(codes, *panel, block * kWide, columns);
        for (int64_t from = 0; from < kPanelRows; from += 16) {
            put_numbers<step>(by_row + from * kPart, parts, scales + from, kPanelRows);
            if constexpr (has_mins<Type>()) put_numbers<step>(mins_by_row + from * kPart, parts, mins + from, kPanelRows);
        }
    }
}

#if defined(__AVX512VNNI__)
// Products of 16 rows, whose codes never leave the registers.
template <class Type, int count> void multiply_turned(const uint8_t *const *rows, const uint8_t *const *next, int64_t columns, const RowVector *x, float *out) {
    constexpr bool wide = Type::kElements != kGroup, lowest = has_mins<Type>();
    constexpr int width = width_of<Type>(), of_part = width / 4, parts = static_cast<int>(kGroup) / width;
    __m512 sums[count], before[count];
    for (int v = 0; v < count; ++v) sums[v] = before[v] = _mm512_setzero_ps();
    BlocksOf<Type, 16> blocks;
    for (int64_t block = 0; block * kWide < columns; ++block) {
        alignas(64) float scales[kWide / width * 16], mins[lowest ? kWide / width * 16 : 1];
        alignas(64) float totals[wide && lowest ? count : 1][kWide / kPart];
        blocks.set(rows, block, columns);
        put_steps<Type>(blocks.at, scales, mins, 16);
        if constexpr (wide && lowest)
            for (int v = 0; v < count; ++v) totals_of_block<width>(x[v].parts + block * (kWide / kPart), totals[v]);
        __m512i products[Type::kSlots][count];
        Type::turned(blocks.at, [&](int group, int slot, int j, Bytes codes) SWITCHYARD_INLINE {
            for (int row = 2 * group; j == 0 && row < 2 * group + 2; ++row) fetch_block<Type>(next[row], block, blocks.at[row]);
            const int64_t at = block * (kWide / kGroup) + group;  // vectors are padded to whole blocks of 256
            const int number = group * parts + j / of_part;
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                if (j % of_part == 0)
                    products[slot][v] = lowest ? _mm512_setzero_si512()
                                               : _mm512_set1_epi32(-Type::kOffset * total_of<wide, width>(x[v], at, j / of_part));
                int32_t four;
                std::memcpy(&four, x[v].q + at * kGroup + 4 * j, 4);
                products[slot][v] = _mm512_dpbusd_epi32(products[slot][v], codes, _mm512_set1_epi32(four));
                if (j % of_part != of_part - 1) continue;
                __m512 scale = _mm512_load_ps(scales + number * 16);
                const float own = wide ? 1.0f : x[v].scales[at];
                if constexpr (!wide) scale = _mm512_mul_ps(scale, _mm512_set1_ps(own));
                sums[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[slot][v]), scale, sums[v]);
                if constexpr (lowest) {
                    const float total = wide ? totals[wide ? v : 0][number] : own * static_cast<float>(x[v].sums[at]);
                    sums[v] = _mm512_fmadd_ps(_mm512_load_ps(mins + number * 16), _mm512_set1_ps(total), sums[v]);
                }
            }
        });
        if constexpr (wide)
            for (int v = 0; v < count; ++v) {
                before[v] = _mm512_fmadd_ps(sums[v], _mm512_set1_ps(x[v].scales[block]), before[v]);
                sums[v] = _mm512_setzero_ps();
            }
    }
    for (int v = 0; v < count; ++v) _mm512_storeu_ps(out + v * kPanelRows, wide ? before[v] : sums[v]);
}

template <class Type> void multiply_few(const uint8_t *const *rows, int64_t columns, const RowVector *x, int64_t count, float *out) {
    const auto there = [](const uint8_t *const *half) { return std::any_of(half, half + 16, [](const uint8_t *row) { return row; }); };
    const int64_t parts = (count + 3) / 4;
    for (int half = 0; half < 2; ++half) {
        const uint8_t *const *mine = rows + 16 * half, *const *other = rows + 16 - 16 * half;
        if (!there(mine)) continue;
        const uint8_t *const *next = there(other) ? (half ? rows + kPanelRows : other) : mine + kPanelRows;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t begin = count * part / parts, some = count * (part + 1) / parts - begin;
            const auto loop = some == 4   ? multiply_turned<Type, 4>
                              : some == 3 ? multiply_turned<Type, 3>
                              : some == 2 ? multiply_turned<Type, 2>
                                          : multiply_turned<Type, 1>;
            loop(mine, next, columns, x + begin, out + begin * kPanelRows + 16 * half);
        }
    }
}
#endif

// Where a scale has but 16 columns, the registers do not hold what is in work, and rows are as fast.
template <class Type> constexpr bool kHasFew = kTurns<Type> && width_of<Type>() == kGroup;
template <class Type> constexpr int fewest_of() { return kHasFew<Type> ? 1 : kTurns<Type> ? kMostRowVectors + 1 : kFewest; }
template <class Type> constexpr decltype(RowType::multiply_few) few_of() {
#if defined(__AVX512VNNI__)
    if constexpr (kHasFew<Type>) return multiply_few<Type>;
#endif
    return nullptr;
}

template <bool wide, bool has_mins, int width, int fit>
void multiply_panel(const RowPanel &panel, int64_t columns, const RowVector *x, int64_t count, float *out) {
    const int64_t parts = (count + kMostMultiplied - 1) / kMostMultiplied;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = count * part / parts, some = count * (part + 1) / parts - begin;
        const auto loop = some == 5   ? multiply_some<kMostMultiplied, wide, has_mins, width, fit>
                          : some == 4 ? multiply_some<4, wide, has_mins, width, fit>
                          : some == 3 ? multiply_some<3, wide, has_mins, width, fit>
                          : some == 2 ? multiply_some<2, wide, has_mins, width, fit>
                                      : multiply_some<1, wide, has_mins, width, fit>;
        loop(panel, columns, x + begin, out + begin * kPanelRows);
    }
}

// Rows' weights as floats: products of a code and a scale, rounded as ggml's are.
template <class Type> void unpack_wide_row(const uint8_t *row, int64_t columns, float *out) {
    alignas(64) uint8_t codes[kWide];
    alignas(64) float scales[16], mins[16];
    uint8_t room[kWideBytes<Type>];
    for (int64_t block = 0; block * kWide < columns; ++block, row += kWideBytes<Type>) {
        const int64_t left = columns - block * kWide;
        put_block<Type>(whole_blocks<Type>(row, left, room), codes, scales, mins);
        for (int part = 0; part < 16 && part * kPart < left; ++part, out += kPart) {
#if defined(__AVX512VNNI__)
            const __m512i wider = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(codes + part * kPart)));
            const __m512 code = _mm512_cvtepi32_ps(_mm512_sub_epi32(wider, _mm512_set1_epi32(Type::kOffset)));
            __m512 values = _mm512_mul_ps(code, _mm512_set1_ps(scales[part]));
            if constexpr (Type::kLowest) values = _mm512_add_ps(values, _mm512_set1_ps(mins[part]));
            _mm512_storeu_ps(out, values);
#else
            float values[kPart];
            for (int64_t i = 0; i < kPart; ++i) {
                const uint8_t byte = codes[part * kPart + i];
                const int32_t code = Type::kMost == 128 ? static_cast<int8_t>(byte) : byte - Type::kOffset;
                values[i] = static_cast<float>(code) * scales[part];
            }
            if constexpr (Type::kLowest)
                for (float &value : values) value += mins[part];
            std::memcpy(out, values, sizeof values);
#endif
        }
    }
}

template <class Type> void unpack_four_row(const uint8_t *row, int64_t columns, float *out) {
    alignas(64) uint8_t codes[kTogether * kGroup];
    alignas(16) float scales[kTogether], offsets[kTogether];
    const int64_t groups = columns / kGroup;
    for (int64_t group = 0; group < groups; group += kTogether, row += kTogether * Type::kBytes) {
        const int64_t there = groups - group < kTogether ? groups - group : kTogether;
        uint8_t last[kTogether * Type::kBytes] = {};
        if (there < kTogether) std::memcpy(last, row, static_cast<size_t>(there * Type::kBytes));
        put_together<Type>(there < kTogether ? last : row, codes, scales, offsets);
        for (int64_t part = 0; part < there; ++part, out += kGroup) {
            const float scale = scales[part], offset = offsets[part] - scale * static_cast<float>(kLarger<Type>);
            for (int64_t i = 0; i < kGroup; ++i) {
                const uint8_t code = codes[part * kGroup + i];
                const bool negative = Type::kSigned && Type::kOffset == 0;
                out[i] = (negative ? static_cast<float>(static_cast<int8_t>(code)) : static_cast<float>(code)) * scale + offset;
            }
        }
    }
}

}  // namespace
