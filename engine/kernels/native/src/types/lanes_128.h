// Blocks of rows in vectors of 128 bits: Arm's, with its products of four bytes where it has them, or what compilers make of
// plain C++.  Included by rows.h.
#pragma once

#if defined(SWITCHYARD_NEON)
#include <arm_neon.h>
#endif

namespace {

typedef uint8_t Sixteen __attribute__((vector_size(16)));
typedef int16_t Eights __attribute__((vector_size(16)));
typedef int32_t Fours __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));

template <class Vector> inline Vector vector_at(const void *at) {
    Vector value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <class Vector> inline void put_vector(const Vector &value, void *to) { std::memcpy(to, &value, sizeof value); }
inline Floats floats_of(Fours whole) { return __builtin_convertvector(whole, Floats); }

struct Bytes {
    Sixteen half[2];
};
inline Bytes bytes_at(const void *at) {
    return {{vector_at<Sixteen>(at), vector_at<Sixteen>(static_cast<const uint8_t *>(at) + 16)}};
}
inline Bytes low_bits(Bytes bytes, int mask) {
    return {{bytes.half[0] & static_cast<uint8_t>(mask), bytes.half[1] & static_cast<uint8_t>(mask)}};
}
inline Bytes shifted(Bytes bytes, int bits) {
    const auto by = static_cast<uint8_t>(bits);
    return {{bytes.half[0] >> by, bytes.half[1] >> by}};
}
inline Bytes shifted_left(Bytes bytes, int bits) {
    const auto by = static_cast<uint8_t>(bits);
    return {{bytes.half[0] << by, bytes.half[1] << by}};
}
inline Bytes joined(Bytes a, Bytes b) { return {{a.half[0] | b.half[0], a.half[1] | b.half[1]}}; }
inline Bytes added(Bytes bytes, int number) {
    return {{bytes.half[0] + static_cast<uint8_t>(number), bytes.half[1] + static_cast<uint8_t>(number)}};
}
inline void put_bytes(Bytes bytes, uint8_t *to) {
    put_vector(bytes.half[0], to);
    put_vector(bytes.half[1], to + 16);
}
inline Bytes four_words(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    const uint64_t all[4] = {a, b, c, d};
    return bytes_at(all);
}
// Of each of 8 bytes the four pairs of bits, the lowest first.
inline Bytes pairs_of_bits(const uint8_t *at) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    Bytes made;
    for (int half = 0; half < 2; ++half, at += 4) {
        const Four x = {at[0], at[1], at[2], at[3]};
        made.half[half] = (Sixteen)((x | x << 6 | x << 12 | x << 18) & 0x03030303);
    }
    return made;
}
// 16 bytes of nibbles -> 32 codes.
inline Bytes codes_of_nibbles(const uint8_t *pairs) {
    const auto both = vector_at<Sixteen>(pairs);
    return {{both & 15, both >> 4}};
}
// `value` where a bit is set.
inline Bytes where_set(uint32_t bits, uint8_t value) {
    const Sixteen each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    constexpr uint64_t ones = 0x0101010101010101;
    Bytes made;
    for (int half = 0; half < 2; ++half, bits >>= 16) {
        const uint64_t spread[2] = {(bits & 255) * ones, (bits >> 8 & 255) * ones};
        made.half[half] = (Sixteen)((vector_at<Sixteen>(spread) & each) == each) & value;
    }
    return made;
}

// Negated where a bit is set.
inline Bytes with_signs(Bytes codes, uint32_t set) {
    const Bytes less = where_set(set, 255);
    return {{(codes.half[0] ^ less.half[0]) - less.half[0], (codes.half[1] ^ less.half[1]) - less.half[1]}};
}

