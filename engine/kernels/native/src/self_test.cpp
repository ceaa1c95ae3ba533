#include "self_test.h"

#include <cmath>
#include <vector>

#include "attend.h"
#include "held_rows.h"

namespace {

bool near(double got, double wanted, double tolerance) { return std::fabs(got - wanted) <= tolerance; }

// A quantised vector with its memory.
struct OwnVector {
    int64_t groups;
    std::vector<int32_t> memory;  // [groups * 8] for q, and [groups] for scales and for sums

    explicit OwnVector(int64_t groups) : groups(groups), memory(groups * (kGroup / 4 + 2)) {}
    QuantisedVector view() {
        int32_t *scales = memory.data() + groups * kGroup / 4;
        return {reinterpret_cast<int8_t *>(memory.data()), reinterpret_cast<float *>(scales), scales + groups};
    }
};

int32_t test_quantise(const TileKernels &kernels, int64_t groups, int seed, OwnVector &out) {
    const int64_t n = groups * kGroup - seed;  // the last group is not full
    std::vector<float> x(n);
    std::vector<uint16_t> halves(n);
    for (int64_t i = 0; i < n; ++i) {
        halves[i] = to_bf16(0.01f * static_cast<float>((i * 37 + seed * 11) % 201 - 100));
        x[i] = from_bf16(halves[i]);
    }
    kernels.quantise_bf16(halves.data(), n, out.view());
    OwnVector again(groups);
    kernels.quantise_floats(x.data(), n, again.view());
    if (again.memory != out.memory) return 4;
    const QuantisedVector found = out.view();
    for (int64_t i = 0; i < groups * kGroup; ++i) {
        const float wanted = i < n ? x[i] : 0.0f;
        if (!near(found.q[i] * found.scales[i / kGroup], wanted, 0.51f * found.scales[i / kGroup])) return 5;
    }
    return 0;
}

// Every byte value is among the weights.
int32_t test_dots(const TileKernels &kernels, int32_t format, int64_t groups, int count, bool small) {
    OwnTiles tiles(format, groups, small);
    std::vector<OwnVector> vectors(count, OwnVector(groups));
    std::vector<QuantisedVector> x;
    for (int v = 0; v < count; ++v) {
        if (const int32_t wrong = test_quantise(kernels, groups, v, vectors[v])) return wrong;
        x.push_back(vectors[v].view());
    }
    std::vector<float> found(count * kTileRows);
    kernels.formats[format].dot(tiles.row(), x.data(), count, found.data());
    for (int v = 0; v < count; ++v)
        for (int64_t r = 0; r < kTileRows; ++r) {
            double wanted = 0;
            for (int64_t k = 0; k < groups * kGroup; ++k)
                wanted += double(x[v].q[k]) * x[v].scales[k / kGroup] * tiles.weight(r, k);
            if (!near(found[v * kTileRows + r], wanted, 1e-3 + 1e-4 * std::fabs(wanted))) return 6;
        }
    return 0;
}

int32_t test_expansion(const TileKernels &kernels, int32_t format) {
    OwnTiles tiles(format, 1);
    for (int64_t half = 0; half < 2; ++half) {
        uint16_t values[kHalfRows * kGroup];
        kernels.formats[format].expand(half_tile(tiles.row(), kFormats[format], 0, half), values);
        for (int64_t r = 0; r < kHalfRows; ++r)
            for (int64_t c = 0; c < kGroup; ++c)
                if (values[r * kGroup + c] != to_bf16(tiles.weight(half * kHalfRows + r, c))) return 10;
    }
    return 0;
}

// Fitted weights are near the given ones: within half a step of int8, a step of 4 bits.
int32_t test_fit(const TileKernels &kernels, int32_t format) {
    std::vector<float> w(kGroup * kHalfRows);
    for (size_t i = 0; i < w.size(); ++i) w[i] = 0.002f * static_cast<float>((i * 61) % 97) - 0.09f;
    uint8_t codes[kGroup * kHalfRows], zeros[kHalfRows] = {};
    uint16_t scales[kHalfRows];
    const OwnTiles tiles(format, 1);
    kernels.formats[format].fit(w.data(), {codes, scales, zeros, tiles.table, 16});
    for (size_t i = 0; i < w.size(); ++i) {
        const float scale = scale_from(kFormats[format], scales[i % kHalfRows]);
        const float value = value_of_code(format, codes[i], scale, zeros[i % kHalfRows], tiles.table);
        const double step = kFormats[format].code_bits == 8 ? 0.51 * scale : 0.05;
        if (codes[i] >> kFormats[format].code_bits || !near(value, w[i], step)) return 8;
    }
    return 0;
}

// Half a tile row and a row of numbers, made of these blocks by one type's kernels.
std::vector<uint8_t> made_of(const BlockType &type, const std::vector<uint8_t> &blocks, int64_t columns) {
    const int32_t format = type.keep ? type.keeps : SWITCHYARD_INT8;
    const int64_t groups = columns / kGroup;
    OwnTiles tiles(format, groups);
    const int64_t bytes = columns / type.elements * type.bytes;
    BlockHalf half = {tiles.row(), columns, 1, format, kPortableTiles.formats[format].fit, 8, {}};
    for (int64_t i = 0; i < kHalfRows; ++i) half.rows[i] = blocks.data() + i * bytes;
    (type.keep ? type.keep : type.fit)(half);
    std::vector<uint8_t> made(tiles.weights);
    for (const uint16_t scale : tiles.scales) made.insert(made.end(), {static_cast<uint8_t>(scale), static_cast<uint8_t>(scale >> 8)});
    made.insert(made.end(), tiles.zeros.begin(), tiles.zeros.end());
    std::vector<uint8_t> row(columns * 2);
    type.unpack(blocks.data(), columns, false, row.data());
    made.insert(made.end(), row.begin(), row.end());
    return made;
}

}  // namespace

