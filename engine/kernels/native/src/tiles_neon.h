// Tiles with vectors of 128 bits: 4 rows of 4 columns each.  The including file says how bytes are multiplied:
//   parts(count)  vectors of rows gone through at once with `count` vectors of x, so that the sums fit the registers
//   add<lane>(int32x4_t sum, weights, x)  adds for 4 rows the products with 4 columns, those of x's `lane`
//   Nibbles, add_nibbles<lane>(Nibbles &, nibbles, x), whole_sums(Nibbles)  the same for numbers from 0 to 15
#pragma once
#include <arm_neon.h>

#include "kernel_set.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes that weights are fetched ahead of their use

static inline void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at + kAhead);
}

static inline float32x4_t scales_of(const uint16_t *scales) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(scales)), 16));
}

template <int count> static inline void load_group(const QuantisedVector *x, int64_t group, int8x16_t (*q)[2]) {
    for (int v = 0; v < count; ++v) {
        q[v][0] = vld1q_s8(x[v].q + group * kGroup);
        q[v][1] = vld1q_s8(x[v].q + group * kGroup + 16);
    }
}

template <int count> static inline void store_sums(const float32x4_t (*sums)[8], float *out) {
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < 8; ++part) vst1q_f32(out + v * kTileRows + 4 * part, sums[v][part]);
}

}  // namespace

#define SWITCHYARD_VECTOR_BITS 128
#include "formats.h"
