// IQ4_NL: 32 codes of 4 bits into a table; a weight is scale * table[code].  d: fp16; 16 bytes, as in Q4_0.
#pragma once
#include "rows.h"

namespace {

struct Iq4Nl : scalar::Iq4Nl {
    static constexpr bool kSigned = true;

#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    SWITCHYARD_INLINE static Four four(const uint8_t *blocks) {
        Four made;
        codes_of_nibbles(four_at(blocks + 2, kBytes), made.codes);
        const Bytes table = raised(table_of(kIq4Nl));
        for (Bytes &codes : made.codes) codes = look_up(table, codes);
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-kRaised));
        return made;
    }
    static constexpr int kSlots = 1;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        const Bytes table = raised(table_of(kIq4Nl));
        turn_nibbles(rows, 2, kBytes, [&](Bytes codes) SWITCHYARD_INLINE { return look_up(table, codes); }, put);
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        for (int group = 0; group < 8; ++group) put(group, turned_halves(rows, group * kBytes), _mm512_setzero_ps());
    }
#else
    static constexpr int kOffset = 0, kMost = 128;
    SWITCHYARD_INLINE static One one(const uint8_t *block) { return {look_up(table_of(kIq4Nl), codes_of_nibbles(block + 2)), half_at(block), 0}; }
#endif
};

}  // namespace
