// Q8_0: 32 signed bytes; a weight is scale * code.  d: fp16, then the codes.
#pragma once
#include "rows.h"

namespace {

struct Q8_0 {
    static constexpr int kNumber = 8, kElements = 32, kBytes = 34;
    static constexpr bool kSigned = true;

    static void values(const uint8_t *block, float *out) {
        for (int i = 0; i < 32; ++i) out[i] = half_at(block) * static_cast<float>(static_cast<int8_t>(block[2 + i]));
    }

#if defined(__AVX512VNNI__)
    static constexpr int kOffset = kRaised;
    static Four four(const uint8_t *blocks) {
        Four made;
        for (int pair = 0; pair < 2; ++pair) {
            const uint8_t *at = blocks + 2 * pair * kBytes + 2;
            made.codes[pair] = raised(joined(at, at + kBytes));
        }
        made.scales = four_halves(blocks, kBytes);
        made.offsets = _mm_mul_ps(made.scales, _mm_set1_ps(-kRaised));
        return made;
    }
#elif defined(__AVX2__)
    static constexpr int kOffset = 0, kMost = 128;
    static One one(const uint8_t *block) { return {bytes_at(block + 2), half_at(block), 0}; }
#endif
};

}  // namespace
