#include "dispatch.h"

#include <atomic>
#include <new>

#include "block_kernels.h"
#include "many_kernels.h"
#include "processor.h"
#include "self_test.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kAbi = 8;
constexpr int32_t kAmx = 6;

#if defined(__x86_64__) || defined(_M_X64)
// AVX-512 VNNI with newer instructions for many vectors; empty if the compiler does not know them.
Kernels with(const ManyKernels *many) {
    if (!many) return {nullptr, nullptr};
    return {&kAvx512Kernels, &kAvx512VnniTiles, many, &kAvx512Blocks};
}
#endif

Kernels kernels_of(int32_t isa) {
    switch (isa) {
        case 0: return {&kPortableKernels, &kPortableTiles, &kPortableMany, &kPortableBlocks};
#if defined(__x86_64__) || defined(_M_X64)
        case 1: return {&kAvx2Kernels, &kAvx2Tiles, &kAvx2Many, &kAvx2Blocks};
        case 2: return {&kAvx2Kernels, kAvxVnniTiles, &kAvx2Many, &kAvx2Blocks};
        case 3: return {&kAvx512Kernels, &kAvx512Tiles, &kAvx512Many, &kAvx512Blocks};
        case 4: return {&kAvx512Kernels, &kAvx512VnniTiles, &kAvx512Many, &kAvx512Blocks};
        case 5: return with(kAvx512Bf16Many);
        case 6: return with(kAmxMany);
#elif defined(__aarch64__) || defined(_M_ARM64)
        case 16: return {&kNeonKernels, &kNeonTiles, &kPortableMany, &kPortableBlocks};
        case 17: return {&kNeonKernels, &kNeonDotTiles, &kPortableMany, &kPortableBlocks};
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
    const bool there[] = {true, can.avx2, can.avx_vnni, can.avx512, can.avx512_vnni, can.avx512_bf16, can.amx_bf16};
    uint32_t isas = 0;
    for (int isa = 0; isa < 7; ++isa) isas |= uint32_t{there[isa]} << isa;
    isas |= uint32_t{can.neon} << 16 | uint32_t{can.neon_dot} << 17;
    for (int isa = 0; isa < 32; ++isa)
        if (!kernels_of(isa).tiles) isas &= ~(uint32_t{1} << isa);  // not built in
    return isas;
}

SWITCHYARD_API void switchyard_use_isa(int32_t isa) {
    if (isa == kAmx && !amx_permitted()) return;
    if (kernels_of(isa).tiles) in_use.store(isa);
}

SWITCHYARD_API int32_t switchyard_self_test(int32_t isa) {
    const Kernels kernels = kernels_of(isa);
    if (!kernels.tiles || (isa == kAmx && !amx_permitted())) return 1;
    if (const int32_t wrong = test_rows(*kernels.rows)) return wrong;
    if (const int32_t wrong = test_cached(*kernels.rows)) return wrong;
    if (const int32_t wrong = test_tiles(*kernels.tiles)) return wrong;
    if (const int32_t wrong = test_many(*kernels.many)) return wrong;
    return test_blocks(*kernels.blocks);
}

SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads) {
    return new (std::nothrow) SwitchyardPool(threads < 1 ? 1 : threads);
}

SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool) { delete pool; }
