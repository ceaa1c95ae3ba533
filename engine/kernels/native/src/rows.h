// What the kernels of a layer share.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel_set.h"

// Room for a spread vector of n.
constexpr int64_t padded(int64_t n) { return (n + 31) & ~int64_t{31}; }

// The library's RMS norm in bf16: normalised in fp32, rounded, then scaled by the weight and rounded again.
inline void rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t n, uint16_t *out) {
    float squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += from_bf16(x[i]) * from_bf16(x[i]);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_bf16(weight[i]) * round_bf16(from_bf16(x[i]) * scale));
}
