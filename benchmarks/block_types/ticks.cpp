// Ticks of the processor's counter for a weight of each block type: our dot products with one vector and with four, in
// each instruction set that this processor has, those of 32 rows together as in a prompt, for each of 4 and of 32 vectors, and ggml's own. Called as `ticks COLUMNS FOLDER-OF-GGML-OR-EMPTY`; prints lines of
// "type set vectors ticks", where a type is ggml's number of it, and ggml's own set is called ggml.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <dlfcn.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "row_kernels.h"

namespace {

constexpr int kRows = 16, kRuns = 300, kPromptRuns = 40, kMost = 32;

uint64_t now() {
#if defined(__x86_64__)
    unsigned processor;
    return __rdtscp(&processor);
#else
    uint64_t ticks;
    __asm__ volatile("isb; mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#endif
}

// The least of many runs over all rows, which lie in the cache, for each weight.
template <class Dot>
double ticks(int64_t columns, Dot dot) {
    double best = 1e30;
    for (int run = 0; run < kRuns; run++) {
        const uint64_t begun = now();
        for (int row = 0; row < kRows; row++) dot(row);
        best = std::min(best, double(now() - begun) / double(kRows * columns));
    }
    return best;
}

// ggml-cpu.h
using FromFloat = void (*)(const float *, void *, int64_t);
using VecDot = void (*)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
struct CpuTraits {
    FromFloat from_float;
    VecDot vec_dot;
    int vec_dot_type;
    int64_t nrows;
};
using GetTraits = const CpuTraits *(*)(int);

GetTraits open_ggml(const std::string &folder) {
    if (folder.empty()) return nullptr;
    for (const char *name : {"libggml-base.so", "libggml-cpu.so"})
        if (!dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_GLOBAL)) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
    if (auto init = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "ggml_cpu_init"))) init();
    return reinterpret_cast<GetTraits>(dlsym(RTLD_DEFAULT, "ggml_get_type_traits_cpu"));
}

struct Set {
    const char *name;
    const RowKernels *kernels;
    bool usable;
};

}  // namespace

int main(int, char **arguments) {
    const int64_t columns = std::atoll(arguments[1]);
    const GetTraits traits_of = open_ggml(arguments[2]);
    const Set sets[] = {
#if defined(__x86_64__)
        {"avx512vnni", &kAvx512VnniRows, bool(__builtin_cpu_supports("avx512vnni"))},
        {"avx2", &kAvx2Rows, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#elif defined(__aarch64__)
        {"neon", &kNeonRows, true},
#endif
        {"portable", &kPortableRows, true},
    };
    std::vector<float> x(columns);
    for (int64_t i = 0; i < columns; i++) x[i] = std::sin(i * 1.7f);
    std::vector<int8_t> wide(columns), by_32(columns);
    std::vector<float> wide_scales(columns / 256), scales(columns / 32, 1 / 127.f);
    std::vector<int32_t> sums(columns / 32);
    std::vector<int16_t> parts(columns / 16);
    kPortableRows.quantise_wide(x.data(), columns, wide.data(), wide_scales.data(), parts.data());
    for (int64_t i = 0; i < columns; i++) sums[i / 32] += by_32[i] = static_cast<int8_t>(std::lround(x[i] * 127));
    for (const RowType &type : kPortableRows) {
        if (type.form == VectorForm::kFloats || columns % type.elements) continue;
        const int64_t row_bytes = columns / type.elements * type.bytes;
        std::vector<uint8_t> rows(row_bytes * kRows + 8192);  // kernels may read a little beyond
        uint32_t seed = 1;
        for (uint8_t &byte : rows) byte = (seed = seed * 1664525 + 1013904223) >> 24;
        for (size_t i = 1; i < rows.size(); i += 2) rows[i] = (rows[i] & 0x83) | 0x28;  // halves that are small numbers
        const bool is_wide = type.form == VectorForm::kBy256;
        const RowVector vector{is_wide ? wide.data() : by_32.data(), is_wide ? wide_scales.data() : scales.data(), sums.data(),
                               parts.data(), x.data()};
        const std::vector<RowVector> vectors(kMost, vector);
        float out[kMost * 32];
        const uint8_t *both[64] = {};
        for (int row = 0; row < 32; row++) both[row] = rows.data() + row % kRows * row_bytes;
        std::vector<uint8_t> room(columns * (32 + 2 * 32 * 4 / 16) + 64);
        RowPanel panel{room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63), nullptr, nullptr, 0, 0, false};
        panel.scales = reinterpret_cast<float *>(panel.codes + columns * 32);
        panel.mins = panel.scales + columns / 16 * 32;
        for (const Set &set : sets) {
            const RowType *own = set.usable ? set.kernels->of(type.number) : nullptr;
            for (int count = 1; own && count <= 4; count += 3)
                std::printf("%d %s %d %.6f\n", type.number, set.name, count, ticks(columns, [&](int row) {
                                own->dot(rows.data() + row * row_bytes, columns, vectors.data(), count, out);
                            }));
            for (int count = 4; own && count <= kMost; count += kMost - 4) {
                double best = 1e30;
                for (int run = 0; run < kPromptRuns; run++) {
                    const uint64_t begun = now();
                    if (own->multiply_few && count <= kMostRowVectors) {
                        own->multiply_few(both, columns, vectors.data(), count, out);
                    } else {
                        own->unpack_panel(both, columns, &panel);
                        own->multiply(panel, columns, vectors.data(), count, out);
                    }
                    best = std::min(best, double(now() - begun) / double(32 * columns * count));
                }
                std::printf("%d %s-prompt %d %.6f\n", type.number, set.name, count, best);
            }
        }
        const CpuTraits *theirs = traits_of ? traits_of(type.number) : nullptr;
        if (!theirs || !theirs->vec_dot) continue;
        std::vector<uint8_t> rounded(columns * 8);
        traits_of(theirs->vec_dot_type)->from_float(x.data(), rounded.data(), columns);
        std::printf("%d ggml 1 %.6f\n", type.number, ticks(columns, [&](int row) {
                        theirs->vec_dot(int(columns), out, 0, rows.data() + row * row_bytes, 0, rounded.data(), 0, 1);
                    }));
    }
}
