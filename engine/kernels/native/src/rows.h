// What the kernels of a layer share.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel_set.h"

// Room for a spread vector of n.
constexpr int64_t padded(int64_t n) { return (n + 31) & ~int64_t{31}; }

inline void put(float value, float *out) { *out = value; }
inline void put(float value, uint16_t *out) { *out = to_bf16(value); }

// The sum of the squares of x [n].
inline float squares_of(const float *x, int64_t n) {
    // Sixteen sums side by side, which the compiler keeps in vectors.
    float sums[16] = {};
    int64_t at = 0;
    for (; at + 16 <= n; at += 16)
        for (int64_t i = 0; i < 16; ++i) sums[i] += x[at + i] * x[at + i];
    float squares = 0;
    for (; at < n; ++at) squares += x[at] * x[at];
    for (float sum : sums) squares += sum;
    return squares;
}

// An RMS norm, rounded at most once, at the end.  Hidden states are floats throughout a model: what bf16 would lose of a sum
// that grows from layer to layer is more than what is lost anywhere else.
// `offset` is added to the weights.
template <class Number>
void rms_norm(const float *x, const uint16_t *weight, float epsilon, int64_t n, Number *out, float offset = 0.0f) {
    const float scale = 1.0f / std::sqrt(squares_of(x, n) / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) put((offset + from_bf16(weight[i])) * (x[i] * scale), &out[i]);
}

// The same with weights of another type, or without any.
template <class Number> void rms_norm(const float *x, const float *weight, float epsilon, int64_t n, Number *out) {
    const float scale = 1.0f / std::sqrt(squares_of(x, n) / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) put((weight ? weight[i] : 1.0f) * (x[i] * scale), &out[i]);
}

// hidden + the norm of x, [n].
inline void add_normed(const float *hidden, const float *x, const uint16_t *weight, float epsilon, int64_t n, float *out,
                       float offset) {
    rms_norm(x, weight, epsilon, n, out, offset);
    for (int64_t i = 0; i < n; ++i) out[i] = hidden[i] + out[i];
}

// x * cos + rotate_half(x) * sin, of pairs i and half + i; angles `step` floats apart.
inline void rotate_halves(float *x, int64_t half, const float *cos, const float *sin, int64_t step) {
    for (int64_t i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half], c = cos[i * step], s = sin[i * step];
        x[i] = low * c - high * s;
        x[i + half] = high * c + low * s;
    }
}

// The same of pairs 2i and 2i + 1.
inline void rotate_neighbours(float *x, int64_t half, const float *cos, const float *sin, int64_t step) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos[i * step], s = sin[i * step];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

// Of a head's first `dims`, by one of the rotations of switchyard_kernels.h that leave pairs where they are.
inline void rotate_head(float *x, int64_t dims, int32_t rotation, const float *cos, const float *sin, int64_t step) {
    (rotation == 2 ? rotate_neighbours : rotate_halves)(x, dims / 2, cos, sin, step);
}