int32_t test_blocks(const BlockKernels &kernels) {
    constexpr int64_t columns = 512;
    for (std::size_t i = 0; i < sizeof kernels.types / sizeof *kernels.types; ++i) {
        const BlockType &type = kernels.types[i];
        std::vector<uint8_t> blocks(kHalfRows * columns / type.elements * type.bytes);
        uint32_t state = 1;
        for (uint8_t &byte : blocks) byte = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
        if (made_of(type, blocks, columns) != made_of(kPortableBlocks.types[i], blocks, columns)) return 20;
    }
    return 0;
}

int32_t test_types(const RowKernels &kernels) {
    for (const RowType &type : kernels)
        for (int64_t columns : {type.elements, 3 * type.elements, 9 * kWide}) {
            const int64_t blocks = columns / type.elements, whole = wide_blocks(columns) * kWide;
            std::vector<uint8_t> row(blocks * type.bytes);
            for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<uint8_t>(i * 89 + i / 97 + 3);
            // Numbers of two bytes that may be scales, or weights, are near 0.03; those of four bytes, too.
            for (int64_t at = 1; at < static_cast<int64_t>(row.size()); at += 2) row[at] = static_cast<uint8_t>((row[at] & 0x83) | 0x28);
            if (type.number == 39)  // a byte of exponent
                for (int64_t block = 0; block < blocks; ++block) row[block * type.bytes] = static_cast<uint8_t>(120 + block % 8);
            std::vector<float> weights(columns), values(whole), scales(whole / kGroup);
            kPortableRows.of(type.number)->unpack(row.data(), columns, weights.data());
            for (const BlockType &reference : kPortableBlocks.types)
                if (reference.number == type.number) reference.unpack(row.data(), columns, true, weights.data());
            std::vector<float> unpacked(columns);
            type.unpack(row.data(), columns, unpacked.data());
            for (int64_t i = 0; i < columns; ++i)
                if (!near(unpacked[i], weights[i], 1e-5 * std::fabs(weights[i]) + 1e-6)) return 24;
            std::vector<int8_t> q(whole);
            std::vector<int32_t> sums(whole / kGroup);
            std::vector<int16_t> parts(whole / kPart);
            std::vector<RowVector> x;
            for (int64_t i = 0; i < columns; ++i) {
                values[i] = 0.01f * static_cast<float>(i * 37 % 201 - 100);
                q[i] = static_cast<int8_t>(i * 53 % 255 - 127);
                sums[i / kGroup] += q[i];
            }
            for (int64_t group = 0; group * kGroup < columns; ++group) scales[group] = 0.001f * static_cast<float>(group % 5 + 1);
            const bool wide = type.form == VectorForm::kBy256, plain = type.form == VectorForm::kFloats;
            if (wide) kernels.quantise_wide(values.data(), columns, q.data(), scales.data(), parts.data());
            double wanted = 0, size = 0;
            for (int64_t i = 0; i < columns; ++i) {
                const double value = plain ? values[i] : double(q[i]) * scales[i / (wide ? kWide : kGroup)];
                if (wide && !near(value, values[i], 0.51 * scales[i / kWide])) return 21;
                wanted += value * weights[i];
                size += std::fabs(value * weights[i]);
            }
            for (int v = 0; v < kMostRowVectors; ++v) x.push_back({q.data(), scales.data(), sums.data(), parts.data(), values.data()});
            float found[kMostRowVectors];
            for (int count = 1; count <= kMostRowVectors; ++count) {
                type.dot(row.data(), columns, x.data(), count, found);
                for (int v = 0; v < count; ++v)
                    if (!near(found[v], wanted, 1e-5 * size)) return 22;
            }
            if (!type.unpack_panel) continue;
            std::vector<uint8_t> room(whole * kTileRows + 2 * (whole / kPart * kTileRows * 4) + 64);
            RowPanel panel = {room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63), nullptr, nullptr, 0, 0, false};
            panel.scales = reinterpret_cast<float *>(panel.codes + whole * kTileRows);
            panel.mins = panel.scales + whole / kPart * kTileRows;
            const uint8_t *rows[2 * kTileRows] = {};
            rows[0] = rows[9] = rows[kTileRows - 1] = row.data();
            type.unpack_panel(rows, columns, &panel);
            for (int64_t count : {1, 2, 3, 4, 5, 8})
                for (bool few : {false, true}) {
                    if (few && (!type.multiply_few || count > kMostRowVectors)) continue;
                    std::vector<float> dots(count * kTileRows);
                    if (few)
                        type.multiply_few(rows, columns, x.data(), count, dots.data());
                    else
                        type.multiply(panel, columns, x.data(), count, dots.data());
                    for (size_t i = 0; i < dots.size(); ++i)
                        if (!near(dots[i], rows[i % kTileRows] ? wanted : 0.0, 1e-5 * size)) return 23;
                }
        }
    return 0;
}

