#include "kernel_set.h"
#include "sum_bytes.h"

namespace {

void spread(const uint16_t *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(x[i]);
}

void spread_floats(const float *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i];
}

void dot_pair(const uint16_t *a, const uint16_t *b, const float *x, int64_t n, float *a_out, float *b_out) {
    // Eight partial sums each: compilers turn them into vectors of whatever the target has.
    float sum_a[8] = {}, sum_b[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int lane = 0; lane < 8; ++lane) {
            sum_a[lane] += from_bf16(a[i + lane]) * x[i + lane];
            sum_b[lane] += from_bf16(b[i + lane]) * x[i + lane];
        }
    for (; i < n; ++i) {
        sum_a[0] += from_bf16(a[i]) * x[i];
        sum_b[0] += from_bf16(b[i]) * x[i];
    }
    *a_out = ((sum_a[0] + sum_a[4]) + (sum_a[1] + sum_a[5])) + ((sum_a[2] + sum_a[6]) + (sum_a[3] + sum_a[7]));
    *b_out = ((sum_b[0] + sum_b[4]) + (sum_b[1] + sum_b[5])) + ((sum_b[2] + sum_b[6]) + (sum_b[3] + sum_b[7]));
}

void mix_rows(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = 0;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < n; ++i) out[i] += shares[row] * from_bf16(x[row * n + i]);
}

}  // namespace

const KernelSet kPortableKernels = {spread, spread_floats, dot_pair, mix_rows, sum_bytes};
