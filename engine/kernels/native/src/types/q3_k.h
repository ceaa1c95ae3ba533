// Q3_K: 16 groups of 16 codes of 3 bits, 4 too large; a weight is scale * (step - 32) * (code - 4).  32 bytes with the third bit
// of each 32 codes in one bit; 64 bytes of the other two, as in Q2_K; steps: 12 bytes; d: fp16.
#pragma once
#include "q2_k.h"

namespace {

struct Q3K : scalar::Q3K {
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 4, kMost = 7;

    static Words steps_of(const uint8_t *block) {
        uint64_t first, second;
        unpack_steps_of_16(block + 96, &first, &second);
        return subtracted(words_of(first, second), 32);
    }
#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes high = twice(block);
        Q2K::put_codes(block + 32, &made);
        made.codes[0] = with_bits(made.codes[0], rotated<-2, -1>(high), 4);
        made.codes[1] = with_bits(made.codes[1], rotated<0, 1>(high), 4);
        made.codes[2] = with_bits(made.codes[2], rotated<2, 3>(high), 4);
        made.codes[3] = with_bits(made.codes[3], rotated<4, 5>(high), 4);
        const Words steps = steps_of(block);
        Q2K::put_scales(steps, &made);
        made.mins = doubled<2>(steps);
        made.factors = one_half(block + 108);
        return made;
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        const Words steps = steps_of(block);
        return {steps, doubled<2>(steps), half_at(block + 108), 0};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const Bytes low = low_bits(shifted(bytes_at(block + 32 + part / 4 * 32), part % 4 * 2), 3);
        return joined(low, shifted_left(low_bits(shifted(bytes_at(block), part), 1), 2));
    }
#endif
};

}  // namespace