int32_t test_tiles(const TileKernels &kernels) {
    for (int32_t format = 1; format < kTiledFormats; ++format) {
        for (int64_t groups : {1, 2, 5})
            for (int count = 1; count <= kernels.most; ++count)
                for (bool small : {false, true})
                    if (const int32_t wrong = test_dots(kernels, format, groups, count, small)) return wrong;
        if (const int32_t wrong = test_expansion(kernels, format)) return wrong;
        if (const int32_t wrong = test_fit(kernels, format)) return wrong;
    }
    return 0;
}

int32_t test_rows(const KernelSet &kernels) {
    for (int64_t n : {1, 7, 16, 31, 32, 33, 576}) {
        std::vector<uint16_t> x(n), a(n), b(n);
        std::vector<float> spread((n + 31) & ~int64_t{31});
        double want_a = 0, want_b = 0;
        for (int64_t i = 0; i < n; ++i) {
            x[i] = to_bf16(0.25f * static_cast<float>(i % 7 - 3));
            a[i] = to_bf16(0.125f * static_cast<float>(i % 11 - 5));
            b[i] = to_bf16(0.5f * static_cast<float>(i % 5 - 2));
            want_a += double(from_bf16(x[i])) * from_bf16(a[i]);
            want_b += double(from_bf16(x[i])) * from_bf16(b[i]);
        }
        float got_a, got_b;
        kernels.spread(x.data(), n, spread.data());
        kernels.dot_pair(a.data(), b.data(), spread.data(), n, &got_a, &got_b);
        if (!near(got_a, want_a, 1e-3) || !near(got_b, want_b, 1e-3)) return 2;
        const float shares[2] = {0.5f, -2.0f};
        std::vector<uint16_t> rows(a);
        rows.insert(rows.end(), b.begin(), b.end());
        std::vector<float> mixed(n);
        kernels.mix_rows(rows.data(), 2, n, shares, mixed.data());
        for (int64_t i = 0; i < n; ++i)
            if (!near(mixed[i], 0.5f * from_bf16(a[i]) - 2.0f * from_bf16(b[i]), 1e-3)) return 3;
    }
    return 0;
}

