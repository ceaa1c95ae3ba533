#include "dispatch.h"

#include <atomic>
#include <new>

#include "attend.h"
#include "block_kernels.h"
#include "many_kernels.h"
#include "processor.h"
#include "row_kernels.h"
#include "self_test.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kAbi = 27;
constexpr int32_t kAmx = 6;

// What an instruction set has.
struct Set {
    const KernelSet *rows;
    const TileKernels *tiles;  // null: not built in
    const ManyKernels *many = nullptr;
    const BlockKernels *blocks = nullptr;
    const AttendKernels *attend = nullptr;
    const RowKernels *types = nullptr;
    const ManyKernels *exact = nullptr;
};

#if defined(__x86_64__) || defined(_M_X64)
// AVX-512 VNNI with newer instructions for many vectors; empty if the compiler does not know them.
Set with(const ManyKernels *many) {
    if (!many) return {nullptr, nullptr};
    const AttendKernels *attend = kAvx512Bf16Attend ? kAvx512Bf16Attend : &kAvx512Attend;
    return {&kAvx512Kernels, &kAvx512VnniTiles, many, &kAvx512Blocks, attend, &kAvx512VnniRows, &kAvx512Many};
}
#endif

Set set_of(int32_t isa) {
    switch (isa) {
        case 0: return {&kPortableKernels, &kPortableTiles, &kPortableMany, &kPortableBlocks, &kPortableAttend, &kPortableRows, &kPortableMany};
#if defined(__x86_64__) || defined(_M_X64)
        case 1: return {&kAvx2Kernels, &kAvx2Tiles, &kAvx2Many, &kAvx2Blocks, &kAvx2Attend, &kAvx2Rows, &kAvx2Many};
        case 2: return {&kAvx2Kernels, kAvxVnniTiles, &kAvx2Many, &kAvx2Blocks, &kAvx2Attend, &kAvx2Rows, &kAvx2Many};
        case 3: return {&kAvx512Kernels, &kAvx512Tiles, &kAvx512Many, &kAvx512Blocks, &kAvx512Attend, &kAvx2Rows, &kAvx512Many};
        case 4: return {&kAvx512Kernels, &kAvx512VnniTiles, &kAvx512Many, &kAvx512Blocks, &kAvx512Attend, &kAvx512VnniRows, &kAvx512Many};
        case 5: return with(kAvx512Bf16Many);
        case 6: return with(kAmxMany);
#elif defined(__aarch64__) || defined(_M_ARM64)
        case 16: return {&kNeonKernels, &kNeonTiles, &kNeonMany, &kPortableBlocks, &kNeonAttend, &kNeonRows, &kNeonMany};
        case 17: return {&kNeonKernels, &kNeonDotTiles, &kNeonMany, &kPortableBlocks, &kNeonAttend, &kNeonDotRows, &kNeonMany};
        case 18: return {&kNeonKernels, &kNeonDotTiles, &kNeonMany, &kPortableBlocks, &kNeonAttend, &kNeonI8mmRows, &kNeonMany};
#endif
        default: return {nullptr, nullptr};
    }
}

bool is_usable(int32_t isa) { return set_of(isa).tiles && (isa != kAmx || amx_permitted()); }

// The instruction set of each use, in 5 bits: all in one word, so that no thread sees half a choice.
constexpr int32_t kBits = 5, kUses = 2 + 2 * kFormatCount;
static_assert(kUses * kBits <= 64, "a word holds a number for each use");
constexpr int32_t place_of(int32_t use, int32_t format) {
    return use == SWITCHYARD_FEW ? 1 + format : use == SWITCHYARD_MANY ? 1 + kFormatCount + format : kUses - 1;
}
std::atomic<uint64_t> in_use{0};

int32_t isa_at(uint64_t uses, int32_t place) { return static_cast<int32_t>(uses >> (place * kBits) & 31); }

}  // namespace

