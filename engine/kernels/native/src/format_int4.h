// int4: a weight is scale * (q - zero / 16), with a scale and a zero point for each 32 of a row.  A tile is 4 vectors a
// half, the j-th with columns 4j to 4j + 3 of 16 rows in its low nibbles and columns 16 + 4j to 16 + 4j + 3 in its high ones.
#pragma once
#include "quantise_group.h"

namespace {

struct Int4Fit {
    float scale[kLanes], zero[kLanes], error[kLanes];
};

// As they will be stored.
static inline float stored_scale(float scale) { return round_bf16(scale); }
static inline float stored_zero(float zero) { return between(whole(zero * 16.0f), 0.0f, 255.0f) / 16.0f; }

// One round: quantises with (scale, zero), keeps them in `best` if they are better, and proposes others by least
// squares over the weights minus what half-quadratic splitting (Badri and Shaji, "Half-Quadratic Quantization",
// 2023; the l_1/2 norm) treats as outliers.  `threshold` is 1 / beta in units of the scale.
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

struct Int4 {
    static constexpr int kFormat = SWITCHYARD_INT4;

    template <class Math> static Weights unpack(const uint8_t *at, Bytes) {
        const Bytes pairs = load(at);
        return {low_nibbles(pairs), high_nibbles(pairs)};
    }

    static void expand(const HalfTile &half, uint16_t *out) {
        alignas(64) uint8_t low[4][64], high[4][64];
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 64; ++i) {
                low[j][i] = half.weights[j * 64 + i] & 15;
                high[j][i] = static_cast<uint8_t>(half.weights[j * 64 + i] >> 4);
            }
        alignas(64) uint8_t rows[kHalfRows][kGroup];
        for (int r = 0; r < kHalfRows; ++r)
            for (int j = 0; j < 4; ++j) {
                std::memcpy(&rows[r][4 * j], &low[j][r * 4], 4);
                std::memcpy(&rows[r][16 + 4 * j], &high[j][r * 4], 4);
            }
        for (int r = 0; r < kHalfRows; ++r) {
            const float scale = from_bf16(half.scales[r]), zero = static_cast<float>(half.zeros[r]) * 0.0625f;
            for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow_finite(scale * (static_cast<float>(rows[r][c]) - zero));
        }
    }

    // Starts from the whole range of each group and from narrower ones, which clip; with no rounds it is plain min-max.
    static void fit(const float *w, const FitTarget &target) {
        uint8_t *q = target.codes;
        uint16_t *scales = target.scales;
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
            best.scale[lane] = from_bf16(kNaN);  // unless something is better
            best.zero[lane] = 0;
            best.error[lane] = std::numeric_limits<float>::infinity();
        }
        for (int start = 0; start < (target.rounds ? kStarts : 1); ++start) {
            for (int lane = 0; lane < kLanes; ++lane) {
                now.scale[lane] = kRange[start] * (high[lane] - low[lane]) / 15.0f;
                now.zero[lane] = now.scale[lane] > 1e-30f ? -kRange[start] * low[lane] / now.scale[lane] : 0.0f;
            }
            float threshold = 0.1f;
            for (int round = 0; round <= target.rounds / kStarts; ++round, threshold *= 0.8f) int4_round(w, threshold, now, best);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            scales[lane] = to_bf16(best.scale[lane]);
            target.zeros[lane] = static_cast<uint8_t>(static_cast<int32_t>(best.zero[lane] * 16.0f));
        }
        float inverse[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) inverse[lane] = best.scale[lane] > 1e-30f ? 1.0f / best.scale[lane] : 0;
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = between(whole(w[i * kLanes + lane] * inverse[lane] + best.zero[lane]), 0.0f, 15.0f);
                q[i * kLanes + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
            }
    }
};

}  // namespace
