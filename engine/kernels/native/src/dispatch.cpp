#include "dispatch.h"

#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kAbi = 2;

const KernelSet *kernel_set(int32_t isa) {
#if defined(__x86_64__) || defined(_M_X64)
    if (isa == 2) return &kAvx512Kernels;
    if (isa == 1) return &kAvx2Kernels;
#endif
    return isa == 0 ? &kPortableKernels : nullptr;
}

std::atomic<const KernelSet *> in_use{&kPortableKernels};

}  // namespace

const KernelSet &kernels_in_use() { return *in_use.load(std::memory_order_relaxed); }

SWITCHYARD_API int32_t switchyard_abi(void) { return kAbi; }

SWITCHYARD_API int32_t switchyard_advertised_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

SWITCHYARD_API void switchyard_use_isa(int32_t isa) {
    if (const KernelSet *set = kernel_set(isa)) in_use.store(set);
}

SWITCHYARD_API int32_t switchyard_self_test(int32_t isa) {
    const KernelSet *set = kernel_set(isa);
    if (!set) return 1;
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
        set->spread(x.data(), n, spread.data());
        set->dot_pair(a.data(), b.data(), spread.data(), n, &got_a, &got_b);
        const float shares[2] = {0.5f, -2.0f};
        std::vector<uint16_t> rows(a);
        rows.insert(rows.end(), b.begin(), b.end());
        std::vector<float> mixed(n);
        set->mix_rows(rows.data(), 2, n, shares, mixed.data());
        for (int64_t i = 0; i < n; ++i)
            if (std::fabs(mixed[i] - (0.5f * from_bf16(a[i]) - 2.0f * from_bf16(b[i]))) > 1e-3) return 3;
        if (std::fabs(got_a - want_a) > 1e-3 || std::fabs(got_b - want_b) > 1e-3) return 2;
    }
    return 0;
}

SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads) {
    return new (std::nothrow) SwitchyardPool(threads < 1 ? 1 : threads);
}

SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool) { delete pool; }
