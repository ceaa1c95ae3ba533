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

    // Of `rounds` scales, neighbours in bf16 from the least one that clips nothing upwards, that with the least squared
    // error: some of them happen to meet a group's values much better than others.
    static void fit(const float *w, const FitTarget &target) {
        for (int from = 0; from < kLanes; from += kLanesAtOnce) fit_vector(w + from, from, target);
    }

  private:
#if defined(__AVX512F__)
    static constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
    static constexpr int kVectorBytes = 32;
#else
    static constexpr int kVectorBytes = 16;
#endif
    static constexpr int kLanesAtOnce = kVectorBytes / 4;
    typedef float Lanes __attribute__((vector_size(kVectorBytes)));
    typedef int32_t WholeLanes __attribute__((vector_size(kVectorBytes)));
    typedef int8_t CodeLanes __attribute__((vector_size(kVectorBytes / 4)));

    template <class To> static To read(const void *from) {
        To value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }

    // As many lanes as a register has: compilers do not find these vectors by themselves.
    static void fit_vector(const float *w, int from, const FitTarget &target) {
        Lanes largest = {}, odd = {};
        for (int i = 0; i < kGroup; ++i) {
            const Lanes x = read<Lanes>(w + i * kLanes), size = x < 0 ? -x : x;
            largest = size > largest ? size : largest;
            odd += size * 0.0f;  // NaN from infinities and NaNs
        }
        float top[kLanesAtOnce], first[kLanesAtOnce];
        std::memcpy(top, &largest, sizeof top);
        for (int lane = 0; lane < kLanesAtOnce; ++lane) first[lane] = from_bf16(bf16_above(top[lane] / 127.0f));
        WholeLanes bits = read<WholeLanes>(first);
        Lanes best = read<Lanes>(first), least = Lanes{} + std::numeric_limits<float>::infinity();
        for (int step = 0; step < (target.rounds > 1 ? target.rounds : 1); ++step, bits += 0x10000) {
            const Lanes scale = read<Lanes>(&bits), inverse = 1.0f / scale;
            Lanes error = {};
            for (int i = 0; i < kGroup; ++i) {
                const Lanes x = read<Lanes>(w + i * kLanes) * inverse, off = x - whole(x);
                error += off * off;
            }
            const Lanes squares = error * scale * scale;
            best = squares < least ? scale : best;
            least = squares < least ? squares : least;
        }
        float inverse[kLanesAtOnce];
        for (int lane = 0; lane < kLanesAtOnce; ++lane) {
            const bool is_odd = odd[lane] != odd[lane], nothing = top[lane] < 1e-30f;
            target.scales[from + lane] = is_odd ? kNaN : nothing ? 0 : to_bf16(best[lane]);
            inverse[lane] = nothing ? 0 : 1.0f / from_bf16(target.scales[from + lane]);
        }
        const Lanes scaled = read<Lanes>(inverse), limit = Lanes{} + 127.0f;
        for (int i = 0; i < kGroup; ++i) {
            Lanes x = whole(read<Lanes>(w + i * kLanes) * scaled);
            x = x > -limit ? x : -limit;  // a NaN too: it is the scale that tells of it
            x = x < limit ? x : limit;
            const CodeLanes codes = __builtin_convertvector(__builtin_convertvector(x, WholeLanes), CodeLanes);
            std::memcpy(target.codes + i * kLanes + from, &codes, sizeof codes);
        }
    }
    static Lanes whole(Lanes x) { return (x + kRoundMagic) - kRoundMagic; }
};

}  // namespace
