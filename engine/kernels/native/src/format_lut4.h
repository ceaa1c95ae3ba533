// lut4: a weight is scale * table[q], with a scale for each 32 of a row and a table of 16 whole numbers from -127 to 127 for
// the matrix.  MXFP4, IQ4_NL and the like are such tables.  Codes are laid out as in int4.
#pragma once
#include "format_int8.h"

namespace {

struct Lut4 {
    static constexpr int kFormat = SWITCHYARD_LUT4;

    template <class Math> static Weights unpack(const uint8_t *at, Bytes table) {
        const Bytes pairs = load(at);
        return {look_up(table, low_nibbles(pairs)), look_up(table, high_nibbles(pairs))};
    }

    // Looked up, the codes are a tile of int8.
    static void expand(const HalfTile &half, uint16_t *out) {
        alignas(64) uint8_t values[kHalfRows * kGroup];
        const Bytes table = load_table(half.table);
        for (size_t at = 0; at < sizeof values / 2; at += sizeof(Bytes)) {
            const Bytes pairs = load(half.weights + at);
            const Bytes first = look_up(table, low_nibbles(pairs)), second = look_up(table, high_nibbles(pairs));
            std::memcpy(values + at, &first, sizeof first);
            std::memcpy(values + sizeof values / 2 + at, &second, sizeof second);
        }
        float scales[kHalfRows];
        for (int r = 0; r < kHalfRows; ++r) scales[r] = from_bf16(half.scales[r]);
        Int8::expand_bytes(values, scales, out);
    }

    // Tries scales around those at which the largest weight meets either end of the table, refits each by least
    // squares, and keeps the best, as it will be stored.
    static void fit(const float *w, const FitTarget &target) {
        constexpr int kShares = 8;
        float top[kLanes] = {}, odd[kLanes] = {}, least[kLanes], found[kLanes];
        int end = 0;
        for (int code = 0; code < 16; ++code) {
            const int size = target.table[code] < 0 ? -target.table[code] : target.table[code];
            end = size > end ? size : end;
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float size = std::fabs(w[i * kLanes + lane]);
                top[lane] = size > top[lane] ? size : top[lane];
                odd[lane] += size * 0.0f;  // NaN from infinities and NaNs
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            least[lane] = std::numeric_limits<float>::infinity();
            found[lane] = 0;
        }
        for (int sign = 1; sign >= -1; sign -= 2)
            for (int share = 0; share < kShares; ++share) {
                float scale[kLanes];
                for (int lane = 0; lane < kLanes; ++lane)
                    scale[lane] = round_bf16(static_cast<float>(sign) * top[lane] * (1.1f - 0.05f * static_cast<float>(share)) /
                                             static_cast<float>(end));
                for (int refit = 0; refit < 2; ++refit) {
                    float error[kLanes] = {}, along[kLanes] = {}, squares[kLanes] = {};
                    for (int i = 0; i < kGroup; ++i) {
                        float value[kLanes], off[kLanes];
                        nearest(w + i * kLanes, scale, target.table, value, off);
                        for (int lane = 0; lane < kLanes; ++lane) {
                            error[lane] += off[lane] * off[lane];
                            along[lane] += w[i * kLanes + lane] * value[lane];
                            squares[lane] += value[lane] * value[lane];
                        }
                    }
                    for (int lane = 0; lane < kLanes; ++lane) {
                        const bool better = error[lane] < least[lane];
                        least[lane] = better ? error[lane] : least[lane];
                        found[lane] = better ? scale[lane] : found[lane];
                        scale[lane] = squares[lane] > 0 ? round_bf16(along[lane] / squares[lane]) : scale[lane];
                    }
                }
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            found[lane] = odd[lane] != odd[lane] || top[lane] < 1e-30f ? 0.0f : found[lane];
            target.scales[lane] = odd[lane] != odd[lane] ? kNaN : to_bf16(found[lane]);
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                float best = std::numeric_limits<float>::infinity();
                uint8_t code = 0;
                for (uint8_t at = 0; at < 16; ++at) {
                    const float off = std::fabs(w[i * kLanes + lane] - found[lane] * static_cast<float>(target.table[at]));
                    code = off < best ? at : code;
                    best = off < best ? off : best;
                }
                target.codes[i * kLanes + lane] = code;
            }
    }

  private:
    // The table's value that is nearest to w / scale, and how far scale * value is from w.
    static void nearest(const float *w, const float *scale, const int8_t *table, float *value, float *off) {
        for (int lane = 0; lane < kLanes; ++lane) off[lane] = std::numeric_limits<float>::infinity();
        for (int code = 0; code < 16; ++code) {
            const auto entry = static_cast<float>(table[code]);
            for (int lane = 0; lane < kLanes; ++lane) {
                const float distance = std::fabs(w[lane] - scale[lane] * entry);
                value[lane] = distance < off[lane] ? entry : value[lane];
                off[lane] = distance < off[lane] ? distance : off[lane];
            }
        }
    }
};

}  // namespace
