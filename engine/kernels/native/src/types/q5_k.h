// Q5_K: Q4_K with a fifth bit of each code, that of group g in bit g of 32 bytes before the others.
#pragma once
#include "q4_k.h"

namespace {

struct Q5K : scalar::Q5K {
    static constexpr bool kLowest = true, kLarge = false;
    static constexpr int kWidth = 32, kOffset = 0, kMost = 31;

#if defined(__AVX512VNNI__)
    static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes high = twice(block + 16), first = bytes_at(block + 48), second = bytes_at(block + 112);
        made.codes[0] = with_bits(low_bits(first, 15), rotated<4, 2>(high), 16);
        made.codes[1] = with_bits(low_bits(shifted<4>(first), 15), rotated<3, 1>(high), 16);
        made.codes[2] = with_bits(low_bits(second, 15), rotated<0, -2>(high), 16);
        made.codes[3] = with_bits(low_bits(shifted<4>(second), 15), rotated<-1, -3>(high), 16);
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        Q4K::put_steps(_mm256_cvtepu8_epi16(sixteen(steps, least)), &made);
        made.scale = half_at(block);
        made.lowest = half_at(block + 2);
        return made;
    }
    static constexpr int place(int j, int half) { return Q4K::place(j, half); }
#else
    static Wide wide(const uint8_t *block) { return Q4K::wide(block); }
    static Bytes codes(const uint8_t *block, int part) {
        const Bytes low = low_bits(shifted(bytes_at(block + 48 + part / 2 * 32), part % 2 * 4), 15);
        return joined(low, shifted_left(low_bits(shifted(bytes_at(block + 16), part), 1), 4));
    }
#endif
};

}  // namespace