Kernels kernels_in_use() {
    const uint64_t uses = in_use.load(std::memory_order_relaxed);
    Kernels kernels = {};
    kernels.blocks = set_of(isa_at(uses, 0)).blocks;
    kernels.types = set_of(isa_at(uses, place_of(SWITCHYARD_FEW, SWITCHYARD_BLOCKS))).types;
    kernels.alone = kMostRowVectors;
    kernels.rows = set_of(isa_at(uses, place_of(SWITCHYARD_FEW, SWITCHYARD_BF16))).rows;
    kernels.attention = set_of(isa_at(uses, place_of(SWITCHYARD_ATTENTION, 0))).attend;
    for (int32_t format = 0; format < kFormatCount; ++format) {
        kernels.tiles[format] = set_of(isa_at(uses, place_of(SWITCHYARD_FEW, format))).tiles;
        kernels.many[format] = set_of(isa_at(uses, place_of(SWITCHYARD_MANY, format))).many;
    }
    kernels.exact = set_of(isa_at(uses, place_of(SWITCHYARD_MANY, SWITCHYARD_BF16))).exact;
    return kernels;
}

Kernels kernels_for_many() {
    Kernels kernels = kernels_in_use();
    const uint64_t uses = in_use.load(std::memory_order_relaxed);
    for (int32_t format = 0; format < kFormatCount; ++format)
        kernels.tiles[format] = set_of(isa_at(uses, place_of(SWITCHYARD_MANY, format))).tiles;
    kernels.rows = set_of(isa_at(uses, place_of(SWITCHYARD_MANY, SWITCHYARD_BF16))).rows;
    return kernels;
}

SWITCHYARD_API int32_t switchyard_abi(void) { return kAbi; }

SWITCHYARD_API uint32_t switchyard_advertised_isas(void) {
    const Processor can = advertised();
    const bool there[] = {true, can.avx2, can.avx_vnni, can.avx512, can.avx512_vnni, can.avx512_bf16, can.amx_bf16};
    uint32_t isas = 0;
    for (int isa = 0; isa < 7; ++isa) isas |= uint32_t{there[isa]} << isa;
    isas |= uint32_t{can.neon} << 16 | uint32_t{can.neon_dot} << 17 | uint32_t{can.neon_i8mm} << 18;
    for (int isa = 0; isa < 32; ++isa)
        if (!set_of(isa).tiles) isas &= ~(uint32_t{1} << isa);  // not built in
    return isas;
}

SWITCHYARD_API void switchyard_use_isa(int32_t isa) {
    if (!is_usable(isa)) return;
    uint64_t uses = 0;
    for (int32_t place = 0; place < kUses; ++place) uses |= static_cast<uint64_t>(isa) << (place * kBits);
    in_use.store(uses);
}

SWITCHYARD_API void switchyard_use_isa_for(int32_t use, int32_t format, int32_t isa) {
    if (!is_usable(isa) || format < 0 || format >= kFormatCount) return;
    const int32_t shift = place_of(use, format) * kBits;
    uint64_t uses = in_use.load();
    while (!in_use.compare_exchange_weak(uses, (uses & ~(uint64_t{31} << shift)) | static_cast<uint64_t>(isa) << shift)) {
    }
}

SWITCHYARD_API int32_t switchyard_self_test(int32_t isa) {
    if (!is_usable(isa)) return 1;
    const Set set = set_of(isa);
    if (const int32_t wrong = test_rows(*set.rows)) return wrong;
    if (const int32_t wrong = test_attend(*set.attend)) return wrong;
    if (const int32_t wrong = test_tiles(*set.tiles)) return wrong;
    if (const int32_t wrong = test_many(*set.many)) return wrong;
    if (const int32_t wrong = test_types(*set.types)) return wrong;
    return test_blocks(*set.blocks);
}

SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads) {
    return new (std::nothrow) SwitchyardPool(threads < 1 ? 1 : threads);
}

SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool) { delete pool; }
