#include "self_test.h"

#include <cmath>
#include <vector>

namespace {

bool near(double got, double wanted, double tolerance) { return std::fabs(got - wanted) <= tolerance; }

// A quantised vector with its memory.
struct OwnVector {
    std::vector<int8_t> q;
    std::vector<float> scales;
    std::vector<int32_t> sums;

    explicit OwnVector(int64_t groups) : q(groups * kGroup), scales(groups), sums(groups) {}
    QuantisedVector view() { return {q.data(), scales.data(), sums.data()}; }
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
    if (again.q != out.q || again.sums != out.sums) return 4;
    for (int64_t i = 0; i < groups * kGroup; ++i) {
        const float wanted = i < n ? x[i] : 0.0f;
        if (!near(out.q[i] * out.scales[i / kGroup], wanted, 0.51f * out.scales[i / kGroup])) return 5;
    }
    return 0;
}

// Every byte there is appears among the weights.
int32_t test_dots(const TileKernels &kernels, int64_t groups, int count) {
    const int64_t tile = kTileRows * kGroup;
    std::vector<uint8_t> int8(groups * tile), int4(groups * tile / 2), zeros(groups * kTileRows);
    std::vector<uint16_t> scales(groups * kTileRows);
    for (size_t i = 0; i < int8.size(); ++i) int8[i] = static_cast<uint8_t>((i * 89 + 3) % 255 + 129);  // no -128
    for (size_t i = 0; i < int4.size(); ++i) int4[i] = static_cast<uint8_t>(i * 89 + 3);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = to_bf16(0.001f * static_cast<float>(i % 13 + 1));
    for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i * 73);
    std::vector<OwnVector> vectors(count, OwnVector(groups));
    std::vector<QuantisedVector> x;
    for (int v = 0; v < count; ++v) {
        if (const int32_t wrong = test_quantise(kernels, groups, v, vectors[v])) return wrong;
        x.push_back(vectors[v].view());
    }
    std::vector<float> of_int8(count * kTileRows), of_int4(count * kTileRows);
    kernels.dot_int8({int8.data(), scales.data(), nullptr, groups}, x.data(), count, of_int8.data());
    kernels.dot_int4({int4.data(), scales.data(), zeros.data(), groups}, x.data(), count, of_int4.data());
    for (int v = 0; v < count; ++v)
        for (int64_t r = 0; r < kTileRows; ++r) {
            double want8 = 0, want4 = 0;
            for (int64_t k = 0; k < groups * kGroup; ++k) {
                const int64_t group = k / kGroup, c = k % kGroup, at = group * kTileRows + r;
                const int64_t half = 2 * group + r / kHalfRows, lane = r % kHalfRows * 4 + c % 4;
                const double value = double(x[v].q[k]) * x[v].scales[group] * from_bf16(scales[at]);
                want8 += value * static_cast<int8_t>(int8[half * 512 + c / 4 * 64 + lane]);
                const uint8_t pair = int4[half * 256 + c % 16 / 4 * 64 + lane];
                want4 += value * ((c < 16 ? pair & 15 : pair >> 4) - zeros[at] / 16.0);
            }
            if (!near(of_int8[v * kTileRows + r], want8, 1e-3 + 1e-4 * std::fabs(want8))) return 6;
            if (!near(of_int4[v * kTileRows + r], want4, 1e-3 + 1e-4 * std::fabs(want4))) return 7;
        }
    return 0;
}

int32_t test_expansion(const TileKernels &kernels) {
    uint8_t half[512], zeros[kHalfRows];
    uint16_t scales[kHalfRows], of_int8[512], of_int4[512];
    for (int i = 0; i < 512; ++i) half[i] = static_cast<uint8_t>(i * 89 + 3);
    for (int i = 0; i < kHalfRows; ++i) scales[i] = to_bf16(0.001f * static_cast<float>(i + 1));
    for (int i = 0; i < kHalfRows; ++i) zeros[i] = static_cast<uint8_t>(i * 73);
    kernels.expand_int8(half, scales, of_int8);
    kernels.expand_int4(half, scales, zeros, of_int4);
    for (int r = 0; r < kHalfRows; ++r)
        for (int c = 0; c < kGroup; ++c) {
            const float scale = from_bf16(scales[r]), zero = zeros[r] / 16.0f;
            const uint8_t pair = half[c % 16 / 4 * 64 + r * 4 + c % 4];
            const auto whole = static_cast<int8_t>(half[c / 4 * 64 + r * 4 + c % 4]);
            if (of_int8[r * kGroup + c] != to_bf16(scale * whole)) return 10;
            if (of_int4[r * kGroup + c] != to_bf16(scale * ((c < 16 ? pair & 15 : pair >> 4) - zero))) return 11;
        }
    return 0;
}

int32_t test_fits(const TileKernels &kernels) {
    std::vector<float> w(kGroup * kHalfRows);
    for (size_t i = 0; i < w.size(); ++i) w[i] = 0.002f * static_cast<float>((i * 61) % 97) - 0.09f;
    uint8_t q[kGroup * kHalfRows], zeros[kHalfRows];
    uint16_t scales[kHalfRows];
    kernels.fit_int8(w.data(), q, scales);
    for (size_t i = 0; i < w.size(); ++i) {
        const float scale = from_bf16(scales[i % kHalfRows]);
        if (!near(static_cast<int8_t>(q[i]) * scale, w[i], 0.51 * scale)) return 8;
    }
    kernels.fit_int4(w.data(), 16, q, scales, zeros);
    for (size_t i = 0; i < w.size(); ++i) {
        const float scale = from_bf16(scales[i % kHalfRows]), zero = zeros[i % kHalfRows] / 16.0f;
        if (q[i] > 15 || !near(scale * (q[i] - zero), w[i], 0.05)) return 9;
    }
    return 0;
}

}  // namespace

int32_t test_tiles(const TileKernels &kernels) {
    for (int64_t groups : {1, 2, 5})
        for (int count = 1; count <= kMostVectors; ++count)
            if (const int32_t wrong = test_dots(kernels, groups, count)) return wrong;
    if (const int32_t wrong = test_expansion(kernels)) return wrong;
    return test_fits(kernels);
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
