// The blocks of GGUF files: their values and, for the types whose codes a record keeps, their codes.  Layouts:
// ggml-common.h of llama.cpp.
//
// A type has
//   kNumber, kElements, kBytes  ggml's number for it, and of a block
//   values(block, out)          its weights
// and where a record keeps its codes, besides
//   kFormat, kZero              of that record
//   codes(block, out)           as kElements / 32 groups
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernel_set.h"
#include "switchyard_kernels.h"

namespace {

// The zeros of a type's groups.
enum class Zero { kNone, kEight, kAny };

// 32 weights: scale * code, scale * (code - zero) or scale * table[code].
struct CodedGroup {
    uint32_t words[8];  // codes as in a tile: 4 bytes of each vector, 4 vectors or 8
    float scale, zero;  // zero: of Zero::kAny
};

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline uint32_t u16_at(const uint8_t *at) { return static_cast<uint32_t>(at[0] | at[1] << 8); }

inline float half_at(const uint8_t *at) { return from_half(static_cast<uint16_t>(u16_at(at))); }

// Scale and lowest value of a group in steps of the block's, 6 bits each in 12 bytes: Q4_K and Q5_K.
inline void steps_at(const uint8_t *packed, int group, float *step, float *lowest) {
    const int k = group & 3;
    const uint8_t first = packed[k], second = packed[4 + k], third = packed[8 + k];
    *step = static_cast<float>(group < 4 ? first & 63 : (third & 15) | (first >> 2 & 48));
    *lowest = static_cast<float>(group < 4 ? second & 63 : third >> 4 | (second >> 2 & 48));
}

inline float e8m0_half(uint32_t exponent) {
    return float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

constexpr int8_t kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 16 bytes with elements 0 to 15 in their low bits and 16 to 31 in their high ones: a tile has them so, too.
inline void nibble_values(const uint8_t *pairs, float *out) {
    for (int i = 0; i < 16; ++i) {
        out[i] = static_cast<float>(pairs[i] & 15);
        out[16 + i] = static_cast<float>(pairs[i] >> 4);
    }
}

inline void table_values(const uint8_t *pairs, float scale, const int8_t *table, float *out) {
    for (int i = 0; i < 16; ++i) {
        out[i] = scale * static_cast<float>(table[pairs[i] & 15]);
        out[16 + i] = scale * static_cast<float>(table[pairs[i] >> 4]);
    }
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

struct F32 {
    static constexpr int kNumber = 0, kElements = 1, kBytes = 4;
    static void values(const uint8_t *block, float *out) { std::memcpy(out, block, 4); }
};

struct F16 {
    static constexpr int kNumber = 1, kElements = 1, kBytes = 2;
    static void values(const uint8_t *block, float *out) { *out = half_at(block); }
};

struct Bf16 {
    static constexpr int kNumber = 30, kElements = 1, kBytes = 2;
    static void values(const uint8_t *block, float *out) { *out = float_of(u16_at(block) << 16); }
};

struct Q4_0 {
    static constexpr int kNumber = 2, kElements = 32, kBytes = 18, kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kEight;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block);
        nibble_values(block + 2, out);
        for (int i = 0; i < 32; ++i) out[i] = scale * (out[i] - 8.0f);
    }
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 16);
        out->scale = half_at(block);
    }
};

struct Q4_1 {
    static constexpr int kNumber = 3, kElements = 32, kBytes = 20, kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kAny;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        nibble_values(block + 4, out);
        for (int i = 0; i < 32; ++i) out[i] = scale * out[i] + lowest;
    }
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 4, 16);
        set_scale(half_at(block), -half_at(block + 2), out);
    }
};

inline void five_bits(const uint8_t *high, const uint8_t *pairs, int32_t *out) {
    uint32_t bits;
    std::memcpy(&bits, high, 4);
    for (int i = 0; i < 16; ++i) {
        out[i] = static_cast<int32_t>((pairs[i] & 15u) | (bits >> i & 1) << 4);
        out[16 + i] = static_cast<int32_t>(pairs[i] >> 4 | (bits >> (16 + i) & 1) << 4);
    }
}

struct Q5_0 {
    static constexpr int kNumber = 6, kElements = 32, kBytes = 22, kFormat = SWITCHYARD_INT8;
    static constexpr Zero kZero = Zero::kNone;
    static void values(const uint8_t *block, float *out) {
        int32_t q[32];
        const float scale = half_at(block);
        five_bits(block + 2, block + 6, q);
        for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(q[i] - 16);
    }
    static void codes(const uint8_t *block, CodedGroup *out) {
        int32_t q[32];
        int8_t codes[32];
        five_bits(block + 2, block + 6, q);
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(q[i] - 16);
        std::memcpy(out->words, codes, 32);
        out->scale = half_at(block);
    }
};

struct Q5_1 {
    static constexpr int kNumber = 7, kElements = 32, kBytes = 24;
    static void values(const uint8_t *block, float *out) {
        int32_t q[32];
        const float scale = half_at(block), lowest = half_at(block + 2);
        five_bits(block + 4, block + 8, q);
        for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(q[i]) + lowest;
    }
};

