// What the blocks of GGUF files hold, one weight after the other: the reference for every instruction set.  Layouts:
// ggml-common.h of llama.cpp.
//
// A type has
//   kNumber, kElements, kBytes  ggml's number for it, and of a block
//   values(block, out)          its weights
// Everything is local to the including file, so that the linker never mixes instruction sets.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernel_set.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t u32_at(const uint8_t *at) {
    uint32_t value;
    std::memcpy(&value, at, 4);
    return value;
}
inline uint32_t u16_at(const uint8_t *at) { return static_cast<uint32_t>(at[0] | at[1] << 8); }
#if defined(__F16C__)
inline float half_at(const uint8_t *at) { return _cvtsh_ss(static_cast<uint16_t>(u16_at(at))); }
#elif defined(__aarch64__)
inline float half_at(const uint8_t *at) {
    __fp16 value;
    std::memcpy(&value, at, 2);
    return value;
}
#else
inline float half_at(const uint8_t *at) { return from_half(static_cast<uint16_t>(u16_at(at))); }
#endif

// Scale and lowest value of a group in steps of the block's, 6 bits each in 12 bytes: Q4_K and Q5_K.
inline void steps_at(const uint8_t *packed, int group, float *step, float *lowest) {
    const int k = group & 3;
    const uint8_t first = packed[k], second = packed[4 + k], third = packed[8 + k];
    *step = static_cast<float>(group < 4 ? first & 63 : (third & 15) | (first >> 2 & 48));
    *lowest = static_cast<float>(group < 4 ? second & 63 : third >> 4 | (second >> 2 & 48));
}

// Half of a power of two, from 2^-128 on: tables of E2M1 hold twice its values.
inline float e8m0_half(uint32_t exponent) {
    return float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

constexpr int8_t kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the values

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

// Those of Q5_0 and Q5_1, which have the fifth bits apart.
inline void five_bits(const uint8_t *high, const uint8_t *pairs, int32_t *out) {
    const uint32_t bits = u32_at(high);
    for (int i = 0; i < 16; ++i) {
        out[i] = static_cast<int32_t>((pairs[i] & 15u) | (bits >> i & 1) << 4);
        out[16 + i] = static_cast<int32_t>(pairs[i] >> 4 | (bits >> (16 + i) & 1) << 4);
    }
}

namespace scalar {

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
    static constexpr int kNumber = 2, kElements = 32, kBytes = 18;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block);
        nibble_values(block + 2, out);
        for (int i = 0; i < 32; ++i) out[i] = scale * (out[i] - 8.0f);
    }
};

struct Q4_1 {
    static constexpr int kNumber = 3, kElements = 32, kBytes = 20;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        nibble_values(block + 4, out);
        for (int i = 0; i < 32; ++i) out[i] = scale * out[i] + lowest;
    }
};

struct Q5_0 {
    static constexpr int kNumber = 6, kElements = 32, kBytes = 22;
    static void values(const uint8_t *block, float *out) {
        int32_t q[32];
        const float scale = half_at(block);
        five_bits(block + 2, block + 6, q);
        for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(q[i] - 16);
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
    static constexpr int kNumber = 8, kElements = 32, kBytes = 34;
    static void values(const uint8_t *block, float *out) {
        const float scale = half_at(block);
        for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
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
    static constexpr int kNumber = 12, kElements = 256, kBytes = 144;
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
    static constexpr int kNumber = 20, kElements = 32, kBytes = 18;
    static void values(const uint8_t *block, float *out) { table_values(block + 2, half_at(block), kIq4Nl, out); }
};

struct Iq4Xs {
    static constexpr int kNumber = 23, kElements = 256, kBytes = 136;
    static float step(const uint8_t *block, int group) {
        const int low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        const int high = static_cast<int>(u16_at(block + 2) >> (2 * group) & 3);
        return half_at(block) * static_cast<float>((low | high << 4) - 32);
    }
    static void values(const uint8_t *block, float *out) {
        for (int group = 0; group < 8; ++group)
            table_values(block + 8 + 16 * group, step(block, group), kIq4Nl, out + 32 * group);
    }
};

struct Mxfp4 {
    static constexpr int kNumber = 39, kElements = 32, kBytes = 17;
    static void values(const uint8_t *block, float *out) { table_values(block + 1, e8m0_half(block[0]), kMxfp4, out); }
};

}  // namespace scalar

}  // namespace
