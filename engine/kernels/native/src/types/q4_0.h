// Q4_0: 32 codes of 4 bits, 8 too large; a weight is scale * (code - 8).  d: fp16; 16 bytes, codes 0 to 15 in their low bits.
#pragma once
#include "rows.h"

namespace {

struct Q4_0 : scalar::Q4_0 {
    static constexpr bool kSigned = false;
    static constexpr int kOffset = 8, kMost = 15;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 2, kBytes), made.codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-8.0f));
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        turn_nibbles(rows, 2, kBytes, [](Bytes codes) SWITCHYARD_INLINE { return codes; }, put);
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group) put(group, turned_halves(rows, group * kBytes), _mm512_setzero_ps());
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) {
        const float scale = half_at(block);
        return {codes_of_nibbles(block + 2), scale, -8.0f * scale};
    }
#endif
};

}  // namespace
