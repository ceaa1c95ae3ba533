// How the keys of each type meet queries, for attend_impl.h.
#pragma once
#include "attend_lanes.h"

namespace {

// Numbers of any type, as floats.
template <class T> struct AsFloats {
    typedef typename T::Element Element;
    typedef float Query;
    typedef V Part, Sum;
    static constexpr int step = kWidth;
    static constexpr bool packs = false;
    static Sum none() { return all(0); }
    static Part key(const Element *x) { return T::load(x); }
    static Part query(const Query *q) { return load(q); }
    static Sum add_products(Part key, Part query, Sum sum) { return fma(key, query, sum); }
    static V floats(Sum sum) { return sum; }
    static float product(Element key, Query query) { return T::one(key) * query; }
};

#if defined(__AVX512BF16__)
// Pairs of bf16, of queries that are bf16 numbers.
struct AsPairs {
    typedef uint16_t Element, Query;
    typedef __m512bh Part;
    typedef V Sum;
    static constexpr int step = 32;
    static constexpr bool packs = true;
    static Sum none() { return all(0); }
    static Part key(const Element *x) { return (__m512bh)_mm512_loadu_si512(x); }
    static Part query(const Query *q) { return key(q); }
    static Sum add_products(Part key, Part query, Sum sum) { return _mm512_dpbf16_ps(sum, key, query); }
    static V floats(Sum sum) { return sum; }
    static float product(Element key, Query query) { return from_bf16(key) * from_bf16(query); }
    // Whether the query [n] could be packed, and what its products are to be multiplied with.
    static bool pack(const float *q, int64_t n, Query *out, float *scale) {
        uint32_t lost = 0;
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, q + i, 4);
            lost |= bits & 0xffff;
            out[i] = static_cast<uint16_t>(bits >> 16);
        }
        *scale = 1.0f;
        return lost == 0;
    }
};
#endif

#if defined(__AVX2__)
// int8 keys and queries of 15 bits, whose products are summed exactly.
struct AsWhole {
    typedef int8_t Element;
    typedef int16_t Query;
#if defined(__AVX512F__)
    typedef __m512i Part, Sum;
    static constexpr int step = 32;
    static Sum none() { return _mm512_setzero_si512(); }
    static Part key(const Element *x) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
    }
    static Part query(const Query *q) { return _mm512_loadu_si512(q); }
    static Sum add_products(Part key, Part query, Sum sum) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(sum, key, query);
#else
        return _mm512_add_epi32(sum, _mm512_madd_epi16(key, query));
#endif
    }
    static V floats(Sum sum) { return _mm512_cvtepi32_ps(sum); }
#else
    typedef __m256i Part, Sum;
    static constexpr int step = 16;
    static Sum none() { return _mm256_setzero_si256(); }
    static Part key(const Element *x) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)));
    }
    static Part query(const Query *q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(q)); }
    static Sum add_products(Part key, Part query, Sum sum) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(key, query));
    }
    static V floats(Sum sum) { return _mm256_cvtepi32_ps(sum); }
#endif
    static constexpr bool packs = true;
    static float product(Element key, Query query) { return static_cast<float>(key * query); }
    static bool pack(const float *q, int64_t n, Query *out, float *scale) {
        float most = 0;
        for (int64_t i = 0; i < n; ++i) most = std::fabs(q[i]) > most ? std::fabs(q[i]) : most;
        // As many bits as 32 hold the sum of.
        const float limit = n <= 512 ? 32767.0f : 8191.0f;
        const float inverse = most > 0 ? limit / most : 0.0f;
        if (!(most < 3e38f) || !(inverse < 3e38f)) return false;
        bool known = true;
        for (int64_t i = 0; i < n; ++i) {
            known = known && q[i] == q[i];
            out[i] = known ? static_cast<int16_t>(std::lrintf(q[i] * inverse)) : 0;
        }
        *scale = most / limit;
        return known;
    }
};
#endif

template <class T> struct Keys {
    typedef AsFloats<T> Kind;
};
#if defined(__AVX512BF16__)
template <> struct Keys<Bf16> {
    typedef AsPairs Kind;
};
#endif
#if defined(__AVX2__)
template <> struct Keys<Int8> {
    typedef AsWhole Kind;
};
#endif

constexpr int64_t kMostPacked = 1024;  // numbers of a query: 512 * 127 * 32767 and 1024 * 127 * 8191 fit 31 bits

// Queries as the keys' type wants them.
template <class Kind> struct Packed {
    const typename Kind::Query *q[8];
    float scales[8];
    alignas(64) typename Kind::Query room[Kind::packs ? 8 * kMostPacked : 1];
    bool is_whole = true;  // whether all could be packed

    // q: [count], `step` apart, of which [n] are meant.
    Packed(const float *queries, int count, int64_t step, int64_t n) {
        if constexpr (Kind::packs) {
            is_whole = n <= kMostPacked;
            for (int i = 0; i < count && is_whole; ++i) {
                typename Kind::Query *to = room + i * kMostPacked;
                is_whole = Kind::pack(queries + i * step, n, to, scales + i);
                q[i] = to;
            }
        } else {
            for (int i = 0; i < count; ++i) q[i] = queries + i * step, scales[i] = 1.0f;
        }
    }
};

}  // namespace
