// What the cases are made of: random numbers, and memory of exactly the size that the interface asks for.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernel_set.h"
#include "switchyard_kernels.h"

namespace {

using Random = std::mt19937;

int64_t draw(Random &random, int64_t low, int64_t high) {
    // Not the library's distributions, which differ between libraries: a seed means the same everywhere.
    return low + static_cast<int64_t>(random()) % (high - low + 1);
}

int32_t coin(Random &random) { return static_cast<int32_t>(draw(random, 0, 1)); }

// A small number in bf16; rarely a denormal, an infinity or no number.
uint16_t draw_bf16(Random &random) {
    static const uint16_t odd[] = {0x0000, 0x8000, 0x0001, 0x7f80, 0xff80, 0x7fc0};
    if (draw(random, 0, 4095) == 0) return odd[draw(random, 0, 5)];
    const float value = static_cast<float>(draw(random, -1000000, 1000000)) * 1e-6f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
}

std::vector<uint16_t> draw_row(Random &random, int64_t count) {
    std::vector<uint16_t> row(static_cast<size_t>(count));
    for (auto &value : row) value = draw_bf16(random);
    return row;
}

std::vector<uint16_t> in_bf16(const std::vector<float> &values) {
    std::vector<uint16_t> rounded;
    for (const float value : values) rounded.push_back(to_bf16(value));
    return rounded;
}

std::vector<float> draw_floats(Random &random, int64_t count) {
    std::vector<float> row(static_cast<size_t>(count));
    for (auto &value : row) value = from_bf16(draw_bf16(random));
    return row;
}

// Whether both hold the same numbers, bit by bit, or none at the same places: which of two NaNs comes out of a sum is the
// compiler's choice, and it chooses anew for what is left over of a loop of vectors.
bool same(const float *some, const float *others, size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (std::memcmp(&some[i], &others[i], sizeof *some) != 0 && (some[i] == some[i] || others[i] == others[i])) return false;
    return true;
}
bool same(const std::vector<float> &some, const std::vector<float> &others) {
    return some.size() == others.size() && same(some.data(), others.data(), some.size());
}

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "driver: %s\n", what);
    std::abort();
}

struct OwnPool {
    SwitchyardPool *pool;
    explicit OwnPool(int32_t threads) : pool(switchyard_pool_create(threads)) { require(pool != nullptr, "no pool"); }
    ~OwnPool() { switchyard_pool_destroy(pool); }
    OwnPool(const OwnPool &) = delete;
    OwnPool &operator=(const OwnPool &) = delete;
};

// A matrix with memory of its own, quantised from random weights.
struct OwnMatrix {
    std::vector<uint16_t> plain, scales;
    std::vector<uint8_t> tiles, zeros;
    std::vector<int8_t> table;
    SwitchyardMatrix matrix{};

    OwnMatrix(SwitchyardPool *pool, Random &random, int64_t rows, int64_t columns, int32_t format, int32_t pairing)
        : plain(draw_row(random, rows * columns)) {
        matrix = {plain.data(), nullptr, nullptr, nullptr, rows, columns, format, pairing};
        if (format == SWITCHYARD_BF16) return;
        const auto count = static_cast<size_t>((rows + 31) / 32 * ((columns + 31) / 32));
        tiles.resize(count * (format == SWITCHYARD_INT8 ? 1024 : 512));
        scales.resize(count * 32);
        if (format == SWITCHYARD_INT4) zeros.resize(count * 32);
        if (format == SWITCHYARD_LUT4) {
            const int most = coin(random) ? 127 : 16;  // tables of small values are multiplied in another way
            for (int code = 0; code < 16; ++code) table.push_back(static_cast<int8_t>(draw(random, -most, most)));
        }
        matrix.weights = tiles.data();
        matrix.scales = scales.data();
        matrix.zeros = zeros.empty() ? nullptr : zeros.data();
        matrix.table = table.empty() ? nullptr : table.data();
        SwitchyardMatrix fitted = matrix;
        if (format == SWITCHYARD_LUT4) {  // fitting tries so much that a sanitizer would see little else: one tile for all
            fitted.rows = std::min<int64_t>(rows, 32);
            fitted.columns = std::min<int64_t>(columns, 32);
        }
        require(switchyard_quantise(pool, &fitted, plain.data(), static_cast<int32_t>(draw(random, 0, 4))) == 0,
                "not quantised");
        if (format != SWITCHYARD_LUT4) return;
        for (size_t tile = 1; tile < count; ++tile) {
            std::memcpy(tiles.data() + 512 * tile, tiles.data(), 512);
            std::memcpy(scales.data() + 32 * tile, scales.data(), 32 * sizeof scales[0]);
        }
    }
};

