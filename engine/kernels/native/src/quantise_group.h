// Quantisation in plain loops over 16 lanes, which compilers vectorise.  Included by one file per instruction set: everything
// is local to it, so that the linker never mixes them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernel_set.h"
#include "lanes.h"
#include "switchyard_kernels.h"

namespace {

template <class Get> inline void quantise_group(Get get, int8_t *q, float *scale, int32_t *sum) {
    float x[kGroup], most[kLanes] = {}, odd[kLanes] = {};
    for (int i = 0; i < kGroup; ++i) x[i] = get(i);
    for (int half = 0; half < 2; ++half)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float size = std::fabs(x[half * kLanes + lane]);
            most[lane] = size > most[lane] ? size : most[lane];
            odd[lane] += size * 0.0f;  // NaN from infinities and NaNs
        }
    float top = 0, strange = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        top = most[lane] > top ? most[lane] : top;
        strange += odd[lane];
    }
    *sum = 0;
    if (strange != strange) {
        *scale = std::numeric_limits<float>::infinity();
        for (int i = 0; i < kGroup; ++i) {
            if (x[i] != x[i]) *scale = x[i];
            q[i] = std::isinf(x[i]) ? (x[i] > 0 ? 1 : -1) : 0;
            *sum += q[i];
        }
        return;
    }
    if (top < 1e-30f) {  // a reciprocal would overflow, and the products are negligible
        for (int i = 0; i < kGroup; ++i) q[i] = 0;
        *scale = 0;
        return;
    }
    *scale = top / 127.0f;
    const float inverse = 127.0f / top;
    int32_t total = 0;
    for (int i = 0; i < kGroup; ++i) {
        const int32_t value = static_cast<int32_t>(whole(x[i] * inverse));
        q[i] = static_cast<int8_t>(value);
        total += value;
    }
    *sum = total;
}

template <class Get> inline void quantise_vector(Get get, int64_t n, const QuantisedVector &out) {
    int64_t group = 0;
    for (; (group + 1) * kGroup <= n; ++group)
        quantise_group([&](int i) { return get(group * kGroup + i); }, out.q + group * kGroup, out.scales + group,
                       out.sums + group);
    if (group * kGroup < n)
        quantise_group([&](int i) { return group * kGroup + i < n ? get(group * kGroup + i) : 0.0f; },
                       out.q + group * kGroup, out.scales + group, out.sums + group);
}

void quantise_floats(const float *x, int64_t n, const QuantisedVector &out) {
    quantise_vector([x](int64_t i) { return x[i]; }, n, out);
}

void quantise_bf16(const uint16_t *x, int64_t n, const QuantisedVector &out) {
    quantise_vector([x](int64_t i) { return from_bf16(x[i]); }, n, out);
}

constexpr uint16_t kNaN = 0x7fc0, kHalfNaN = 0x7e00;  // the scale of groups with an infinity or a NaN, in bf16 and fp16

// A NaN becomes `low`: the group's scale is NaN already.
static inline float between(float value, float low, float high) {
    value = value > low ? value : low;
    return value < high ? value : high;
}

// Branch-free: the only NaNs here come from a scale, and they survive it.
static inline uint16_t narrow_finite(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
