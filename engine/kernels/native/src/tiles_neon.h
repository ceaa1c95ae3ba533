// Tiles with vectors of 128 bits: 4 rows of 4 columns each.  The including file says how bytes are multiplied:
//   parts(count)  vectors of rows gone through at once with `count` vectors of x, so that the sums fit the registers
//   add<lane>(int32x4_t sum, weights, x)  adds for 4 rows the products with 4 columns, those of x's `lane`
//   Nibbles, add_nibbles<lane>(Nibbles &, nibbles, x), whole_sums(Nibbles)  the same for numbers from 0 to 15
#pragma once
#include <arm_neon.h>

#include "fit_group.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes that weights are fetched ahead of their use

static inline void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at + kAhead);
}

static inline float32x4_t scales_of(const uint16_t *scales) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(scales)), 16));
}

// The zeros of 16 rows, four by four.
struct Zeros {
    float32x4_t of_part[4];
    explicit Zeros(const uint8_t *zeros) {
        const uint8x16_t bytes = vld1q_u8(zeros);
        const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
        of_part[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(low)));
        of_part[1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(low)));
        of_part[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(high)));
        of_part[3] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)));
    }
};

// Columns 4 lane to 4 lane + 3 and 16 more of `parts` vectors of rows: weights at `at`, 64 bytes a step.
template <class Math, int count, int parts, int lane>
static inline void add_int8(const uint8_t *at, const int8x16_t (*q)[2], int32x4_t (*products)[parts]) {
    for (int later = 0; later < 2; ++later)
        for (int part = 0; part < parts; ++part) {
            const int8x16_t weights = vreinterpretq_s8_u8(vld1q_u8(at + 64 * (lane + 4 * later) + 16 * part));
            for (int v = 0; v < count; ++v)
                products[v][part] = Math::template add<lane>(products[v][part], weights, q[v][later]);
        }
}

template <class Math, int count, int parts, int lane>
static inline void add_int4(const uint8_t *at, const int8x16_t (*q)[2], typename Math::Nibbles (*products)[parts]) {
    for (int part = 0; part < parts; ++part) {
        const uint8x16_t pairs = vld1q_u8(at + 64 * lane + 16 * part);
        const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
        const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
        for (int v = 0; v < count; ++v) {
            Math::template add_nibbles<lane>(products[v][part], first, q[v][0]);
            Math::template add_nibbles<lane>(products[v][part], second, q[v][1]);
        }
    }
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

template <class Math, int count> void dot_int8_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    constexpr int parts = Math::parts(count);
    float32x4_t sums[count][8];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = vdupq_n_f32(0);
    const uint8_t *w = row.weights;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows) {
        int8x16_t q[count][2];
        load_group<count>(x, group, q);
        for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
            fetch(w, kHalfRows * kGroup);
            for (int from = 0; from < 4; from += parts) {
                const uint8_t *at = w + 16 * from;
                int32x4_t products[count][parts];
                for (auto &vector : products)
                    for (auto &product : vector) product = vdupq_n_s32(0);
                add_int8<Math, count, parts, 0>(at, q, products);
                add_int8<Math, count, parts, 1>(at, q, products);
                add_int8<Math, count, parts, 2>(at, q, products);
                add_int8<Math, count, parts, 3>(at, q, products);
                for (int part = 0; part < parts; ++part) {
                    const int place = 4 * half + from + part;
                    const float32x4_t scale = scales_of(scales + 4 * place);
                    for (int v = 0; v < count; ++v)
                        sums[v][place] = vfmaq_f32(sums[v][place], vcvtq_f32_s32(products[v][part]),
                                                   vmulq_n_f32(scale, x[v].scales[group]));
                }
            }
        }
    }
    store_sums<count>(sums, out);
}

template <class Math, int count> void dot_int4_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    constexpr int parts = Math::parts(count);
    float32x4_t sums[count][8];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = vdupq_n_f32(0);
    const uint8_t *w = row.weights;
    for (int64_t group = 0; group < row.groups; ++group) {
        int8x16_t q[count][2];
        load_group<count>(x, group, q);
        for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
            fetch(w, kHalfRows * kGroup / 2);
            const Zeros zeros(row.zeros + group * kTileRows + half * kHalfRows);
            for (int from = 0; from < 4; from += parts) {
                const uint8_t *at = w + 16 * from;
                typename Math::Nibbles products[count][parts];
                for (auto &vector : products)
                    for (auto &product : vector) product = Math::no_nibbles();
                add_int4<Math, count, parts, 0>(at, q, products);
                add_int4<Math, count, parts, 1>(at, q, products);
                add_int4<Math, count, parts, 2>(at, q, products);
                add_int4<Math, count, parts, 3>(at, q, products);
                for (int part = 0; part < parts; ++part) {
                    const int place = 4 * half + from + part;
                    const float32x4_t scale = scales_of(row.scales + group * kTileRows + 4 * place);
                    for (int v = 0; v < count; ++v) {
                        const float sixteenths = static_cast<float>(x[v].sums[group]) * 0.0625f;
                        const float32x4_t whole = vcvtq_f32_s32(Math::whole_sums(products[v][part]));
                        const float32x4_t value =
                            vfmsq_f32(whole, zeros.of_part[from + part], vdupq_n_f32(sixteenths));
                        sums[v][place] = vfmaq_f32(sums[v][place], value, vmulq_n_f32(scale, x[v].scales[group]));
                    }
                }
            }
        }
    }
    store_sums<count>(sums, out);
}

template <class Math> void dot_int8(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return dot_int8_rows<Math, 1>(row, x, out);
    if (count == 2) return dot_int8_rows<Math, 2>(row, x, out);
    if (count == 3) return dot_int8_rows<Math, 3>(row, x, out);
    dot_int8_rows<Math, 4>(row, x, out);
}

template <class Math> void dot_int4(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return dot_int4_rows<Math, 1>(row, x, out);
    if (count == 2) return dot_int4_rows<Math, 2>(row, x, out);
    if (count == 3) return dot_int4_rows<Math, 3>(row, x, out);
    dot_int4_rows<Math, 4>(row, x, out);
}

}  // namespace