// The records of a layer's experts: first, down, their scales, zeros, tables and biases, one piece of memory for each expert.
struct OwnExperts {
    std::vector<std::vector<uint16_t>> records;  // 2-byte units, so that every part is aligned
    std::vector<const uint8_t *> beginnings;
    SwitchyardExperts layer{};

    OwnExperts(SwitchyardPool *pool, Random &random, int32_t format) {
        const auto pairing = static_cast<int32_t>(draw(random, 0, 2));
        const bool gated = pairing != SWITCHYARD_PLAIN;
        layer.count = static_cast<int32_t>(draw(random, 1, 9));
        layer.hidden = static_cast<int32_t>(draw(random, 1, 150));
        layer.inner = static_cast<int32_t>(draw(random, 1, 120));
        layer.pairing = pairing;
        layer.activation = static_cast<int32_t>(draw(random, 0, gated ? 5 : 4));
        layer.limit = coin(random) ? 7.0f : std::numeric_limits<float>::infinity();
        layer.alpha = 1.702f;
        const bool biased = coin(random) != 0;
        for (int32_t expert = 0; expert < layer.count; ++expert) {
            std::vector<uint16_t> record;
            const int64_t rows = int64_t{layer.inner} * (gated ? 2 : 1);
            const OwnMatrix first(pool, random, rows, layer.hidden, format, pairing);
            const OwnMatrix down(pool, random, layer.hidden, layer.inner, format, SWITCHYARD_PLAIN);
            layer.first = append(record, first, random, biased);
            layer.down = append(record, down, random, biased);
            record.shrink_to_fit();
            records.push_back(std::move(record));
        }
        for (const auto &record : records) beginnings.push_back(reinterpret_cast<const uint8_t *>(record.data()));
        layer.scattered = beginnings.data();
    }

    static int64_t append(std::vector<uint16_t> &record, const void *from, size_t bytes) {
        const size_t at = record.size();
        record.resize(at + (bytes + 1) / 2);
        std::memcpy(record.data() + at, from, bytes);
        return static_cast<int64_t>(at * 2);
    }

    static SwitchyardRecordPart append(std::vector<uint16_t> &record, const OwnMatrix &own, Random &random,
                                       bool biased) {
        SwitchyardRecordPart part{};
        part.scales = part.zeros = part.table = -1;
        part.format = own.matrix.format;
        part.has_bias = biased;
        if (own.matrix.format == SWITCHYARD_BF16) {
            part.weights = append(record, own.plain.data(), own.plain.size() * 2);
        } else {
            part.weights = append(record, own.tiles.data(), own.tiles.size());
            part.scales = append(record, own.scales.data(), own.scales.size() * 2);
            if (!own.zeros.empty()) part.zeros = append(record, own.zeros.data(), own.zeros.size());
            if (!own.table.empty()) part.table = append(record, own.table.data(), own.table.size());
        }
        if (biased) {
            const auto bias = draw_row(random, own.matrix.rows);
            part.bias = append(record, bias.data(), bias.size() * 2);
        }
        return part;
    }
};

}  // namespace
