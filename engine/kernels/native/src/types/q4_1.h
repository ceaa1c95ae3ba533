// Q4_1: 32 codes of 4 bits; a weight is scale * code + lowest.  d, m: fp16; 16 bytes, as in Q4_0.
#pragma once
#include "rows.h"

namespace {

struct Q4_1 : scalar::Q4_1 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 0, kMost = 15;  // a minimum of its own

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 4, kBytes), made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = four_halves(blocks + 2, kBytes);
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        turn_nibbles(rows, 4, kBytes, [](Bytes codes) SWITCHYARD_INLINE { return codes; }, put);
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group) put(group, turned_halves(rows, group * kBytes), turned_halves(rows, group * kBytes + 2));
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) { return {codes_of_nibbles(block + 4), half_at(block), half_at(block + 2)}; }
#endif
};

}  // namespace
