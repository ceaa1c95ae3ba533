// Weights to int8 and int4, 16 groups of 32 at a time, one in each lane.  Included by one file per instruction set.
#pragma once
#include "expand_half.h"
#include "quantise_group.h"

namespace {

constexpr uint16_t kNaN = 0x7fc0;  // the scale of groups with an infinity or a NaN, in bf16

// Up to bf16: a scale rounded down would clip the largest weight.
static inline uint16_t bf16_above(float value) {
    const uint16_t nearest = to_bf16(value);
    return from_bf16(nearest) < value ? static_cast<uint16_t>(nearest + 1) : nearest;
}

// A NaN becomes `low`: it is the scale that tells of it.
static inline float between(float value, float low, float high) {
    value = value > low ? value : low;
    return value < high ? value : high;
}

// Of the scales from the least one that clips nothing upwards, that with the least squared error: some of them happen to
// meet a group's values much better than others.
void fit_int8(const float *w, uint8_t *q, uint16_t *scales) {
    constexpr int kScales = 16;  // neighbours in bf16
    float top[kLanes] = {}, odd[kLanes] = {}, inverse[kLanes], least[kLanes];
    uint16_t first[kLanes];
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float size = std::fabs(w[i * kLanes + lane]);
            top[lane] = size > top[lane] ? size : top[lane];
            odd[lane] += size * 0.0f;  // NaN from infinities and NaNs
        }
    for (int lane = 0; lane < kLanes; ++lane) {
        first[lane] = scales[lane] = bf16_above(top[lane] / 127.0f);
        least[lane] = std::numeric_limits<float>::infinity();
    }
    for (int step = 0; step < kScales; ++step) {
        float scale[kLanes], error[kLanes] = {};
        for (int lane = 0; lane < kLanes; ++lane) {
            scale[lane] = from_bf16(static_cast<uint16_t>(first[lane] + step));
            inverse[lane] = 1.0f / scale[lane];
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float x = w[i * kLanes + lane] * inverse[lane];
                const float off = x - between(whole(x), -127.0f, 127.0f);
                error[lane] += off * off;
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            const float squares = error[lane] * scale[lane] * scale[lane];
            const bool better = squares < least[lane];
            least[lane] = better ? squares : least[lane];
            scales[lane] = better ? static_cast<uint16_t>(first[lane] + step) : scales[lane];
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        scales[lane] = odd[lane] != odd[lane] ? kNaN : top[lane] < 1e-30f ? 0 : scales[lane];
        inverse[lane] = top[lane] < 1e-30f ? 0 : 1.0f / from_bf16(scales[lane]);
    }
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float value = between(whole(w[i * kLanes + lane] * inverse[lane]), -127.0f, 127.0f);
            q[i * kLanes + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
        }
}

struct Int4Fit {
    float scale[kLanes], zero[kLanes], error[kLanes];
};

// As they will be stored.
static inline float stored_scale(float scale) { return round_bf16(scale); }
static inline float stored_zero(float zero) { return between(whole(zero * 16.0f), 0.0f, 255.0f) / 16.0f; }

// One round: quantises with (scale, zero), keeps them in `best` where they are better, and proposes others by least
// squares over the weights without what half-quadratic splitting (Badri and Shaji, "Half-Quadratic Quantization",
// 2023; the l_1/2 norm) takes for outliers.  `threshold` is 1 / beta in units of the scale.
void int4_round(const float *w, float threshold, Int4Fit &now, Int4Fit &best) {
    float inverse[kLanes], q_sum[kLanes] = {}, q_squares[kLanes] = {}, t_sum[kLanes] = {}, products[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
        now.scale[lane] = stored_scale(now.scale[lane]);
        now.zero[lane] = stored_zero(now.zero[lane]);
        now.error[lane] = 0;
        inverse[lane] = now.scale[lane] > 1e-30f ? 1.0f / now.scale[lane] : 0.0f;
    }
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float x = w[i * kLanes + lane] * inverse[lane];  // in units of the scale
            const float q = between(whole(x + now.zero[lane]), 0.0f, 15.0f);
            const float error = x - (q - now.zero[lane]), size = std::fabs(error);
            const float kept = size - threshold / std::sqrt(size + 1e-12f);
            const float target = x - (kept > 0 ? std::copysign(kept, error) : 0.0f);
            now.error[lane] += error * error;
            q_sum[lane] += q;
            q_squares[lane] += q * q;
            t_sum[lane] += target;
            products[lane] += q * target;
        }
    for (int lane = 0; lane < kLanes; ++lane) {
        const float error = now.error[lane] * now.scale[lane] * now.scale[lane];
        const bool better = error < best.error[lane];
        best.error[lane] = better ? error : best.error[lane];
        best.scale[lane] = better ? now.scale[lane] : best.scale[lane];
        best.zero[lane] = better ? now.zero[lane] : best.zero[lane];
        const float n = kGroup, spread = n * q_squares[lane] - q_sum[lane] * q_sum[lane];
        const float slope = (n * products[lane] - q_sum[lane] * t_sum[lane]) / (spread > 0 ? spread : 1.0f);
        const bool usable = spread > 0 && slope > 0.25f && slope < 4.0f;
        now.zero[lane] = usable ? (q_sum[lane] - t_sum[lane] / slope) / n : now.zero[lane];
        now.scale[lane] = usable ? slope * now.scale[lane] : now.scale[lane];
    }
}

// Starts from the whole range of each group and from narrower ones, which clip; with no rounds it is plain min-max.
void fit_int4(const float *w, int rounds, uint8_t *q, uint16_t *scales, uint8_t *zeros) {
    constexpr int kStarts = 4;
    constexpr float kRange[kStarts] = {1.0f, 0.9f, 0.8f, 0.7f};
    float low[kLanes] = {}, high[kLanes] = {};
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float value = w[i * kLanes + lane];
            low[lane] = value < low[lane] ? value : low[lane];
            high[lane] = value > high[lane] ? value : high[lane];
        }
    Int4Fit best, now;
    for (int lane = 0; lane < kLanes; ++lane) {
        best.scale[lane] = from_bf16(kNaN);  // where nothing is better
        best.zero[lane] = 0;
        best.error[lane] = std::numeric_limits<float>::infinity();
    }
    for (int start = 0; start < (rounds ? kStarts : 1); ++start) {
        for (int lane = 0; lane < kLanes; ++lane) {
            now.scale[lane] = kRange[start] * (high[lane] - low[lane]) / 15.0f;
            now.zero[lane] = now.scale[lane] > 1e-30f ? -kRange[start] * low[lane] / now.scale[lane] : 0.0f;
        }
        float threshold = 0.1f;
        for (int round = 0; round <= rounds / kStarts; ++round, threshold *= 0.8f) int4_round(w, threshold, now, best);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        scales[lane] = to_bf16(best.scale[lane]);
        zeros[lane] = static_cast<uint8_t>(static_cast<int32_t>(best.zero[lane] * 16.0f));
    }
    float inverse[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) inverse[lane] = best.scale[lane] > 1e-30f ? 1.0f / best.scale[lane] : 0;
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float value = between(whole(w[i * kLanes + lane] * inverse[lane] + best.zero[lane]), 0.0f, 15.0f);
            q[i * kLanes + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
        }
}

}  // namespace
