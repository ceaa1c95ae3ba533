// Activations of many vectors, in loops that compilers vectorise.  Included by one file per instruction set.
#pragma once
#include <cstring>

#include "activation.h"

namespace {

static inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Within 2 units in the last place between the clamps; infinite above them, 0 below, NaN for a NaN.
static inline float exp_of(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -88.0f ? -88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * bits_to_float((float_to_bits(shifted) + 127) << 23);
}

static inline uint16_t narrow_one(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

static inline float rounded_one(float value) { return bits_to_float(uint32_t{narrow_one(value)} << 16); }

template <bool bf16> static inline float round_to(float value) { return bf16 ? rounded_one(value) : value; }

// `n` values with their partners, as `gated` in activation.h computes each.
template <bool bf16> void silu_rows(float limit, bool gate_only, int n, float *values, const float *partners) {
    for (int i = 0; i < n; ++i) {
        float gate = values[i], up = partners[i];
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        gate = gate_only ? values[i] : gate;
        const float silu = round_to<bf16>(gate / (1.0f + exp_of(-gate)));
        values[i] = gate_only ? silu : round_to<bf16>(silu * up);
    }
}

template <bool bf16> void sigmoid_rows(float limit, float alpha, int n, float *values, const float *partners) {
    for (int i = 0; i < n; ++i) {
        float gate = values[i], up = partners[i];
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        const float sigmoid = round_to<bf16>(1.0f / (1.0f + exp_of(-round_to<bf16>(gate * alpha))));
        values[i] = round_to<bf16>(round_to<bf16>(up + 1.0f) * round_to<bf16>(gate * sigmoid));
    }
}

template <bool bf16> void activate_as(const SwitchyardExperts &layer, const float *bias, int64_t count, float *dots) {
    const bool plain = layer.pairing == SWITCHYARD_PLAIN;
    const int half = static_cast<int>(kHalfRows), n = plain ? 2 * half : half;
    const Rounding round = {bf16};
    for (int64_t v = 0; v < count; ++v, dots += kTileRows) {
        for (int i = 0; i < 2 * half; ++i) dots[i] = round_to<bf16>(dots[i] + bias[i]);
        const float *partners = plain ? dots : dots + half;
        if (layer.activation == 0)
            silu_rows<bf16>(layer.limit, plain, n, dots, partners);
        else if (layer.activation == 5 && !plain)
            sigmoid_rows<bf16>(layer.limit, layer.alpha, n, dots, partners);
        else
            for (int i = 0; i < n; ++i) dots[i] = gated(layer, dots[i], partners[i], round);
    }
}

void activate_rows(const SwitchyardExperts &layer, const float *bias, int64_t count, float *dots) {
    if (layer.first.format == SWITCHYARD_BF16)
        activate_as<true>(layer, bias, count, dots);
    else
        activate_as<false>(layer, bias, count, dots);
}

template <bool bf16>
static inline void add_as(float weight, const float *dots, const float *bias, int64_t rows, float *sum) {
    for (int64_t i = 0; i < rows; ++i) sum[i] += weight * round_to<bf16>(dots[i] + bias[i]);
}

void add_rows(float weight, const float *dots, const float *bias, bool rounds, int64_t rows, float *sum) {
    if (rounds)
        rows == kTileRows ? add_as<true>(weight, dots, bias, kTileRows, sum)
                          : add_as<true>(weight, dots, bias, rows, sum);
    else
        rows == kTileRows ? add_as<false>(weight, dots, bias, kTileRows, sum)
                          : add_as<false>(weight, dots, bias, rows, sum);
}

float soften_row(const float *scores, int64_t step, int64_t keys, int64_t from, int64_t to, float scale, float *top,
                 float *total, uint16_t *shares) {
    constexpr int kLanes = 16;
    from = from < 0 ? 0 : from;
    to = to > keys ? keys : to;
    if (from >= to) {
        std::memset(shares, 0, static_cast<size_t>(keys) * 2);
        return 1.0f;
    }
    float seen[kTileRows], most[kLanes], sums[kLanes] = {};
    for (float &lane : most) lane = -3e38f;
    // The scores of 32 keys, where those not seen are as low as can be.
    const auto block = [&](int64_t at) {
        const float *row = scores + at / kTileRows * step;
        if (at >= from && at + kTileRows <= to) return row;
        for (int64_t i = 0; i < kTileRows; ++i) seen[i] = at + i >= from && at + i < to ? row[i] : -3e38f;
        return static_cast<const float *>(seen);
    };
    const int64_t begin = from / kTileRows * kTileRows, end = (to + kTileRows - 1) / kTileRows * kTileRows;
    for (int64_t at = begin; at < end; at += kTileRows) {
        const float *row = block(at);
        for (int i = 0; i < kLanes; ++i) {
            const float other = row[i] > row[kLanes + i] ? row[i] : row[kLanes + i];
            most[i] = most[i] > other ? most[i] : other;
        }
    }
    float highest = most[0];
    for (int i = 1; i < kLanes; ++i) highest = most[i] > highest ? most[i] : highest;
    highest = highest * scale > *top ? highest * scale : *top;
    const float before = exp_of(*top - highest);
    *top = highest;
    std::memset(shares, 0, static_cast<size_t>(begin) * 2);
    std::memset(shares + end, 0, static_cast<size_t>(keys - end) * 2);
    for (int64_t at = begin; at < end; at += kTileRows) {
        const float *row = block(at);
        float of_row[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
            const float share = exp_of(row[i] * scale - highest);
            of_row[i] = row[i] == -3e38f ? 0.0f : share;
        }
        for (int i = 0; i < kLanes; ++i) sums[i] += of_row[i] + of_row[kLanes + i];
        for (int i = 0; i < kTileRows; ++i) shares[at + i] = narrow_one(of_row[i]);
    }
    float sum = 0;
    for (const float lane : sums) sum += lane;
    *total = before * *total + sum;
    return before;
}

void carry_rows(float before, const float *dots, int64_t rows, float *sum) {
    for (int64_t i = 0; i < rows; ++i) sum[i] = before * sum[i] + dots[i];
}

void narrow_rows(const float *values, int64_t count, uint16_t *out) {
    for (int64_t i = 0; i < count; ++i) out[i] = narrow_one(values[i]);
}

}  // namespace
