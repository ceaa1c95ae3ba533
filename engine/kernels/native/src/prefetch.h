// Asks for a line of memory ahead of its use, on processors of the Arm kind.
#pragma once
#include <cstdint>

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#endif

static inline void prefetch(const uint8_t *address) {
#if defined(_MSC_VER) && !defined(__clang__)
    __prefetch(address);
#else
    __builtin_prefetch(address);
#endif
}