#if defined(SWITCHYARD_NEON)
inline uint8x16_t table_of(const int8_t *table) { return vreinterpretq_u8_s8(vld1q_s8(table)); }
inline Bytes look_up(uint8x16_t table, Bytes codes) {
    return {{(Sixteen)vqtbl1q_u8(table, (uint8x16_t)codes.half[0]), (Sixteen)vqtbl1q_u8(table, (uint8x16_t)codes.half[1])}};
}
#else
inline const int8_t *table_of(const int8_t *table) { return table; }
inline Bytes look_up(const int8_t *table, Bytes codes) {
    uint8_t each[32];
    put_bytes(codes, each);
    for (uint8_t &code : each) code = static_cast<uint8_t>(table[code]);
    return bytes_at(each);
}
#endif

// 16 whole numbers.
struct Words {
    Eights half[2];
};
template <class From> inline Words widened(const void *bytes) {
    typedef From Eight __attribute__((vector_size(8)));
    const auto *at = static_cast<const uint8_t *>(bytes);
    return {{__builtin_convertvector(vector_at<Eight>(at), Eights), __builtin_convertvector(vector_at<Eight>(at + 8), Eights)}};
}
inline Words words_of(uint64_t first, uint64_t second) {
    const uint64_t both[2] = {first, second};
    return widened<uint8_t>(both);
}
inline Words words_of_pairs(uint64_t each) {  // of each byte, two
    uint8_t pairs[16];
    for (int i = 0; i < 16; ++i) pairs[i] = static_cast<uint8_t>(each >> (i / 2 * 8));
    return widened<uint8_t>(pairs);
}
inline Words words_of_low_nibbles(const uint8_t *at) {
    const Sixteen low = vector_at<Sixteen>(at) & 15;
    return widened<uint8_t>(&low);
}
inline Words words_of_high_nibbles(const uint8_t *at) {
    const Sixteen high = vector_at<Sixteen>(at) >> 4;
    return widened<uint8_t>(&high);
}
inline Words words_of_signed(const uint8_t *at) { return widened<int8_t>(at); }
inline Words no_words() { return {}; }
inline Words subtracted(Words words, int number) {
    const auto all = static_cast<int16_t>(number);
    return {{words.half[0] - all, words.half[1] - all}};
}
template <int bits> inline Words doubled(Words words) { return {{words.half[0] << bits, words.half[1] << bits}}; }

// Adds the products of four neighbours to each number: unsigned codes below 128 or signed ones, with signed bytes.
inline Fours with_products(Fours sums, Sixteen codes, Sixteen q) {
#if defined(SWITCHYARD_NEON) && defined(__ARM_FEATURE_DOTPROD)
    return (Fours)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)q);
#else
    const auto even = [](Sixteen bytes) { return (Eights)((Eights)bytes << 8) >> 8; };
    const auto odd = [](Sixteen bytes) { return (Eights)bytes >> 8; };
    const Eights pairs = even(codes) * even(q) + odd(codes) * odd(q);  // at most 2 * 128 * 127
    return sums + ((Fours)pairs << 16 >> 16) + ((Fours)pairs >> 16);
#endif
}
inline Fours pair_products(Eights a, Eights b) {
    const auto even = [](Eights words) { return (Fours)words << 16 >> 16; };
    const auto odd = [](Eights words) { return (Fours)words >> 16; };
    return even(a) * even(b) + odd(a) * odd(b);
}
inline float total_of_lanes(Floats sums) { return (sums[0] + sums[2]) + (sums[1] + sums[3]); }

// A block of 256: Type::codes(block, i) are 32 of them.
struct Wide {
    Words steps, mins;  // per 16 codes
    float of_codes, of_mins;
    uint32_t signs[8] = {};  // of each 32 codes those that are to be negated, where a type has signs
    float scale() const { return of_codes; }
    float lowest() const { return of_mins; }
};

