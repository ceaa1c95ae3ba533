// Plain loops, for processors with none of the other instruction sets.
#include <cstring>

#include "kernel_set.h"

namespace {

struct Bytes {
    int8_t at[64];
};
struct Products {
    int32_t at[kHalfRows];
};
struct Floats {
    float at[kHalfRows];
};

template <class To, class Get> static inline To make(Get get) {
    To to;
    for (int i = 0; i < static_cast<int>(sizeof to.at / sizeof *to.at); ++i) to.at[i] = get(i);
    return to;
}

static inline Bytes load(const uint8_t *at) {
    Bytes bytes;
    std::memcpy(bytes.at, at, sizeof bytes.at);
    return bytes;
}

static inline Bytes low_nibbles(const Bytes &pairs) {
    return make<Bytes>([&](int i) { return static_cast<int8_t>(pairs.at[i] & 15); });
}
static inline Bytes high_nibbles(const Bytes &pairs) {
    return make<Bytes>([&](int i) { return static_cast<int8_t>(pairs.at[i] >> 4 & 15); });
}
static inline Bytes look_up(const Bytes &table, const Bytes &codes) {
    return make<Bytes>([&](int i) { return table.at[codes.at[i]]; });
}
static inline Bytes load_table(const int8_t *table) {
    return make<Bytes>([&](int i) { return table[i & 15]; });
}

static inline const int8_t *columns(const int8_t *q) { return q; }

static inline Floats scales_of(const uint16_t *scales) {
    return make<Floats>([&](int r) { return from_bf16(scales[r]); });
}
static inline Floats half_scales_of(const uint16_t *scales) {
    return make<Floats>([&](int r) { return from_half(scales[r]); });
}
static inline Floats zeros_of(const uint8_t *zeros) {
    return make<Floats>([&](int r) { return static_cast<float>(zeros[r]); });
}
static inline Floats every(float value) {
    return make<Floats>([&](int) { return value; });
}
static inline Floats to_floats(const Products &whole) {
    return make<Floats>([&](int r) { return static_cast<float>(whole.at[r]); });
}
static inline Floats multiply(const Floats &a, const Floats &b) {
    return make<Floats>([&](int r) { return a.at[r] * b.at[r]; });
}
static inline Floats multiply_add(const Floats &a, const Floats &b, const Floats &sum) {
    return make<Floats>([&](int r) { return sum.at[r] + a.at[r] * b.at[r]; });
}
static inline Floats multiply_subtract(const Floats &a, const Floats &b, const Floats &from) {
    return make<Floats>([&](int r) { return from.at[r] - a.at[r] * b.at[r]; });
}
static inline void store(float *to, const Floats &values) { std::memcpy(to, values.at, sizeof values.at); }
constexpr int64_t kAhead = 0;
static inline void fetch(const void *, int64_t, int64_t) {}

struct PlainMath {
    static constexpr int most_vectors = 4;
    static constexpr bool joins_halves = false;
    // Of each column: 8 products of 15 * 127 fit 16 bits.
    struct Nibbles {
        int16_t at[4 * kHalfRows];
    };
    static Products none(int32_t) { return {}; }
    static const Bytes &prepared(const Bytes &weights) { return weights; }
    template <int> static Products add(Products sum, const Bytes &weights, const int8_t *x) {
        for (int r = 0; r < kHalfRows; ++r)
            for (int c = 0; c < 4; ++c) sum.at[r] += weights.at[4 * r + c] * x[c];
        return sum;
    }
    static Nibbles add_unsigned(Nibbles sum, const Bytes &nibbles, const int8_t *x) {
        const int16_t four[4] = {x[0], x[1], x[2], x[3]};
        for (int r = 0; r < kHalfRows; ++r)
            for (int c = 0; c < 4; ++c) sum.at[4 * r + c] += static_cast<int16_t>(nibbles.at[4 * r + c] * four[c]);
        return sum;
    }
    static constexpr bool has_small_sums = false;
    static Products whole_sums(const Nibbles &sum) {
        Products sums;
        for (int r = 0; r < kHalfRows; ++r) {
            const int16_t *of_row = sum.at + 4 * r;
            sums.at[r] = of_row[0] + of_row[1] + of_row[2] + of_row[3];
        }
        return sums;
    }
};

}  // namespace

#include "tile_rows.h"
#include "formats.h"

namespace {

// tile_rows for a table: without instructions that look up many codes at once, both of a byte are looked up together.
template <int count> void table_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    int16_t pairs[256][2];
    for (int pair = 0; pair < 256; ++pair) {
        pairs[pair][0] = row.table[pair & 15];
        pairs[pair][1] = row.table[pair >> 4];
    }
    std::memset(out, 0, count * kTileRows * sizeof *out);
    const uint8_t *w = row.weights;
    for (int64_t group = 0; group < row.groups; ++group)
        for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
            int16_t values[count][kGroup];  // in the order of the codes
            for (int v = 0; v < count; ++v)
                for (int i = 0; i < kGroup; ++i) values[v][i] = x[v].q[group * kGroup + i % 2 * 16 + i / 2];
            for (int64_t r = 0; r < kHalfRows; ++r) {
                int16_t weights[kGroup];
                for (int i = 0; i < kGroup / 2; ++i)
                    std::memcpy(weights + 2 * i, pairs[w[i / 4 * 64 + 4 * r + i % 4]], sizeof *pairs);
                const int64_t place = half * kHalfRows + r;
                const float scale = from_bf16(row.scales[group * kTileRows + place]);
                for (int v = 0; v < count; ++v) {
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; ++i) sum += weights[i] * values[v][i];
                    out[v * kTileRows + place] += static_cast<float>(sum) * (scale * x[v].scales[group]);
                }
            }
        }
}

void table_dot(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return table_rows<1>(row, x, out);
    if (count == 2) return table_rows<2>(row, x, out);
    if (count == 3) return table_rows<3>(row, x, out);
    table_rows<4>(row, x, out);
}

constexpr TileKernels portable_tiles() {
    TileKernels tiles = tile_kernels<PlainMath>();
    tiles.formats[SWITCHYARD_LUT4].dot = table_dot;
    return tiles;
}

}  // namespace

const TileKernels kPortableTiles = portable_tiles();
