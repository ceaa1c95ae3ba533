// The loops of a product of 32 rows in tiles with one vector or some, written once for every format and for vectors of 512
// and 256 bits and plain ones.  The including file defines
//   Bytes     weights of some of a half's 16 rows, 4 columns each; Products, Floats: a number for each of these rows
//   load, low_nibbles, high_nibbles, look_up, load_table, columns: what makes Bytes
//   scales_of, half_scales_of, zeros_of, every, to_floats, multiply, multiply_add, multiply_subtract, store: Floats
//   fetch, kAhead  prefetches what will be read that many bytes further on; how far that is for weights
// and the Math of an instruction set how bytes are multiplied:
//   none(sum of x), prepared(weights), add<count of vectors>(Products, prepared weights, x)  for signed bytes
//   Nibbles, add_unsigned(Nibbles, nibbles, x), whole_sums(Nibbles)                        for numbers from 0 to 15
//   most_vectors                           that are multiplied together
//   joins_halves                           whether several are by tile_vectors.h
//   whole_sums(Nibbles, Nibbles, start)  for numbers from 0 to 32, half of them in each, if has_small_sums
#pragma once
#include "kernel_set.h"

namespace {

// Columns 4j to 4j + 3 and 16 + 4j to 16 + 4j + 3 of the same rows.
struct Weights {
    Bytes first, second;
};

// Of a table whose values are not larger than 16, such as MXFP4's: raised by 16, they are multiplied almost as nibbles are.
template <class Math> struct SmallSums {
    typename Math::Nibbles first, second;
};

template <class Math, bool nibbles, bool small> static inline auto no_products(int32_t sum_of_x) {
    if constexpr (small)
        return SmallSums<Math>{};
    else if constexpr (nibbles)
        return typename Math::Nibbles{};
    else
        return Math::none(sum_of_x);
}

}  // namespace

#include "tile_vectors.h"

namespace {

template <class Codes, class Math, int count, bool small>
void tile_rows(const TileRow &row, const QuantisedVector *x, float *out) {
    if constexpr (count > 1 && Math::joins_halves) return tile_vectors<Codes, Math, count, small>(row, x, out);
    constexpr Format format = kFormats[Codes::kFormat];
    constexpr int parts = 128 / sizeof(Bytes), part_rows = static_cast<int>(kTileRows) / parts;
    const Bytes codes_mean = format.has_table ? load_table(row.table) : Bytes{};
    const Bytes table = format.has_table && !small ? Math::prepared(codes_mean) : codes_mean;
    Floats sums[count][parts];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = every(0.0f);
    constexpr int64_t tiles_ahead = kAhead / (2 * format.half_bytes());
    const uint8_t *w = row.weights, *zeros = row.zeros;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, w += 2 * format.half_bytes(), scales += kTileRows) {
        fetch(scales, 2 * kTileRows, tiles_ahead * 2 * kTileRows);
        if (format.has_zeros && group % 2 == 0) fetch(zeros, kTileRows, tiles_ahead * kTileRows);
        for (int part = 0; part < parts; ++part) {
            const uint8_t *at = w + part * 2 / parts * format.half_bytes() + part % (parts / 2) * sizeof(Bytes);
            if (part % (parts / 2) == 0) fetch(at, format.half_bytes(), kAhead);
            decltype(no_products<Math, format.has_zeros, small>(0)) products[count];
            for (int v = 0; v < count; ++v) products[v] = no_products<Math, format.has_zeros, small>(x[v].sums[group]);
            for (int j = 0; j < 4; ++j) {
                const Weights weights = Codes::template unpack<Math>(at + 64 * j, table);
                for (int v = 0; v < count; ++v) {
                    const int8_t *q = x[v].q + group * kGroup + 4 * j;
                    if constexpr (small) {
                        products[v].first = Math::add_unsigned(products[v].first, weights.first, columns(q));
                        products[v].second = Math::add_unsigned(products[v].second, weights.second, columns(q + 16));
                    } else if constexpr (format.has_zeros) {
                        products[v] = Math::add_unsigned(products[v], weights.first, columns(q));
                        products[v] = Math::add_unsigned(products[v], weights.second, columns(q + 16));
                    } else {
                        products[v] = Math::template add<count>(products[v], weights.first, columns(q));
                        products[v] = Math::template add<count>(products[v], weights.second, columns(q + 16));
                    }
                }
            }
            const uint16_t *at_part = scales + part_rows * part;
            const Floats scale = format.half_scales ? half_scales_of(at_part) : scales_of(at_part);
            for (int v = 0; v < count; ++v) {
                Floats value;
                if constexpr (small) {
                    const int32_t raised = -kSmallTable * x[v].sums[group];
                    value = to_floats(Math::whole_sums(products[v].first, products[v].second, raised));
                } else if constexpr (format.has_zeros) {
                    const float sixteenths = static_cast<float>(x[v].sums[group]) * 0.0625f;
                    value = to_floats(Math::whole_sums(products[v]));
                    value = multiply_subtract(zeros_of(zeros + part_rows * part), every(sixteenths), value);
                } else {
                    value = to_floats(products[v]);
                }
                sums[v][part] = multiply_add(value, multiply(scale, every(x[v].scales[group])), sums[v][part]);
            }
        }
        if constexpr (format.has_zeros) zeros += kTileRows;
    }
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < parts; ++part) store(out + v * kTileRows + part_rows * part, sums[v][part]);
}

}  // namespace
