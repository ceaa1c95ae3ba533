// A block of 32 rows with several vectors at once, where the registers hold all of their sums: weights are unpacked once for
// all vectors, and four columns of a vector are read once for all rows.  Included by tile_rows.h.
#pragma once

namespace {

template <class Codes, class Math, int count, bool small>
void tile_vectors(const TileRow &row, const QuantisedVector *x, float *out) {
    constexpr Format format = kFormats[Codes::kFormat];
    constexpr int parts = 128 / sizeof(Bytes), part_rows = static_cast<int>(kTileRows) / parts;
    const Bytes codes_mean = format.has_table ? load_table(row.table) : Bytes{};
    const Bytes table = format.has_table && !small ? Math::prepared(codes_mean) : codes_mean;
    // One pointer for each vector is all that the other registers hold: its scales lie as far from it as the first one's.
    const int8_t *q[count];
    for (int v = 0; v < count; ++v) q[v] = x[v].q;
    const int64_t to_scales = reinterpret_cast<const int8_t *>(x[0].scales) - x[0].q;
    const int64_t to_sums = reinterpret_cast<const int8_t *>(x[0].sums) - x[0].q;
    const auto add = [](auto &sum, const Bytes &weights, auto columns) {
        if constexpr (format.has_zeros || small)
            sum = Math::add_unsigned(sum, weights, columns);
        else
            sum = Math::template add<count>(sum, weights, columns);
    };
    Floats sums[count][parts];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = every(0.0f);
    constexpr int64_t tiles_ahead = kAhead / (2 * format.half_bytes());
    const uint8_t *w = row.weights, *zeros = row.zeros;
    const uint16_t *scales = row.scales;
    for (int64_t group = 0; group < row.groups; ++group, w += 2 * format.half_bytes(), scales += kTileRows) {
        fetch(w, 2 * format.half_bytes(), kAhead);
        fetch(scales, 2 * kTileRows, tiles_ahead * 2 * kTileRows);
        if (format.has_zeros && group % 2 == 0) fetch(zeros, kTileRows, tiles_ahead * kTileRows);
        float scale_of[count];
        int32_t sum_of[count];
        decltype(no_products<Math, format.has_zeros, small>(0)) products[count][parts];
#pragma GCC unroll 8
        for (int v = 0; v < count; ++v) {
            std::memcpy(&scale_of[v], q[v] + to_scales + 4 * group, 4);
            std::memcpy(&sum_of[v], q[v] + to_sums + 4 * group, 4);
            for (auto &sum : products[v]) sum = no_products<Math, format.has_zeros, small>(sum_of[v]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            Weights weights[parts];
            for (int part = 0; part < parts; ++part) {
                const int64_t half = part * 2 / parts, in_half = part % (parts / 2) * static_cast<int>(sizeof(Bytes));
                weights[part] = Codes::template unpack<Math>(w + half * format.half_bytes() + in_half + 64 * j, table);
            }
#pragma GCC unroll 2
            for (int second = 0; second < 2; ++second)
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v) {
                    const auto four = columns(q[v] + group * kGroup + 16 * second + 4 * j);
                    for (int part = 0; part < parts; ++part) {
                        const Bytes &codes = second ? weights[part].second : weights[part].first;
                        if constexpr (small)
                            add(second ? products[v][part].second : products[v][part].first, codes, four);
                        else
                            add(products[v][part], codes, four);
                    }
                }
        }
        for (int part = 0; part < parts; ++part) {
            const uint16_t *at = scales + part_rows * part;
            const Floats scale = format.half_scales ? half_scales_of(at) : scales_of(at);
            Floats zero{};
            if constexpr (format.has_zeros) zero = multiply(zeros_of(zeros + part_rows * part), every(0.0625f));
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                Floats value;
                if constexpr (small) {
                    const int32_t raised = -kSmallTable * sum_of[v];
                    value = to_floats(Math::whole_sums(products[v][part].first, products[v][part].second, raised));
                } else if constexpr (format.has_zeros) {
                    value = to_floats(Math::whole_sums(products[v][part]));
                    value = multiply_subtract(zero, every(static_cast<float>(sum_of[v])), value);
                } else {
                    value = to_floats(products[v][part]);
                }
                // Rounded as by tile_rows, so that no vector depends on those it is multiplied with.
                sums[v][part] = multiply_add(value, multiply(scale, every(scale_of[v])), sums[v][part]);
            }
        }
        if constexpr (format.has_zeros) zeros += kTileRows;
    }
    for (int v = 0; v < count; ++v)
        for (int part = 0; part < parts; ++part) store(out + v * kTileRows + part_rows * part, sums[v][part]);
}

}  // namespace
