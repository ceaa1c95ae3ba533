// The blocks of GGUF files as records have them: a type whose codes a record keeps has, besides its values,
//   kFormat, kZero    of that record
//   codes(block, out) as kElements / 32 groups
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml_values.h"
#include "switchyard_kernels.h"

namespace {

// The zeros of a type's groups.
enum class Zero { kNone, kEight, kAny };

// 32 weights: scale * code, scale * (code - zero) or scale * table[code].
struct CodedGroup {
    uint32_t words[8];  // codes as in a tile: 4 bytes of each vector, 4 vectors or 8
    float scale, zero;  // zero: of Zero::kAny
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Of scale * code - offset.  A group that is as good as constant, its scale next to nothing, becomes 0 - 8 or 0 + 8 times
// an eighth of it.
inline void set_scale(float scale, float offset, CodedGroup *group) {
    const float size = std::fabs(offset), step = std::fabs(scale);
    const bool flat = scale == 0 || size > 1048576.0f * step;
    group->scale = flat ? size * 0.125f : scale;
    group->zero = !flat ? offset / scale : offset < 0 ? -8.0f : 8.0f;
    if (flat) std::memset(group->words, 0, sizeof group->words);
}

using scalar::F32;
using scalar::F16;
using scalar::Bf16;

struct Q4_0 : scalar::Q4_0 {
    static constexpr int kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kEight;
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 16);
        out->scale = half_at(block);
    }
};

struct Q4_1 : scalar::Q4_1 {
    static constexpr int kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kAny;
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 4, 16);
        set_scale(half_at(block), -half_at(block + 2), out);
    }
};

struct Q5_0 : scalar::Q5_0 {
    static constexpr int kFormat = SWITCHYARD_INT8;
    static constexpr Zero kZero = Zero::kNone;
    static void codes(const uint8_t *block, CodedGroup *out) {
        int32_t q[32];
        int8_t codes[32];
        five_bits(block + 2, block + 6, q);
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(q[i] - 16);
        std::memcpy(out->words, codes, 32);
        out->scale = half_at(block);
    }
};

using scalar::Q5_1;

struct Q8_0 : scalar::Q8_0 {
    static constexpr int kFormat = SWITCHYARD_INT8;
    static constexpr Zero kZero = Zero::kNone;
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 32);
        out->scale = half_at(block);
    }
};

using scalar::Q2K;
using scalar::Q3K;

struct Q4K : scalar::Q4K {
    static constexpr int kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kAny;
    static void codes(const uint8_t *block, CodedGroup *out) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        for (int pair = 0; pair < 4; ++pair) {  // 32 bytes: a group in low bits, the next in high ones
            uint32_t bytes[8];
            std::memcpy(bytes, block + 16 + 32 * pair, 32);
            for (int j = 0; j < 4; ++j) {
                out[2 * pair].words[j] = (bytes[j] & 0x0f0f0f0f) | (bytes[4 + j] & 0x0f0f0f0f) << 4;
                out[2 * pair + 1].words[j] = (bytes[j] >> 4 & 0x0f0f0f0f) | (bytes[4 + j] & 0xf0f0f0f0);
            }
        }
        for (int group = 0; group < 8; ++group) {
            float step, less;
            steps_at(block + 4, group, &step, &less);
            set_scale(scale * step, lowest * less, out + group);
        }
    }
};

using scalar::Q5K;
using scalar::Q6K;

struct Iq4Nl : scalar::Iq4Nl {
    static constexpr int kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 16);
        out->scale = half_at(block);
    }
};

struct Iq4Xs : scalar::Iq4Xs {
    static constexpr int kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static void codes(const uint8_t *block, CodedGroup *out) {
        for (int group = 0; group < 8; ++group) {
            std::memcpy(out[group].words, block + 8 + 16 * group, 16);
            out[group].scale = step(block, group);
        }
    }
};

struct Mxfp4 : scalar::Mxfp4 {
    static constexpr int kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 1, 16);
        out->scale = e8m0_half(block[0]);
    }
};

}  // namespace