struct Q8_0 {
    static constexpr int kNumber = 8, kElements = 32, kBytes = 34, kFormat = SWITCHYARD_INT8;
    static constexpr Zero kZero = Zero::kNone;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block);
        for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
    }
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 32);
        out->scale = half_at(block);
    }
};

struct Q2K {
    static constexpr int kNumber = 10, kElements = 256, kBytes = 84;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block + 80), lowest = half_at(block + 82);
        for (int part = 0; part < 16; ++part) {
            const float step = scale * static_cast<float>(block[part] & 15);
            const float less = lowest * static_cast<float>(block[part] >> 4);
            const uint8_t *q = block + 16 + part / 8 * 32 + part % 2 * 16;
            const int shift = part % 8 / 2 * 2;
            for (int i = 0; i < 16; ++i) out[part * 16 + i] = step * static_cast<float>(q[i] >> shift & 3) - less;
        }
    }
};

struct Q3K {
    static constexpr int kNumber = 11, kElements = 256, kBytes = 110;
    static void values(const uint8_t *block, float *out) {
        const uint8_t *scales = block + 96;
        const float scale = half_at(block + 108);
        for (int part = 0; part < 16; ++part) {
            const int low = part < 8 ? scales[part] & 15 : scales[part - 8] >> 4;
            const int high = scales[8 + part % 4] >> (part / 4 * 2) & 3;
            const float step = scale * static_cast<float>((low | high << 4) - 32);
            const uint8_t *q = block + 32 + part / 8 * 32 + part % 2 * 16, *more = block + part % 2 * 16;
            const int shift = part % 8 / 2 * 2, bit = part / 2;
            for (int i = 0; i < 16; ++i) {
                const int value = (q[i] >> shift & 3) - ((more[i] >> bit & 1) ? 0 : 4);
                out[part * 16 + i] = step * static_cast<float>(value);
            }
        }
    }
};

struct Q4K {
    static constexpr int kNumber = 12, kElements = 256, kBytes = 144, kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kAny;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        for (int group = 0; group < 8; ++group) {
            float step, less;
            steps_at(block + 4, group, &step, &less);
            step *= scale;
            less *= lowest;
            const uint8_t *pairs = block + 16 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; ++i) out[group * 32 + i] = step * static_cast<float>(pairs[i] >> shift & 15) - less;
        }
    }
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

struct Q5K {
    static constexpr int kNumber = 13, kElements = 256, kBytes = 176;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        for (int group = 0; group < 8; ++group) {
            float step, less;
            steps_at(block + 4, group, &step, &less);
            step *= scale;
            less *= lowest;
            const uint8_t *high = block + 16, *pairs = block + 48 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; ++i) {
                const int q = (pairs[i] >> shift & 15) | (high[i] >> group & 1) << 4;
                out[group * 32 + i] = step * static_cast<float>(q) - less;
            }
        }
    }
};

struct Q6K {
    static constexpr int kNumber = 14, kElements = 256, kBytes = 210;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block + 208);
        for (int part = 0; part < 16; ++part) {
            const float step = scale * static_cast<float>(static_cast<int8_t>(block[192 + part]));
            const uint8_t *low = block + part / 8 * 64 + part % 4 * 16, *high = block + 128 + part / 8 * 32 + part % 2 * 16;
            const int shift = part % 8 / 4 * 4, more = part % 8 / 2 * 2;
            for (int i = 0; i < 16; ++i) {
                const int q = (low[i] >> shift & 15) | (high[i] >> more & 3) << 4;
                out[part * 16 + i] = step * static_cast<float>(q - 32);
            }
        }
    }
};

struct Iq4Nl {
    static constexpr int kNumber = 20, kElements = 32, kBytes = 18, kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static void values(const uint8_t *block, float *out) { table_values(block + 2, half_at(block), kIq4Nl, out); }
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 2, 16);
        out->scale = half_at(block);
    }
};

struct Iq4Xs {
    static constexpr int kNumber = 23, kElements = 256, kBytes = 136, kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static float step(const uint8_t *block, int group) {
        const int low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        const int high = static_cast<int>(u16_at(block + 2) >> (2 * group) & 3);
        return half_at(block) * static_cast<float>((low | high << 4) - 32);
    }
    static void values(const uint8_t *block, float *out) {
        for (int group = 0; group < 8; ++group)
            table_values(block + 8 + 16 * group, step(block, group), kIq4Nl, out + 32 * group);
    }
    static void codes(const uint8_t *block, CodedGroup *out) {
        for (int group = 0; group < 8; ++group) {
            std::memcpy(out[group].words, block + 8 + 16 * group, 16);
            out[group].scale = step(block, group);
        }
    }
};

struct Mxfp4 {
    static constexpr int kNumber = 39, kElements = 32, kBytes = 17, kFormat = SWITCHYARD_LUT4;
    static constexpr Zero kZero = Zero::kNone;
    static void values(const uint8_t *block, float *out) { table_values(block + 1, e8m0_half(block[0]), kMxfp4, out); }
    static void codes(const uint8_t *block, CodedGroup *out) {
        std::memcpy(out->words, block + 1, 16);
        out->scale = e8m0_half(block[0]);
    }
};

}  // namespace
