// For AArch64, where every processor has vectors of 128 bits: nothing to detect.
#include <arm_neon.h>

#include <cstring>

#include "kernel_set.h"
#include "sum_bytes.h"

namespace {

constexpr int64_t kStep = 16;

void spread(const uint16_t *x, int64_t n, float *out) {
    const int64_t padded = (n + kStep - 1) / kStep * kStep;
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(x[i]);
    for (int64_t i = n; i < padded; ++i) out[i] = 0;
}

void spread_floats(const float *x, int64_t n, float *out) {
    const int64_t padded = (n + kStep - 1) / kStep * kStep;
    for (int64_t i = 0; i < n; ++i) out[i] = x[i];
    for (int64_t i = n; i < padded; ++i) out[i] = 0;
}

// A bf16 number is the upper half of a float: zeros are interleaved below.
inline float32x4_t low_floats(uint16x8_t halves) {
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), halves));
}

inline float32x4_t high_floats(uint16x8_t halves) {
    return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), halves));
}

struct Sums {
    float32x4_t part[4];
    Sums() { for (auto &sum : part) sum = vdupq_n_f32(0); }
    void add(const uint16_t *weights, const float32x4_t *x) {
        const uint16x8_t first = vld1q_u16(weights), second = vld1q_u16(weights + 8);
        part[0] = vfmaq_f32(part[0], low_floats(first), x[0]);
        part[1] = vfmaq_f32(part[1], high_floats(first), x[1]);
        part[2] = vfmaq_f32(part[2], low_floats(second), x[2]);
        part[3] = vfmaq_f32(part[3], high_floats(second), x[3]);
    }
    float total() const { return vaddvq_f32(vaddq_f32(vaddq_f32(part[0], part[1]), vaddq_f32(part[2], part[3]))); }
};

void dot_pair(const uint16_t *a, const uint16_t *b, const float *x, int64_t n, float *a_out, float *b_out) {
    Sums of_a, of_b;
    const auto step = [&](const uint16_t *next_a, const uint16_t *next_b, int64_t i) {
        const float32x4_t four[4] = {vld1q_f32(x + i), vld1q_f32(x + i + 4), vld1q_f32(x + i + 8), vld1q_f32(x + i + 12)};
        of_a.add(next_a, four);
        of_b.add(next_b, four);
    };
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        __builtin_prefetch(a + i + 512);
        __builtin_prefetch(b + i + 512);
        step(a + i, b + i, i);
    }
    if (i < n) {
        uint16_t rest_a[kStep] = {}, rest_b[kStep] = {};
        std::memcpy(rest_a, a + i, static_cast<size_t>(n - i) * 2);
        std::memcpy(rest_b, b + i, static_cast<size_t>(n - i) * 2);
        step(rest_a, rest_b, i);
    }
    *a_out = of_a.total();
    *b_out = of_b.total();
}

void mix_rows(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        float32x4_t sum[8];
        for (auto &part : sum) part = vdupq_n_f32(0);
        for (int64_t row = 0; row < rows; ++row)
            for (int b = 0; b < 4; ++b) {
                const uint16x8_t halves = vld1q_u16(x + row * n + i + 8 * b);
                sum[2 * b] = vfmaq_n_f32(sum[2 * b], low_floats(halves), shares[row]);
                sum[2 * b + 1] = vfmaq_n_f32(sum[2 * b + 1], high_floats(halves), shares[row]);
            }
        for (int b = 0; b < 8; ++b) vst1q_f32(out + i + 4 * b, sum[b]);
    }
    for (; i < n; ++i) {
        out[i] = 0;
        for (int64_t row = 0; row < rows; ++row) out[i] += shares[row] * from_bf16(x[row * n + i]);
    }
}

}  // namespace

const KernelSet kNeonKernels = {spread, spread_floats, dot_pair, mix_rows, sum_bytes};