template <class Type, int count> void dot_wide(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    Floats sums[count] = {}, less[count] = {};
    for (int64_t block = 0; block * kWide < columns; ++block, row += Type::kBytes) {
        for (int64_t at = 0; at < Type::kBytes; at += 64) __builtin_prefetch(row + at + kAheadOfRow);
        const Wide wide = Type::wide(row);
        Fours steps[4], whole[count] = {};
        for (int half = 0; half < 2; ++half) {
            typedef int16_t Short __attribute__((vector_size(8)));
            Short parts[2];
            std::memcpy(parts, &wide.steps.half[half], sizeof parts);
            for (int i = 0; i < 2; ++i) steps[2 * half + i] = __builtin_convertvector(parts[i], Fours);
        }
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) {
            Bytes codes = Type::codes(row, part);
            if constexpr (kHasSigns<Type>) codes = with_signs(codes, wide.signs[part]);
            for (int v = 0; v < count; ++v) {
                const Bytes q = bytes_at(x[v].q + block * kWide + part * 32);
                for (int half = 0; half < 2; ++half)
                    whole[v] += with_products(Fours{}, codes.half[half], q.half[half]) * steps[part / 2][part % 2 * 2 + half];
            }
        }
        for (int v = 0; v < count; ++v) {
            const float scale = x[v].scales[block];
            if constexpr (!Type::kLarge && !kHasSigns<Type>) {
                const auto *parts = x[v].parts + block * (kWide / kPart);
                const Fours below = pair_products(wide.mins.half[0], vector_at<Eights>(parts)) +
                                    pair_products(wide.mins.half[1], vector_at<Eights>(parts + 8));
                if constexpr (Type::kLowest)
                    less[v] += floats_of(below) * (wide.lowest() * scale);
                else
                    whole[v] -= below;
            }
            sums[v] += floats_of(whole[v]) * (wide.scale() * scale);
        }
    }
    for (int v = 0; v < count; ++v) out[v] = total_of_lanes(sums[v] - less[v]);
}

// Blocks that make 256 weights, whose codes are Type::codes(block, i): a scale per 16 of them.
struct Apart {
    float scales[16];
};

template <class Type, int count> void dot_apart(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    Floats sums[count] = {};
    uint8_t room[kWideBytes<Type>];
    for (int64_t block = 0; block * kWide < columns; ++block, row += kWideBytes<Type>) {
        for (int64_t at = 0; at < kWideBytes<Type>; at += 64) __builtin_prefetch(row + at + kAheadOfRow);
        const uint8_t *blocks = whole_blocks<Type>(row, columns - block * kWide, room);
        const Apart apart = Type::apart(blocks);
        Floats whole[count] = {};
        for (int part = 0; part < 8; ++part) {
            const Bytes codes = Type::codes(blocks, part);
            for (int half = 0; half < 2; ++half)
                for (int v = 0; v < count; ++v) {
                    const int64_t at = block * kWide + part * 32 + half * 16;
                    const Fours products = with_products(Fours{}, codes.half[half], vector_at<Sixteen>(x[v].q + at));
                    const Fours below = {Type::kOffset * x[v].parts[at / kPart], 0, 0, 0};
                    whole[v] += floats_of(products - below) * apart.scales[2 * part + half];
                }
        }
        for (int v = 0; v < count; ++v) sums[v] += whole[v] * x[v].scales[block];
    }
    for (int v = 0; v < count; ++v) out[v] = total_of_lanes(sums[v]);
}

// A block of 32: a weight is scale * code + offset.
struct One {
    Bytes codes;
    float scale, offset;
};

template <class Type, int count> void dot_four(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    Floats sums[count] = {};
    float offsets[count] = {};
    const int64_t groups = columns / kGroup;
    for (int64_t group = 0; group < groups; ++group, row += Type::kBytes) {
        __builtin_prefetch(row + kAheadOfRow);
        const One one = Type::one(row);
        for (int v = 0; v < count; ++v) {
            const Bytes q = bytes_at(x[v].q + group * kGroup);
            const Fours whole = with_products(with_products(Fours{}, one.codes.half[0], q.half[0]), one.codes.half[1], q.half[1]);
            sums[v] += floats_of(whole) * (one.scale * x[v].scales[group]);
            if constexpr (!Type::kSigned)
                offsets[v] += one.offset * x[v].scales[group] * static_cast<float>(x[v].sums[group]);
        }
    }
    for (int v = 0; v < count; ++v) out[v] = total_of_lanes(sums[v]) + offsets[v];
}

}  // namespace