namespace {

int32_t test_delta(const AttendKernels &kernels) {
    for (int64_t values : {3, 24, 133}) {
        const int64_t keys = 10;
        std::vector<float> state(keys * values), key(keys), query(keys), decay(keys), value(values), out(values);
        for (size_t i = 0; i < state.size(); ++i) state[i] = 0.01f * static_cast<float>(i * 7 % 31) - 0.1f;
        for (int64_t k = 0; k < keys; ++k) {
            key[k] = 0.1f * static_cast<float>(k * 3 % 7) - 0.2f;
            query[k] = 0.05f * static_cast<float>(k);
            decay[k] = 0.5f + 0.04f * static_cast<float>(k);
        }
        for (int64_t i = 0; i < values; ++i) value[i] = 0.25f * static_cast<float>(i % 9) - 1.0f;
        std::vector<double> wanted(state.begin(), state.end());
        const float beta = 0.75f;
        kernels.delta({state.data(), state.data(), 1, keys, values, key.data(), query.data(), value.data(), 0, decay.data(), &beta, out.data(), 0});
        for (int64_t i = 0; i < values; ++i) {
            double found = 0, answer = 0;
            for (int64_t k = 0; k < keys; ++k) found += (wanted[k * values + i] *= decay[k]) * key[k];
            for (int64_t k = 0; k < keys; ++k) {
                double &now = wanted[k * values + i];
                now += 0.75 * (value[i] - found) * key[k];
                answer += now * query[k];
                if (!near(state[k * values + i], now, 1e-5)) return 14;
            }
            if (!near(out[i], answer, 1e-5)) return 15;
        }
    }
    return 0;
}

int32_t test_space(const AttendKernels &kernels) {
    for (int64_t keys : {3, 24, 70}) {
        const int64_t values = 7, tokens = 3, step = 2 * keys + values;
        std::vector<float> before(keys * values), state(before.size()), x(tokens * step), out(tokens * values);
        for (size_t i = 0; i < before.size(); ++i) before[i] = 0.01f * static_cast<float>(i * 7 % 31) - 0.1f;
        for (size_t i = 0; i < x.size(); ++i) x[i] = 0.1f * static_cast<float>(i * 5 % 19) - 0.8f;
        const float decays[] = {0.5f, 0.875f, 0.25f}, betas[] = {0.75f, 1.5f, 0.125f};
        kernels.space({before.data(), state.data(), tokens, keys, values, x.data(), x.data() + keys, x.data() + 2 * keys, step, decays, betas, out.data(), values});
        std::vector<double> wanted(before.begin(), before.end());
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t i = 0; i < values; ++i) {
                const float *of = &x[token * step];
                double answer = 0;
                for (int64_t k = 0; k < keys; ++k) {
                    double &now = wanted[i * keys + k];
                    now = now * decays[token] + double{betas[token]} * of[2 * keys + i] * of[k];
                    answer += now * of[keys + k];
                }
                if (!near(out[token * values + i], answer, 1e-4)) return 22;
            }
        for (size_t i = 0; i < state.size(); ++i)
            if (!near(state[i], wanted[i], 1e-5)) return 23;
    }
    return 0;
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

int32_t test_convolve(const AttendKernels &kernels) {
    for (int64_t kernel : {1, 4, 5}) {
        const int64_t count = 37, tokens = 6;
        std::vector<float> recent(count * kernel), taps(recent.size()), x(tokens * count), out(x.size());
        for (size_t i = 0; i < recent.size(); ++i) {
            recent[i] = 0.1f * static_cast<float>(i * 7 % 23) - 1.0f;
            taps[i] = 0.2f * static_cast<float>(i * 5 % 17) - 1.5f;
        }
        for (size_t i = 0; i < x.size(); ++i) x[i] = 0.3f * static_cast<float>(i * 11 % 29) - 4.0f;
        const std::vector<float> before(recent), bias(count, kernel == 4 ? 0.0f : 0.375f);
        const bool is_linear = kernel == 5;
        kernels.convolve({recent.data(), recent.data(), taps.data(), count, kernel, count, tokens, x.data(), count, out.data(), count,
                          kernel == 4 ? nullptr : bias.data(), is_linear});
        const auto at = [&](int64_t token, int64_t channel) {
            return token < 0 ? before[channel * kernel + kernel + token] : x[token * count + channel];
        };
        for (int64_t channel = 0; channel < count; ++channel)
            for (int64_t token = 0; token < tokens; ++token) {
                double sum = bias[channel];
                for (int64_t i = 0; i < kernel; ++i) sum += taps[i * count + channel] * at(token - kernel + 1 + i, channel);
                if (!near(out[token * count + channel], is_linear ? sum : silu(sum), 1e-4)) return 16;
                if (token < kernel && recent[channel * kernel + kernel - 1 - token] != at(tokens - 1 - token, channel)) return 17;
            }
        for (const bool twice : {false, true}) {
            kernels.gate(x.data(), taps.data(), count, twice, out.data());
            for (int64_t i = 0; i < count; ++i)
                if (!near(out[i], x[i] * (twice ? silu(taps[i]) : 1.0 / (1.0 + std::exp(-taps[i]))), 1e-4)) return 18;
        }
    }
    const std::vector<float> x = {-95.0f, -20.0f, -3.0f, -0.5f, 0.0f, 0.25f, 1.0f, 4.0f, 30.0f, 100.0f, 0.1f};
    const std::vector<float> bias(x.size(), 0.125f);
    std::vector<float> out(x.size());
    kernels.decay(x.data(), bias.data(), -0.75f, static_cast<int64_t>(x.size()), out.data());
    for (size_t i = 0; i < x.size(); ++i)
        if (!near(out[i], std::exp(-0.75 * std::log1p(std::exp(x[i] + 0.125))), 1e-5)) return 21;
    return 0;
}

int32_t test_index(const AttendKernels &kernels) {
    for (int64_t dim : {6, 40}) {
        const int64_t count = 11, tokens = 71, room = 3 * kPageTokens;
        std::vector<uint16_t> keys(room * dim);
        std::vector<float> q(count * dim), weights(count), scores(room), products(count * room);
        for (size_t i = 0; i < keys.size(); ++i) keys[i] = to_bf16(0.125f * static_cast<float>(i * 7 % 23) - 1.0f);
        for (size_t i = 0; i < q.size(); ++i) q[i] = round_bf16(0.05f * static_cast<float>(i * 3 % 29) - 0.7f);
        for (int64_t i = 0; i < count; ++i) weights[i] = 0.5f - 0.1f * static_cast<float>(i);
        const HeldRows rows = {keys.data(), nullptr, dim, 0};
        kernels.index(rows, 0, tokens, {count, q.data(), weights.data()}, scores.data());
        kernels.index(rows, 0, tokens, {count, q.data(), nullptr}, products.data());
        for (int64_t token = 0; token < tokens; ++token) {
            double score = 0;
            for (int64_t i = 0; i < count; ++i) {
                double product = 0;
                for (int64_t d = 0; d < dim; ++d) product += q[i * dim + d] * from_bf16(keys[token * dim + d]);
                if (!near(products[i * room + token], product, 1e-3)) return 19;
                if (product > 0) score += weights[i] * product;
            }
            if (!near(scores[token], score, 1e-3)) return 20;
        }
    }
    return 0;
}

}  // namespace

