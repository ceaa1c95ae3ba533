// Compiled with AVX-512 F, BW and VL.  A vector load of 32 bf16 splits into its even and odd elements by a shift and
// a mask, so the other operand is kept spread: 16 even elements, then 16 odd ones, of every 32.
#include <immintrin.h>

#include "kernel_set.h"
#include "sum_bytes.h"

namespace {

constexpr int64_t kAhead = 6144;  // bytes of a row between a prefetch and its use, so that memory has answered by then

inline int64_t place(int64_t i) { return (i & ~int64_t{31}) + ((i & 1) << 4) + ((i & 31) >> 1); }

template <class Get> void spread_with(Get get, int64_t n, float *out) {
    const int64_t padded = (n + 31) & ~int64_t{31};
    for (int64_t i = 0; i < padded; ++i) out[place(i)] = i < n ? get(i) : 0.0f;
}

void spread(const uint16_t *x, int64_t n, float *out) {
    int64_t i = 0;
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (; i + 32 <= n; i += 32) {
        const __m512i v = _mm512_loadu_si512(x + i);
        _mm512_storeu_ps(out + i, _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)));
        _mm512_storeu_ps(out + i + 16, _mm512_castsi512_ps(_mm512_and_si512(v, odd)));
    }
    if (i < n) spread_with([x, i](int64_t j) { return from_bf16(x[i + j]); }, n - i, out + i);
}

void spread_floats(const float *x, int64_t n, float *out) {
    spread_with([x](int64_t i) { return x[i]; }, n, out);
}

void dot_pair(const uint16_t *a, const uint16_t *b, const float *x, int64_t n, float *a_out, float *b_out) {
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 a_even = _mm512_setzero_ps(), a_odd = a_even, b_even = a_even, b_odd = a_even;
    int64_t i = 0;
    const auto step = [&](__m512i va, __m512i vb) {
        const __m512 x_even = _mm512_loadu_ps(x + i), x_odd = _mm512_loadu_ps(x + i + 16);
        a_even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(va, 16)), x_even, a_even);
        a_odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(va, odd)), x_odd, a_odd);
        b_even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(vb, 16)), x_even, b_even);
        b_odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(vb, odd)), x_odd, b_odd);
    };
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(reinterpret_cast<const char *>(a + i) + kAhead, _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char *>(b + i) + kAhead, _MM_HINT_T1);
        step(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
    }
    if (i < n) {
        const __mmask32 rest = static_cast<__mmask32>((uint64_t{1} << (n - i)) - 1);
        step(_mm512_maskz_loadu_epi16(rest, a + i), _mm512_maskz_loadu_epi16(rest, b + i));
    }
    *a_out = _mm512_reduce_add_ps(_mm512_add_ps(a_even, a_odd));
    *b_out = _mm512_reduce_add_ps(_mm512_add_ps(b_even, b_odd));
}

// `blocks` accumulators of 16 columns, the last one possibly masked.
template <int blocks> void mix_columns(const uint16_t *x, int64_t rows, int64_t n, const float *shares, __mmask16 last,
                                       float *out) {
    __m512 sum[blocks];
    for (auto &s : sum) s = _mm512_setzero_ps();
    for (int64_t row = 0; row < rows; ++row, x += n) {
        const __m512 share = _mm512_set1_ps(shares[row]);
        for (int b = 0; b < blocks; ++b) {
            const __mmask16 mask = b + 1 == blocks ? last : static_cast<__mmask16>(0xffff);
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + 16 * b));
            sum[b] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)), share, sum[b]);
        }
    }
    for (int b = 0; b < blocks; ++b)
        _mm512_mask_storeu_ps(out + 16 * b, b + 1 == blocks ? last : static_cast<__mmask16>(0xffff), sum[b]);
}

void mix_rows(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) mix_columns<4>(x + i, rows, n, shares, 0xffff, out + i);
    for (; i < n; i += 16) {
        const int64_t left = n - i;
        const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
        mix_columns<1>(x + i, rows, n, shares, mask, out + i);
    }
}

}  // namespace

const KernelSet kAvx512Kernels = {spread, spread_floats, dot_pair, mix_rows, sum_bytes};
