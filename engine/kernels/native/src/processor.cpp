#include "processor.h"

#include <cstdint>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool amx_permitted() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#if defined(__x86_64__) || defined(_M_X64)

#include <cpuid.h>

namespace {

struct Registers {
    uint32_t a, b, c, d;
};

// All zeros for a leaf that the processor does not have.
Registers leaf(uint32_t number, uint32_t part) {
    Registers found = {};
    __get_cpuid_count(number, part, &found.a, &found.b, &found.c, &found.d);
    return found;
}

// The registers that the operating system saves for each thread.
uint32_t kept_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool has(uint32_t bits, int bit) { return (bits >> bit & 1) != 0; }

}  // namespace

Processor advertised() {
    Processor can;
    const Registers basic = leaf(1, 0), extended = leaf(7, 0), newer = leaf(7, 1);
    if (!has(basic.c, 27)) return can;  // OSXSAVE
    const uint32_t kept = kept_registers();
    if ((kept & 0x06) != 0x06) return can;  // SSE and AVX
    can.avx2 = has(extended.b, 5) && has(basic.c, 12) && has(basic.c, 29);
    can.avx_vnni = can.avx2 && has(newer.a, 4);
    if ((kept & 0xe0) != 0xe0) return can;  // masks and both kinds of upper halves
    can.avx512 = can.avx2 && has(extended.b, 16) && has(extended.b, 30) && has(extended.b, 31);
    can.avx512_vnni = can.avx512 && has(extended.c, 11);
    can.avx512_bf16 = can.avx512_vnni && has(newer.a, 5);
    if ((kept & 0x60000) != 0x60000) return can;  // tiles and their configuration
    can.amx_bf16 = can.avx512_bf16 && has(extended.d, 24) && has(extended.d, 22);
    return can;
}

#elif defined(__aarch64__) || defined(_M_ARM64)

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

namespace {

// Numbers that old headers lack: bits of AT_HWCAP and AT_HWCAP2, and Windows' of features.
struct Feature {
    int type, bit;
    const char *of_apple;
    int of_windows;
};
constexpr Feature kDotProducts = {16, 20, "hw.optional.arm.FEAT_DotProd", 43}, kBytesOfMatrices = {26, 13, "hw.optional.arm.FEAT_I8MM", 66};

bool has(const Feature &feature) {
#if defined(__linux__)
    return (getauxval(static_cast<unsigned long>(feature.type)) >> feature.bit & 1) != 0;
#elif defined(__APPLE__)
    int32_t there = 0;
    size_t size = sizeof there;
    return sysctlbyname(feature.of_apple, &there, &size, nullptr, 0) == 0 && there != 0;
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(static_cast<DWORD>(feature.of_windows)) != 0;
#else
    return false;
#endif
}

}  // namespace

Processor advertised() {
    Processor can;
    can.neon = true;
    can.neon_dot = has(kDotProducts);
    can.neon_i8mm = can.neon_dot && has(kBytesOfMatrices);
    return can;
}

#else

Processor advertised() { return {}; }

#endif