int32_t test_attend(const AttendKernels &kernels) {
    for (int32_t type = SWITCHYARD_KV_BF16; type <= SWITCHYARD_KV_FP32; ++type)
        for (int64_t dim : {6, 32, 40}) {
            const int64_t tokens = 71, further = 5, room = 3 * kPageTokens;
            const int count = kMostTogether;
            std::vector<float> keys(room * dim), values(keys.size()), more(room * further);
            for (size_t i = 0; i < keys.size(); ++i) {
                keys[i] = 0.125f * static_cast<float>(i * 7 % 23) - 1.0f;
                values[i] = 0.25f * static_cast<float>(i * 5 % 17) - 2.0f;
            }
            for (size_t i = 0; i < more.size(); ++i) more[i] = 0.5f * static_cast<float>(i * 3 % 13) - 3.0f;
            std::vector<uint8_t> held_keys(keys.size() * 4), held_values(held_keys.size()), held_more(more.size() * 4);
            std::vector<float> key_scales(room), value_scales(room), more_scales(room);
            for (int64_t row = 0; row < room; ++row) {
                write_row(type, &keys[row * dim], dim, row, held_keys.data(), key_scales.data());
                write_row(type, &values[row * dim], dim, row, held_values.data(), value_scales.data());
                write_row(type, &more[row * further], further, row, held_more.data(), more_scales.data());
            }
            std::vector<float> q(count * (dim + further)), tops(count, kLow), totals(count), mixed(count * dim);
            for (size_t i = 0; i < q.size(); ++i) q[i] = from_bf16(to_bf16(0.01f * static_cast<float>(i % 29) - 0.1f));
            HeldRows rows = {held_keys.data(), held_values.data(), dim, dim, held_more.data(), further};
            const bool scaled = type == SWITCHYARD_KV_INT8;
            if (scaled) {
                rows.key_scales = key_scales.data();
                rows.value_scales = value_scales.data();
                rows.further_scales = more_scales.data();
            }
            Queries queries = {count, q.data(), 0.5f, {}, {}, 0, 0, tops.data(), totals.data(), mixed.data()};
            for (int i = 0; i < count; ++i) queries.from[i] = i, queries.to[i] = tokens - 2 * i;
            kernels.of_type[type](rows, 0, tokens, queries);
            for (int query = 0; query < count; ++query) {
                const float *mine = &q[query * (dim + further)];
                std::vector<double> sums(dim);
                double total = 0;
                for (int64_t token = queries.from[query]; token < queries.to[query]; ++token) {
                    double score = 0;
                    for (int64_t i = 0; i < dim; ++i) score += mine[i] * keys[token * dim + i];
                    for (int64_t i = 0; i < further; ++i) score += mine[dim + i] * more[token * further + i];
                    const double share = std::exp(0.5 * score - tops[query]);
                    total += share;
                    for (int64_t i = 0; i < dim; ++i) sums[i] += share * values[token * dim + i];
                }
                const double tolerance = scaled ? 0.05 : 1e-3;  // numbers are bf16 but for int8, which rounds them
                if (!near(totals[query], total, tolerance * total)) return 12;
                for (int64_t i = 0; i < dim; ++i)
                    if (!near(mixed[query * dim + i], sums[i], tolerance * total)) return 13;
            }
        }
    if (const int32_t wrong = test_delta(kernels)) return wrong;
    if (const int32_t wrong = test_space(kernels)) return wrong;
    if (const int32_t wrong = test_convolve(kernels)) return wrong;
    return test_index(kernels);
}
