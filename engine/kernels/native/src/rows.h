// What the kernels of a layer share.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel_set.h"

// Room for a spread vector of n.
constexpr int64_t padded(int64_t n) { return (n + 31) & ~int64_t{31}; }

// The library's RMS norm in bf16: normalised in fp32, rounded, then scaled by the weight and rounded again; or, in some
// families, rounded once.
inline void rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t n, uint16_t *out,
                     bool rounds_once = false) {
    // Sixteen sums side by side, which the compiler keeps in vectors.
    float sums[16] = {};
    int64_t at = 0;
    for (; at + 16 <= n; at += 16)
        for (int64_t i = 0; i < 16; ++i) sums[i] += from_bf16(x[at + i]) * from_bf16(x[at + i]);
    float squares = 0;
    for (; at < n; ++at) squares += from_bf16(x[at]) * from_bf16(x[at]);
    for (float sum : sums) squares += sum;
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
    if (rounds_once) {
        for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(weight[i]) * (from_bf16(x[i]) * scale));
        return;
    }
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(weight[i]) * round_bf16(from_bf16(x[i]) * scale));
}
