// Tiles with vectors of 128 bits: 4 rows of 4 columns each.  The including file says how bytes are multiplied:
//   parts(count)  how many vectors of rows are worked on at once for `count` vectors of x, so that the sums fit the registers
//   add<lane>(int32x4_t &sum, weights, x)  adds for 4 rows the products with 4 columns, those of x's `lane`
//   Nibbles, add<lane>(Nibbles &sum, nibbles, x)  the same for numbers from 0 to 15
//   whole_sums of either, prepared(weights), has_small_sums: whether tables of small values are multiplied as nibbles
#pragma once
#include <arm_neon.h>

#include <type_traits>

#include "kernel_set.h"

namespace {

using Bytes = int8x16_t;

// Columns 4j to 4j + 3 and 16 + 4j to 16 + 4j + 3 of the same rows.
struct Weights {
    Bytes first, second;
};

constexpr int64_t kAhead = 2048;  // bytes between a prefetch and the use of the weights

static inline Bytes load(const uint8_t *at) { return vreinterpretq_s8_u8(vld1q_u8(at)); }
static inline Bytes low_nibbles(Bytes pairs) { return vandq_s8(pairs, vdupq_n_s8(15)); }
static inline Bytes high_nibbles(Bytes pairs) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(pairs), 4)); }
static inline Bytes look_up(Bytes table, Bytes codes) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(codes)); }

static inline Bytes load_table(const int8_t *table) { return vld1q_s8(table); }

static inline void fetch(const void *from, int64_t bytes, int64_t ahead) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char *>(from) + at + ahead);
}

static inline float32x4_t scales_of(const uint16_t *scales) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(scales)), 16));
}
static inline float32x4_t half_scales_of(const uint16_t *scales) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales)));
}

// The zeros of 16 rows, 4 in each vector.
static inline void load_zeros(const uint8_t *zeros, float32x4_t (&out)[4]) {
    const uint8x16_t bytes = vld1q_u8(zeros);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    out[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(low)));
    out[1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(low)));
    out[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(high)));
    out[3] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)));
}

// Adds the products of `parts` vectors of rows with two lanes' columns.
template <class Codes, class Math, int count, int lane, int parts, class Products>
static inline void add_lane(const uint8_t *at, Bytes table, const Bytes (*q)[2], Products (*products)[parts]) {
    for (int part = 0; part < parts; ++part) {
        const Weights weights = Codes::template unpack<Math>(at + 64 * lane + 16 * part, table);
        for (int v = 0; v < count; ++v) {
            Math::template add<lane>(products[v][part], weights.first, q[v][0]);
            Math::template add<lane>(products[v][part], weights.second, q[v][1]);
        }
    }
}

// As in tile_rows.h, with x in registers: the instructions take a lane of them.
template <class Codes, class Math, int count, bool small>
void tile_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    constexpr Format format = kFormats[Codes::kFormat];
    constexpr int parts = Math::parts(count);
    using Products = std::conditional_t<format.has_zeros || small, typename Math::Nibbles, int32x4_t>;
    const Bytes table = format.has_table ? load_table(row.table) : Bytes{};
    float32x4_t sums[count][8] = {};
    const uint8_t *w = row.weights;
    for (int64_t group = 0; group < row.groups; ++group) {
        Bytes q[count][2];
        for (int v = 0; v < count; ++v)
            for (int i = 0; i < 2; ++i) q[v][i] = vld1q_s8(x[v].q + group * kGroup + 16 * i);
        for (int half = 0; half < 2; ++half, w += format.half_bytes()) {
            fetch(w, format.half_bytes(), kAhead);
            float32x4_t zeros[4];
            if constexpr (format.has_zeros) load_zeros(row.zeros + group * kTileRows + half * kHalfRows, zeros);
            for (int from = 0; from < 4; from += parts) {
                const uint8_t *at = w + 16 * from;
                Products products[count][parts] = {};
                add_lane<Codes, Math, count, 0>(at, table, q, products);
                add_lane<Codes, Math, count, 1>(at, table, q, products);
                add_lane<Codes, Math, count, 2>(at, table, q, products);
                add_lane<Codes, Math, count, 3>(at, table, q, products);
                for (int part = 0; part < parts; ++part) {
                    const int place = 4 * half + from + part;
                    const uint16_t *scales = row.scales + group * kTileRows + 4 * place;
                    const float32x4_t scale = format.half_scales ? half_scales_of(scales) : scales_of(scales);
                    for (int v = 0; v < count; ++v) {
                        float32x4_t value = vcvtq_f32_s32(Math::whole_sums(products[v][part]));
                        if constexpr (format.has_zeros) {
                            const float sixteenths = static_cast<float>(x[v].sums[group]) * 0.0625f;
                            value = vfmsq_f32(value, zeros[from + part], vdupq_n_f32(sixteenths));
                        }
                        sums[v][place] = vfmaq_f32(sums[v][place], value, vmulq_n_f32(scale, x[v].scales[group]));
                    }
                }
            }
        }
    }
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < 8; ++part) vst1q_f32(out + v * kTileRows + 4 * part, sums[v][part]);
}

}  // namespace

#include "formats.h"
