// The kernel of cached_attention.h, in the target's own vectors: included once for every instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cached_attention.h"
#include "kernel_set.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
typedef __m512 V;
constexpr int kWidth = 16, kRowsTogether = 4, kAccumulators = 16, kMixedTogether = 8;
inline V all(float x) { return _mm512_set1_ps(x); }
inline V load(const float *x) { return _mm512_loadu_ps(x); }
inline V load_bf16(const uint16_t *x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(float *x, V v) { _mm512_storeu_ps(x, v); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
inline V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }  // b if one is NaN
inline V times_power(V x, V shifted) {
    const __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(whole, 23)));
}
inline __m128 quarter(V v) {
    const __m512d x = _mm512_castps_pd(v);
    const __m256 half = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(x)),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(x, 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
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
inline void store(float *x, V v) { _mm256_storeu_ps(x, v); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V subtract(V a, V b) { return _mm256_sub_ps(a, b); }
inline V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }  // b if one is NaN
inline V times_power(V x, V shifted) {
    const __m256i whole = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(whole, 23)));
}
inline __m128 quarter(V v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
#elif defined(__ARM_NEON)
typedef float32x4_t V;
constexpr int kWidth = 4, kRowsTogether = 4, kAccumulators = 16, kMixedTogether = 4;
inline V all(float x) { return vdupq_n_f32(x); }
inline V load(const float *x) { return vld1q_f32(x); }
inline V load_bf16(const uint16_t *x) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16)); }
inline void store(float *x, V v) { vst1q_f32(x, v); }
inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V add(V a, V b) { return vaddq_f32(a, b); }
inline V subtract(V a, V b) { return vsubq_f32(a, b); }
inline V multiply(V a, V b) { return vmulq_f32(a, b); }
inline V larger(V a, V b) { return vmaxq_f32(a, b); }
inline V times_power(V x, V shifted) {
    const int32x4_t whole = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(whole, 23)));
}
#else
struct V {
    float x[4];
};
constexpr int kWidth = 4, kRowsTogether = 2, kAccumulators = 4, kMixedTogether = 4;
template <class Each> inline V each(Each value) { return {{value(0), value(1), value(2), value(3)}}; }
inline V all(float x) { return {{x, x, x, x}}; }
inline V load(const float *x) { return {{x[0], x[1], x[2], x[3]}}; }
inline V load_bf16(const uint16_t *x) { return each([x](int i) { return from_bf16(x[i]); }); }
inline void store(float *x, const V &v) { std::memcpy(x, v.x, sizeof v.x); }
inline V fma(const V &a, const V &b, const V &c) { return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; }); }
inline V add(const V &a, const V &b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline V subtract(const V &a, const V &b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline V multiply(const V &a, const V &b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline V larger(const V &a, const V &b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
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

constexpr int kBlock = 32;            // tokens whose scores become shares together
constexpr int kQueriesTogether = 4;   // that meet a key at once
constexpr float kLow = -1e30f;        // below every score

// What the next block reads: memory delivers it while this one is computed.
inline void prefetch(const void *x) {
#if defined(__GNUC__)
    __builtin_prefetch(x);
#endif
}

// The sum of each of up to four vectors.
template <int count> inline void sums_of(const V *v, float *out) {
#if defined(__AVX2__)
    __m128 x[4];
    for (int i = 0; i < 4; ++i) x[i] = quarter(v[i < count ? i : 0]);
    float sums[4];
    _mm_storeu_ps(sums, _mm_hadd_ps(_mm_hadd_ps(x[0], x[1]), _mm_hadd_ps(x[2], x[3])));
    std::memcpy(out, sums, count * sizeof(float));
#else
    for (int i = 0; i < count; ++i) {
        float x[kWidth];
        store(x, v[i]);
        out[i] = (x[0] + x[1]) + (x[2] + x[3]);
    }
#endif
}

// e to the power of x <= 0, within two units of the last place (the polynomial of Cephes' expf); a NaN stays one.
inline V exponential(V x) {
    x = larger(all(-87.0f), x);
    const V shifted = fma(x, all(1.44269504f), all(12582912.0f)), whole = subtract(shifted, all(12582912.0f));
    const V f = fma(whole, all(2.12194440e-4f), fma(whole, all(-0.693359375f), x));
    V y = fma(f, all(1.9875691500e-4f), all(1.3981999507e-3f));
    y = fma(y, f, all(8.3334519073e-3f));
    y = fma(y, f, all(4.1665795894e-2f));
    y = fma(y, f, all(1.6666665459e-1f));
    y = fma(y, f, all(5.0000001201e-1f));
    y = fma(multiply(y, f), f, add(f, all(1.0f)));
    return times_power(y, shifted);
}

// The products of `rows` keys with `count` queries: put into out[query * kBlock + row], or added to what is there.
template <int rows, int count>
inline void row_scores(const uint16_t *keys, int64_t dim, const float *const *q, bool added, float *out) {
    V sums[rows][count];
    for (auto &of_row : sums)
        for (auto &sum : of_row) sum = all(0);
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
        V key[rows];
        for (int row = 0; row < rows; ++row) {
            key[row] = load_bf16(keys + row * dim + d);
            prefetch(keys + (row + kBlock) * dim + d);
        }
        for (int i = 0; i < count; ++i) {
            const V query = load(q[i] + d);
            for (int row = 0; row < rows; ++row) sums[row][i] = fma(key[row], query, sums[row][i]);
        }
    }
    for (int row = 0; row < rows; ++row) {
        float dots[count];
        sums_of<count>(sums[row], dots);
        for (int i = 0; i < count; ++i) {
            for (int64_t rest = d; rest < dim; ++rest) dots[i] += from_bf16(keys[row * dim + rest]) * q[i][rest];
            float &score = out[i * kBlock + row];
            score = added ? score + dots[i] : dots[i];
        }
    }
}

template <int count>
void block_scores(const uint16_t *keys, int64_t dim, int64_t rows, const float *const *q, bool added, float *out) {
    int64_t row = 0;
    for (; row + kRowsTogether <= rows; row += kRowsTogether)
        row_scores<kRowsTogether, count>(keys + row * dim, dim, q, added, out + row);
    for (; row < rows; ++row) row_scores<1, count>(keys + row * dim, dim, q, added, out + row);
}

// How many of the queries met the block's keys: `count`, or as many as are left.
template <int count>
int score_some(const CachedRows &rows, int64_t token, int64_t tokens, const float *queries, int left, float *out) {
    if constexpr (count > 1) {
        if (left < count) return score_some<count - 1>(rows, token, tokens, queries, left, out);
    }
    const int64_t query_dim = rows.key_dim + rows.further_dim;
    const float *q[count], *further[count];
    for (int i = 0; i < count; ++i) q[i] = queries + i * query_dim, further[i] = q[i] + rows.key_dim;
    block_scores<count>(rows.keys + token * rows.key_dim, rows.key_dim, tokens, q, false, out);
    if (rows.further_dim > 0)
        block_scores<count>(rows.further_keys + token * rows.further_dim, rows.further_dim, tokens, further, true, out);
    return count;
}

struct Softmax {
    float top = kLow, total = 0;
};

// Turns a block's scores into shares, not divided by the total yet; what was mixed before shrinks with a new top.
void weigh(float *scores, int64_t tokens, Softmax &state, float *mixed, int64_t dim) {
    std::fill(scores + tokens, scores + kBlock, kLow);  // they weigh next to nothing, and no value is read for them
    V most = load(scores);
    for (int t = kWidth; t < kBlock; t += kWidth) most = larger(most, load(scores + t));
    float tops[kWidth];
    store(tops, most);
    const float top = *std::max_element(tops, tops + kWidth);
    if (top > state.top) {
        const float shrink = std::exp(state.top - top);
        state.total *= shrink;
        for (int64_t i = 0; i < dim; ++i) mixed[i] *= shrink;
        state.top = top;
    }
    V total = all(0);
    for (int t = 0; t < kBlock; t += kWidth) {
        const V share = exponential(subtract(load(scores + t), all(state.top)));
        store(scores + t, share);
        total = add(total, share);
    }
    float sum;
    const V one[1] = {total};
    sums_of<1>(one, &sum);
    state.total += sum;
}

// mixed[i] += sum over tokens of shares[i][token] * values[token], in `columns` vectors of each.
template <int count, int columns>
inline void mix_columns(const uint16_t *values, int64_t dim, int64_t tokens, const float (*shares)[kBlock], float *mixed,
                        int64_t step) {
    V sums[count][columns];
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < columns; ++c) sums[i][c] = load(mixed + i * step + c * kWidth);
    for (int64_t token = 0; token < tokens; ++token, values += dim) {
        V value[columns];
        for (int c = 0; c < columns; ++c) value[c] = load_bf16(values + c * kWidth);
        prefetch(values + kBlock * dim);
        for (int i = 0; i < count; ++i) {
            const V share = all(shares[i][token]);
            for (int c = 0; c < columns; ++c) sums[i][c] = fma(value[c], share, sums[i][c]);
        }
    }
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < columns; ++c) store(mixed + i * step + c * kWidth, sums[i][c]);
}

template <int count>
int mix_some(const uint16_t *values, int64_t dim, int64_t tokens, const float (*shares)[kBlock], float *mixed,
             int64_t step, int left) {
    if constexpr (count > 1) {
        if (left < count) return mix_some<count - 1>(values, dim, tokens, shares, mixed, step, left);
    }
    constexpr int columns = kAccumulators / count;
    int64_t at = 0;
    for (; at + columns * kWidth <= dim; at += columns * kWidth)
        mix_columns<count, columns>(values + at, dim, tokens, shares, mixed + at, step);
    for (; at + kWidth <= dim; at += kWidth)
        mix_columns<count, 1>(values + at, dim, tokens, shares, mixed + at, step);
    for (; at < dim; ++at)
        for (int i = 0; i < count; ++i)
            for (int64_t token = 0; token < tokens; ++token)
                mixed[i * step + at] += shares[i][token] * from_bf16(values[token * dim + at]);
    return count;
}

void attend_cached(const CachedRows &rows, int64_t begin, int64_t end, const float *queries, int count,
                   const ChunkResult &result) {
    const int64_t query_dim = rows.key_dim + rows.further_dim, step = rows.value_dim;
    Softmax state[kMostTogether];
    std::fill_n(result.mixed, count * step, 0.0f);
    for (int64_t token = begin; token < end; token += kBlock) {
        const int64_t tokens = std::min<int64_t>(kBlock, end - token);
        float shares[kMostTogether][kBlock];
        for (int i = 0; i < count;)
            i += score_some<kQueriesTogether>(rows, token, tokens, queries + i * query_dim, count - i, shares[i]);
        for (int i = 0; i < count; ++i) weigh(shares[i], tokens, state[i], result.mixed + i * step, step);
        const uint16_t *values = rows.values + token * rows.value_dim;
        for (int i = 0; i < count;)
            i += mix_some<kMixedTogether>(values, rows.value_dim, tokens, shares + i, result.mixed + i * step, step,
                                          count - i);
    }
    for (int i = 0; i < count; ++i) result.tops[i] = state[i].top, result.totals[i] = state[i].total;
}

}  // namespace
