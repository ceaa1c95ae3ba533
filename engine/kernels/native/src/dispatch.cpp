#include "dispatch.h"

#include <atomic>
#include <new>

#include "self_test.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

constexpr int32_t kAbi = 6;
constexpr int32_t kIsas = 5;

Kernels kernels_of(int32_t isa) {
    switch (isa) {
        case 0: return {&kPortableKernels, &kPortableTiles};
#if defined(__x86_64__) || defined(_M_X64)
        case 1: return {&kAvx2Kernels, &kAvx2Tiles};
        case 2: return {&kAvx2Kernels, kAvxVnniTiles};
        case 3: return {&kAvx512Kernels, &kAvx512Tiles};
        case 4: return {&kAvx512Kernels, &kAvx512VnniTiles};
#endif
        default: return {nullptr, nullptr};
    }
}

std::atomic<int32_t> in_use{0};

#if defined(__x86_64__)

// Compilers older than the instructions cannot be asked for them by name.
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

}  // namespace

Kernels kernels_in_use() { return kernels_of(in_use.load(std::memory_order_relaxed)); }

SWITCHYARD_API int32_t switchyard_abi(void) { return kAbi; }

SWITCHYARD_API uint32_t switchyard_advertised_isas(void) {
    uint32_t isas = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        isas |= 1u << 1;
        if (kAvxVnniTiles && has_avx_vnni()) isas |= 1u << 2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl")) {
            isas |= 1u << 3;
            if (__builtin_cpu_supports("avx512vnni")) isas |= 1u << 4;
        }
    }
#endif
    return isas;
}

SWITCHYARD_API void switchyard_use_isa(int32_t isa) {
    if (isa >= 0 && isa < kIsas && kernels_of(isa).tiles) in_use.store(isa);
}

SWITCHYARD_API int32_t switchyard_self_test(int32_t isa) {
    const Kernels kernels = kernels_of(isa);
    if (!kernels.tiles) return 1;
    if (const int32_t wrong = test_rows(*kernels.rows)) return wrong;
    return test_tiles(*kernels.tiles);
}

SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads) {
    return new (std::nothrow) SwitchyardPool(threads < 1 ? 1 : threads);
}

SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool) { delete pool; }
