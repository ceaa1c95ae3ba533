// Q8_0: 32 signed bytes; a weight is scale * code.  d: fp16, then the codes.
#pragma once
#include "rows.h"

namespace {

struct Q8_0 : scalar::Q8_0 {
    static constexpr bool kSigned = true;

#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        for (int pair = 0; pair < 2; ++pair) {
            const uint8_t *at = blocks + 2 * pair * kBytes + 2;
            made.codes[pair] = raised(joined(at, at + kBytes));
        }
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-kRaised));
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group)
            turn([&](int row) SWITCHYARD_INLINE { return rows[row] + group * kBytes + 2; }, [&](int j, Bytes q) SWITCHYARD_INLINE { put(group, 0, j, raised(q)); });
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group) put(group, turned_halves(rows, group * kBytes), _mm512_setzero_ps());
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    SWITCHYARD_INLINE static One one(const uint8_t *block) { return {bytes_at(block + 2), half_at(block), 0}; }
#endif
};

}  // namespace
