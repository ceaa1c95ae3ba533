#include "dispatch.h"

#include <atomic>
#include <new>

#include "processor.h"
#include "self_test.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kAbi = 6;

Kernels kernels_of(int32_t isa) {
    switch (isa) {
        case 0: return {&kPortableKernels, &kPortableTiles};
#if defined(__x86_64__) || defined(_M_X64)
        case 1: return {&kAvx2Kernels, &kAvx2Tiles};
        case 2: return {&kAvx2Kernels, kAvxVnniTiles};
        case 3: return {&kAvx512Kernels, &kAvx512Tiles};
        case 4: return {&kAvx512Kernels, &kAvx512VnniTiles};
#elif defined(__aarch64__) || defined(_M_ARM64)
        case 16: return {&kNeonKernels, &kNeonTiles};
        case 17: return {&kNeonKernels, &kNeonDotTiles};
#endif
        default: return {nullptr, nullptr};
    }
}

std::atomic<int32_t> in_use{0};

}  // namespace

Kernels kernels_in_use() { return kernels_of(in_use.load(std::memory_order_relaxed)); }

SWITCHYARD_API int32_t switchyard_abi(void) { return kAbi; }

SWITCHYARD_API uint32_t switchyard_advertised_isas(void) {
    const Processor can = advertised();
    const bool there[] = {true, can.avx2, can.avx_vnni, can.avx512, can.avx512_vnni};
    uint32_t isas = 0;
    for (int isa = 0; isa < 5; ++isa) isas |= uint32_t{there[isa]} << isa;
    isas |= uint32_t{can.neon} << 16 | uint32_t{can.neon_dot} << 17;
    for (int isa = 0; isa < 32; ++isa)
        if (!kernels_of(isa).tiles) isas &= ~(uint32_t{1} << isa);  // not built for them
    return isas;
}

SWITCHYARD_API void switchyard_use_isa(int32_t isa) {
    if (kernels_of(isa).tiles) in_use.store(isa);
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
