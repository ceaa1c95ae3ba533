// MXFP4: 32 numbers of E2M1 with a power of two (OCP Microscaling Formats, version 1.0).  A byte of E8M0; 16 bytes, as in Q4_0.
#pragma once
#include "rows.h"

namespace {

struct Mxfp4 : scalar::Mxfp4 {
    static constexpr bool kSigned = true;
    static constexpr int kOffset = 12, kMost = 24;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 1, kBytes), made.codes);
        const Bytes table = _mm512_add_epi8(table_of(kMxfp4), _mm512_set1_epi8(12));  // unsigned, and no larger than needed
        for (Bytes &codes : made.codes) codes = look_up(table, codes);
        made.scales = _mm_set_ps(e8m0_half(blocks[3 * kBytes]), e8m0_half(blocks[2 * kBytes]), e8m0_half(blocks[kBytes]),
                                 e8m0_half(blocks[0]));
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-12.0f));
        return made;
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) { return {look_up(table_of(kMxfp4), codes_of_nibbles(block + 1)), e8m0_half(block[0]), 0}; }
#endif
};

}  // namespace
