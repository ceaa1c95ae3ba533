// int8: a weight is scale * q, with a scale for each 32 of a row.  A tile is 8 vectors a half, the j-th with columns 4j to
// 4j + 3 of 16 rows.
#pragma once
#include "quantise_group.h"

namespace {

struct Int8 {
    static constexpr int kFormat = SWITCHYARD_INT8;

    template <class Math> static Weights unpack(const uint8_t *at, Bytes) {
        return {Math::prepared(load(at)), Math::prepared(load(at + kHalfRows * kGroup / 2))};
    }

    static void expand(const HalfTile &half, uint16_t *out) {
        alignas(64) int8_t rows[kHalfRows][kGroup];
        for (int r = 0; r < kHalfRows; ++r)
            for (int j = 0; j < 8; ++j) std::memcpy(&rows[r][4 * j], half.weights + j * 64 + r * 4, 4);
        for (int r = 0; r < kHalfRows; ++r) {
            const float scale = from_bf16(half.scales[r]);
            for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow_finite(scale * static_cast<float>(rows[r][c]));
        }
    }

    // Takes the scale with the least squared error, from the smallest that clips nothing upwards: some happen to fit a group's
    // values much better than others.
    static void fit(const float *w, const FitTarget &target) {
        uint8_t *q = target.codes;
        uint16_t *scales = target.scales;
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
};

}  // namespace
