// int8: a weight is scale * q, with a scale in fp16 for each 32 of a row.  A tile is 8 vectors a half, the j-th with
// columns 4j to 4j + 3 of 16 rows.
#pragma once
#include "quantise_group.h"

namespace {

struct Int8 {
    static constexpr int kFormat = SWITCHYARD_INT8;

    template <class Math> static Weights unpack(const uint8_t *at, Bytes) {
        return {Math::prepared(load(at)), Math::prepared(load(at + kHalfRows * kGroup / 2))};
    }

    static void expand(const HalfTile &half, uint16_t *out) {
        float scales[kHalfRows];
        for (int r = 0; r < kHalfRows; ++r) scales[r] = from_half(half.scales[r]);
        expand_bytes(half.weights, scales, out);
    }
    static void expand_bytes(const uint8_t *weights, const float *scales, uint16_t *out) {
        alignas(64) int8_t rows[kHalfRows][kGroup];
        for (int r = 0; r < kHalfRows; ++r)
            for (int j = 0; j < 8; ++j) std::memcpy(&rows[r][4 * j], weights + j * 64 + r * 4, 4);
        for (int r = 0; r < kHalfRows; ++r)
            for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow_finite(scales[r] * static_cast<float>(rows[r][c]));
    }

    // Of `rounds` scales from the least one that clips nothing upwards, that with the least squared error: some of them
    // happen to meet a group's values much better than others.
    static void fit(const float *w, const FitTarget &target) {
        for (int from = 0; from < kLanes; from += kLanesAtOnce) fit_vector(w + from, from, target);
    }

  private:
    static constexpr uint16_t kLargestHalf = 0x7bff;
    static constexpr int kStep = 8;  // between scales in units of fp16's last place: 1/256 to 1/128 of them
    static constexpr int kStepsAtOnce = 4;  // sums that do not wait for one another

    // As many lanes as a register has.
    static void fit_vector(const float *w, int from, const FitTarget &target) {
        Lanes largest = {}, odd = {};
        for (int i = 0; i < kGroup; ++i) {
            const Lanes x = read<Lanes>(w + i * kLanes), size = x < 0 ? -x : x;
            largest = size > largest ? size : largest;
            odd += size * 0.0f;  // NaN from infinities and NaNs
        }
        float top[kLanesAtOnce];
        int32_t first[kLanesAtOnce];
        std::memcpy(top, &largest, sizeof top);
        for (int lane = 0; lane < kLanesAtOnce; ++lane) first[lane] = half_above(top[lane] / 127.0f);
        WholeLanes bits = read<WholeLanes>(first);
        const WholeLanes apart = bits < 0x400 ? WholeLanes{} + 1 : WholeLanes{} + kStep;
        const WholeLanes last = WholeLanes{} + kLargestHalf;
        Lanes best = from_halves(bits), least = Lanes{} + std::numeric_limits<float>::infinity();
        const int steps = target.rounds > 1 ? target.rounds : 1;
        for (int step = 0; step < steps; step += kStepsAtOnce) {
            Lanes scale[kStepsAtOnce], inverse[kStepsAtOnce], error[kStepsAtOnce];
            for (int k = 0; k < kStepsAtOnce; ++k, bits += apart) {
                bits = bits < last ? bits : last;
                scale[k] = from_halves(bits);
                inverse[k] = 1.0f / scale[k];
                error[k] = Lanes{};
            }
            for (int i = 0; i < kGroup; ++i) {
                const Lanes value = read<Lanes>(w + i * kLanes);
                for (int k = 0; k < kStepsAtOnce; ++k) {
                    const Lanes x = value * inverse[k], off = x - whole(x);
                    error[k] += off * off;
                }
            }
            for (int k = 0; k < kStepsAtOnce && step + k < steps; ++k) {
                const Lanes squares = error[k] * scale[k] * scale[k];
                best = squares < least ? scale[k] : best;
                least = squares < least ? squares : least;
            }
        }
        const Lanes inverse = 1.0f / best, limit = Lanes{} + 127.0f;
        for (int i = 0; i < kGroup; ++i) {
            Lanes x = whole(read<Lanes>(w + i * kLanes) * inverse);
            x = x > -limit ? x : -limit;  // a NaN too: it is the scale that tells of it
            x = x < limit ? x : limit;
            const ByteLanes codes = __builtin_convertvector(__builtin_convertvector(x, WholeLanes), ByteLanes);
            std::memcpy(target.codes + i * kLanes + from, &codes, sizeof codes);
        }
        for (int lane = 0; lane < kLanesAtOnce; ++lane)
            target.scales[from + lane] = odd[lane] != odd[lane] ? kHalfNaN : top[lane] < 1e-30f ? 0 : to_half(best[lane]);
    }
    // A scale rounded down would clip the largest weight.
    static uint16_t half_above(float value) {
        const uint16_t nearest = to_half(value);
        const auto above = static_cast<uint16_t>(nearest + (from_half(nearest) < value || nearest == 0));
        return above < kLargestHalf ? above : kLargestHalf;
    }
    // Of finite ones that are not negative.
    static Lanes from_halves(WholeLanes bits) {
        const WholeLanes shifted = bits << 13;
        return read<Lanes>(&shifted) * 0x1p112f;
    }
};

}  // namespace
