// Q1_0: 128 bits; a weight is scale or, where its bit is not set, -scale.  d: fp16; 16 bytes.
#pragma once
#include "rows.h"

namespace {

struct Q1_0 {
    static constexpr int kNumber = 41, kElements = 128, kBytes = 18;
    static constexpr bool kLowest = false, kApart = true;
    static constexpr int kWidth = 32, kOffset = 1, kMost = 2;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        for (int j = 0; j < 4; ++j) {
            uint64_t bits;
            std::memcpy(&bits, blocks + j / 2 * kBytes + 2 + j % 2 * 8, 8);
            made.codes[j] = _mm512_maskz_mov_epi8(bits, _mm512_set1_epi8(2));
        }
        made.scales = _mm512_mask_mov_ps(_mm512_set1_ps(half_at(blocks)), 0xff00, _mm512_set1_ps(half_at(blocks + kBytes)));
        return made;
    }
#else
    SWITCHYARD_INLINE static Apart apart(const uint8_t *blocks) {
        Apart made;
        for (int part = 0; part < 16; ++part) made.scales[part] = half_at(blocks + part / 8 * kBytes);
        return made;
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *blocks, int part) {
        return where_set(u32_at(blocks + part / 4 * kBytes + 2 + part % 4 * 4), 2);
    }
#endif
};

}  // namespace
