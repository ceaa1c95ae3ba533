// Vectors of floats in the target's own registers, for attend_impl.h: included once for every instruction set.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>

#include "kernel_set.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

// body(0), body(1), .. as constants: arrays indexed by them stay in registers, which those of loops do not always.
#define ALWAYS_INLINE __attribute__((always_inline))
template <class Body, int... i> ALWAYS_INLINE inline void repeat_all(Body body, std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>()), ...);
}
template <int count, class Body> ALWAYS_INLINE inline void repeat(Body body) {
    repeat_all(body, std::make_integer_sequence<int, count>());
}

inline void prefetch(const void *line) {
#if defined(__GNUC__)
    __builtin_prefetch(line);
#else
    (void)line;
#endif
}

#if defined(__AVX512F__)
typedef __m512 V;
constexpr int kWidth = 16, kRowsTogether = 4, kAccumulators = 16, kMixedTogether = 8;
inline V all(float x) { return _mm512_set1_ps(x); }
inline V load(const float *x) { return _mm512_loadu_ps(x); }
inline V load_bf16(const uint16_t *x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline V load_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x))); }
inline V load_int8(const int8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))));
}
inline void store(float *x, V v) { _mm512_storeu_ps(x, v); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
inline V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm512_div_ps(a, b); }
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }  // b if one is NaN
// x, or 0 where y < limit.
inline V unless_below(V x, V y, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, all(limit), _CMP_NLT_UQ), x);
}
inline V times_power(V x, V shifted) {
    const __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(whole, 23)));
}
inline float most_of(V v) { return _mm512_reduce_max_ps(v); }
inline float sum_of(V v) { return _mm512_reduce_add_ps(v); }
// The sums of 16 vectors, in order: halves of pairs are added until each lane is the sum of one vector.
inline V sums_of(const V *v) {
    V x[8], y[4];
    for (int i = 0; i < 8; ++i)
        x[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        y[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const V low = add(_mm512_shuffle_f32x4(y[0], y[1], 0x44), _mm512_shuffle_f32x4(y[0], y[1], 0xee));
    const V high = add(_mm512_shuffle_f32x4(y[2], y[3], 0x44), _mm512_shuffle_f32x4(y[2], y[3], 0xee));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
#elif defined(__AVX2__)
typedef __m256 V;
constexpr int kWidth = 8, kRowsTogether = 2, kAccumulators = 8, kMixedTogether = 4;
inline V all(float x) { return _mm256_set1_ps(x); }
inline V load(const float *x) { return _mm256_loadu_ps(x); }
inline V load_bf16(const uint16_t *x) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline V load_half(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))); }
inline V load_int8(const int8_t *x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(x))));
}
inline void store(float *x, V v) { _mm256_storeu_ps(x, v); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V subtract(V a, V b) { return _mm256_sub_ps(a, b); }
inline V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm256_div_ps(a, b); }
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }  // b if one is NaN
inline V unless_below(V x, V y, float limit) { return _mm256_and_ps(_mm256_cmp_ps(y, all(limit), _CMP_NLT_UQ), x); }
inline V times_power(V x, V shifted) {
    const __m256i whole = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(whole, 23)));
}
inline float most_of(V v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float sum_of(V v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The sums of 8 vectors, in order.
inline V sums_of(const V *v) {
    V x[4], y[2];
    for (int i = 0; i < 4; ++i)
        x[i] = add(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(x[2 * i]), b = _mm256_castps_pd(x[2 * i + 1]);
        y[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return add(_mm256_permute2f128_ps(y[0], y[1], 0x20), _mm256_permute2f128_ps(y[0], y[1], 0x31));
}
#else
#if defined(__ARM_NEON)
typedef float32x4_t V;
constexpr int kWidth = 4, kRowsTogether = 4, kAccumulators = 16, kMixedTogether = 4;
inline V all(float x) { return vdupq_n_f32(x); }
inline V load(const float *x) { return vld1q_f32(x); }
inline V load_bf16(const uint16_t *x) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16)); }
inline V load_half(const uint16_t *x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
inline V load_int8(const int8_t *x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
inline void store(float *x, V v) { vst1q_f32(x, v); }
inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V add(V a, V b) { return vaddq_f32(a, b); }
inline V subtract(V a, V b) { return vsubq_f32(a, b); }
inline V multiply(V a, V b) { return vmulq_f32(a, b); }
inline V divide(V a, V b) { return vdivq_f32(a, b); }
inline V larger(V a, V b) { return vmaxq_f32(a, b); }
inline V unless_below(V x, V y, float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, all(limit))));
}
inline V times_power(V x, V shifted) {
    const int32x4_t whole = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(whole, 23)));
}
#else
struct V {
    float x[4];
};
constexpr int kWidth = 4, kRowsTogether = 2, kAccumulators = 8, kMixedTogether = 4;
template <class Each> inline V each(Each value) { return {{value(0), value(1), value(2), value(3)}}; }
inline V all(float x) { return {{x, x, x, x}}; }
inline V load(const float *x) { return {{x[0], x[1], x[2], x[3]}}; }
inline V load_bf16(const uint16_t *x) { return each([x](int i) { return from_bf16(x[i]); }); }
inline V load_half(const uint16_t *x) { return each([x](int i) { return from_half(x[i]); }); }
inline V load_int8(const int8_t *x) { return each([x](int i) { return static_cast<float>(x[i]); }); }
inline void store(float *x, const V &v) { std::memcpy(x, v.x, sizeof v.x); }
inline V fma(const V &a, const V &b, const V &c) { return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; }); }
inline V add(const V &a, const V &b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline V subtract(const V &a, const V &b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline V multiply(const V &a, const V &b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline V divide(const V &a, const V &b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline V larger(const V &a, const V &b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
inline V unless_below(const V &x, const V &y, float limit) {
    return each([&](int i) { return y.x[i] < limit ? 0.0f : x.x[i]; });
}
inline V times_power(const V &x, const V &shifted) {
    return each([&](int i) {
        uint32_t bits, power;
        std::memcpy(&bits, &x.x[i], 4);
        std::memcpy(&power, &shifted.x[i], 4);
        bits += (power - 0x4b400000u) << 23;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    });
}
#endif
inline float most_of(V v) {
    float x[4];
    store(x, v);
    const float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
}
inline float sum_of(V v) {
    float x[4];
    store(x, v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}
// The sums of 4 vectors, in order.
inline V sums_of(const V *v) {
    const float sums[4] = {sum_of(v[0]), sum_of(v[1]), sum_of(v[2]), sum_of(v[3])};
    return load(sums);
}
#endif

// e to the power of x <= 0, within two units of the last place (the polynomial of Cephes' expf); 0 below -87, and a NaN
// stays one.
inline V exponential(V at) {
    const V x = larger(all(-87.0f), at);
    const V shifted = fma(x, all(1.44269504f), all(12582912.0f)), whole = subtract(shifted, all(12582912.0f));
    const V f = fma(whole, all(2.12194440e-4f), fma(whole, all(-0.693359375f), x));
    V y = fma(f, all(1.9875691500e-4f), all(1.3981999507e-3f));
    y = fma(y, f, all(8.3334519073e-3f));
    y = fma(y, f, all(4.1665795894e-2f));
    y = fma(y, f, all(1.6666665459e-1f));
    y = fma(y, f, all(5.0000001201e-1f));
    y = fma(multiply(y, f), f, add(f, all(1.0f)));
    return unless_below(times_power(y, shifted), at, -87.0f);
}

// 1 / (1 + e to the power of -x), without overflow.
inline V sigmoid(V x) {
    const V less = exponential(subtract(all(0.0f), larger(x, subtract(all(0.0f), x))));
    const V above = add(unless_below(all(1.0f), x, 0.0f), subtract(less, unless_below(less, x, 0.0f)));
    return divide(above, add(all(1.0f), less));
}

// Types of keys and values.
struct Bf16 {
    typedef uint16_t Element;
    static V load(const Element *x) { return load_bf16(x); }
    static float one(Element x) { return from_bf16(x); }
};
struct Fp16 {
    typedef uint16_t Element;
    static V load(const Element *x) { return load_half(x); }
    static float one(Element x) { return from_half(x); }
};
struct Int8 {
    typedef int8_t Element;
    static V load(const Element *x) { return load_int8(x); }
    static float one(Element x) { return x; }
};
struct Fp32 {
    typedef float Element;
    static V load(const Element *x) { return ::load(x); }
    static float one(Element x) { return x; }
};

}  // namespace
