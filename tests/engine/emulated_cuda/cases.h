// What the random cases of all kernels share.
#pragma once
#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

inline std::mt19937 numbers;

inline int between(int least, int most) { return std::uniform_int_distribution<int>(least, most)(numbers); }
inline float real(float least, float most) { return std::uniform_real_distribution<float>(least, most)(numbers); }

inline void require(bool is_so, const char* what) {
    if (is_so) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Memory at a multiple of 64 whose end is the end of an allocation.
struct Exact {
    std::unique_ptr<u8[]> raw;
    u8* data;
    explicit Exact(std::size_t bytes) : raw(new u8[bytes + 64]) {
        data = raw.get() + (64 - reinterpret_cast<std::uintptr_t>(raw.get()) % 64) % 64;
        const std::size_t begin = static_cast<std::size_t>(data - raw.get());
        std::unique_ptr<u8[]> shorter(new u8[begin + bytes]);
        if (reinterpret_cast<std::uintptr_t>(shorter.get()) % 64 == reinterpret_cast<std::uintptr_t>(raw.get()) % 64) {
            raw.swap(shorter);
            data = raw.get() + begin;
        }
        std::memset(data, 0, bytes);
    }
};

