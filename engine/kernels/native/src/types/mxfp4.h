// MXFP4: 32 numbers of E2M1 with a power of two (OCP Microscaling Formats, version 1.0).  A byte of E8M0; 16 bytes, as in Q4_0.
#pragma once
#include "rows.h"

namespace {

struct Mxfp4 : scalar::Mxfp4 {
    static constexpr bool kSigned = true;
    static constexpr int kOffset = 12, kMost = 24;

#if defined(__AVX512VNNI__)
    static Bytes table() { return _mm512_add_epi8(table_of(kMxfp4), _mm512_set1_epi8(12)); }  // unsigned, no larger than needed
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 1, kBytes), made.codes);
        for (Bytes &codes : made.codes) codes = look_up(table(), codes);
        made.scales = _mm_set_ps(e8m0_half(blocks[3 * kBytes]), e8m0_half(blocks[2 * kBytes]), e8m0_half(blocks[kBytes]),
                                 e8m0_half(blocks[0]));
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-12.0f));
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        turn_nibbles(rows, 1, kBytes, [](Bytes codes) SWITCHYARD_INLINE { return look_up(table(), codes); }, put);
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group) {  // as e8m0_half
            const __m512i exponents = _mm512_cvtepu8_epi32(bytes_of_each(rows, group * kBytes));
            const __m512i usual = _mm512_slli_epi32(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)), 23);
            const __mmask16 tiny = _mm512_cmplt_epu32_mask(exponents, _mm512_set1_epi32(2));
            put(group, _mm512_castsi512_ps(_mm512_mask_sllv_epi32(usual, tiny, _mm512_set1_epi32(0x00200000), exponents)), _mm512_setzero_ps());
        }
    }
#else
    SWITCHYARD_INLINE static One one(const uint8_t *block) { return {look_up(table_of(kMxfp4), codes_of_nibbles(block + 1)), e8m0_half(block[0]), 0}; }
#endif
};

}  // namespace
