// Q5_1: 32 codes of 5 bits; a weight is scale * code + lowest.  d, m: fp16; then as Q5_0.
#pragma once
#include "q5_0.h"

namespace {

struct Q5_1 : scalar::Q5_1 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 0, kMost = 31;  // a minimum of its own

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 8, kBytes), made.codes);
        add_fifth_bits(blocks + 4, kBytes, made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = four_halves(blocks + 2, kBytes);
        return made;
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) {
        return {joined(codes_of_nibbles(block + 8), where_set(u32_at(block + 4), 16)), half_at(block), half_at(block + 2)};
    }
#endif
};

}  // namespace
