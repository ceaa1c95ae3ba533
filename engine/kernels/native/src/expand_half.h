// Half a tile to bf16, in loops that compilers make vectors of.  Included by one file per instruction set.
#pragma once
#include <cstring>

#include "kernel_set.h"

namespace {

// Without a branch: of NaNs only those that a scale brings come here, and they survive it.
static inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void expand_int8(const uint8_t *half, const uint16_t *scales, uint16_t *out) {
    alignas(64) int8_t rows[kHalfRows][kGroup];
    for (int r = 0; r < kHalfRows; ++r)
        for (int j = 0; j < 8; ++j) std::memcpy(&rows[r][4 * j], half + j * 64 + r * 4, 4);
    for (int r = 0; r < kHalfRows; ++r) {
        const float scale = from_bf16(scales[r]);
        for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow(scale * static_cast<float>(rows[r][c]));
    }
}

void expand_int4(const uint8_t *half, const uint16_t *scales, const uint8_t *zeros, uint16_t *out) {
    alignas(64) uint8_t low[4][64], high[4][64];
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 64; ++i) {
            low[j][i] = half[j * 64 + i] & 15;
            high[j][i] = static_cast<uint8_t>(half[j * 64 + i] >> 4);
        }
    alignas(64) uint8_t rows[kHalfRows][kGroup];
    for (int r = 0; r < kHalfRows; ++r)
        for (int j = 0; j < 4; ++j) {
            std::memcpy(&rows[r][4 * j], &low[j][r * 4], 4);
            std::memcpy(&rows[r][16 + 4 * j], &high[j][r * 4], 4);
        }
    for (int r = 0; r < kHalfRows; ++r) {
        const float scale = from_bf16(scales[r]), zero = static_cast<float>(zeros[r]) * 0.0625f;
        for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow(scale * (static_cast<float>(rows[r][c]) - zero));
    }
}

}  // namespace
