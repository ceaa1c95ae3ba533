// Compiled with AVX2 and FMA.  As in the AVX-512 kernels, with 8 even and 8 odd elements of every 16.
#include <immintrin.h>

#include <cstring>

#include "kernel_set.h"
#include "sum_bytes.h"

namespace {

constexpr int64_t kAhead = 4096;  // bytes of a row between a prefetch and its use, so that memory has answered by then

inline int64_t place(int64_t i) { return (i & ~int64_t{15}) + ((i & 1) << 3) + ((i & 15) >> 1); }

template <class Get> void spread_with(Get get, int64_t n, float *out) {
    const int64_t padded = (n + 15) & ~int64_t{15};
    for (int64_t i = 0; i < padded; ++i) out[place(i)] = i < n ? get(i) : 0.0f;
}

void spread(const uint16_t *x, int64_t n, float *out) {
    spread_with([x](int64_t i) { return from_bf16(x[i]); }, n, out);
}

void spread_floats(const float *x, int64_t n, float *out) {
    spread_with([x](int64_t i) { return x[i]; }, n, out);
}

inline float sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

void dot_pair(const uint16_t *a, const uint16_t *b, const float *x, int64_t n, float *a_out, float *b_out) {
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    __m256 a_even = _mm256_setzero_ps(), a_odd = a_even, b_even = a_even, b_odd = a_even;
    int64_t i = 0;
    const auto step = [&](__m256i va, __m256i vb) {
        const __m256 x_even = _mm256_loadu_ps(x + i), x_odd = _mm256_loadu_ps(x + i + 8);
        a_even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(va, 16)), x_even, a_even);
        a_odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(va, odd)), x_odd, a_odd);
        b_even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(vb, 16)), x_even, b_even);
        b_odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(vb, odd)), x_odd, b_odd);
    };
    for (; i + 16 <= n; i += 16) {
        _mm_prefetch(reinterpret_cast<const char *>(a + i) + kAhead, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char *>(b + i) + kAhead, _MM_HINT_T0);
        step(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(a + i)),
             _mm256_loadu_si256(reinterpret_cast<const __m256i *>(b + i)));
    }
    if (i < n) {
        alignas(32) uint16_t rest_a[16] = {}, rest_b[16] = {};
        std::memcpy(rest_a, a + i, static_cast<size_t>(n - i) * 2);
        std::memcpy(rest_b, b + i, static_cast<size_t>(n - i) * 2);
        step(_mm256_load_si256(reinterpret_cast<const __m256i *>(rest_a)),
             _mm256_load_si256(reinterpret_cast<const __m256i *>(rest_b)));
    }
    *a_out = sum(_mm256_add_ps(a_even, a_odd));
    *b_out = sum(_mm256_add_ps(b_even, b_odd));
}

void mix_rows(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t row = 0; row < rows; ++row) {
            const __m256 share = _mm256_set1_ps(shares[row]);
            for (int b = 0; b < 4; ++b) {
                const auto *at = reinterpret_cast<const __m128i *>(x + row * n + i + 8 * b);
                const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16);
                sum[b] = _mm256_fmadd_ps(_mm256_castsi256_ps(wide), share, sum[b]);
            }
        }
        for (int b = 0; b < 4; ++b) _mm256_storeu_ps(out + i + 8 * b, sum[b]);
    }
    for (; i < n; ++i) {
        out[i] = 0;
        for (int64_t row = 0; row < rows; ++row) out[i] += shares[row] * from_bf16(x[row * n + i]);
    }
}

}  // namespace

const KernelSet kAvx2Kernels = {spread, spread_floats, dot_pair, mix_rows, sum_bytes};
