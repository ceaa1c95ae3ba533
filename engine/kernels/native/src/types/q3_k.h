// Q3_K: 16 groups of 16 codes of 3 bits, 4 too large; a weight is scale * (step - 32) * (code - 4).  32 bytes with the third bit
// of each 32 codes in one bit; 64 bytes of the other two, as in Q2_K; steps: 12 bytes; d: fp16.
#pragma once
#include "q2_k.h"

namespace {

struct Q3K : scalar::Q3K {
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 4, kMost = 7;

    static Words steps_of(const uint8_t *block) {
        uint32_t steps[4];
        unpack_steps_of_16(u32_at(block + 96), u32_at(block + 100), u32_at(block + 104), steps);
        return subtracted(words_of(steps[0] | static_cast<uint64_t>(steps[1]) << 32, steps[2] | static_cast<uint64_t>(steps[3]) << 32), 32);
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
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        Bytes high[8];
        turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 0; }, [&](int j, Bytes q) SWITCHYARD_INLINE { high[j] = q; });
        Q2K::turned_pairs(rows, 32, [&](int group, int slot, int j, Bytes q) SWITCHYARD_INLINE {
            put(group, slot, j, with_bits(q, turned_by(high[j], group - 2), 4));
        });
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        const FourTurned packed(rows, 92);
        Turned steps[4];
        unpack_steps_of_16(packed.of[1], packed.of[2], packed.of[3], steps);
        const __m512 scale = turned_halves(rows, 108), none = _mm512_setzero_ps();
        for (int i = 0; i < 16; ++i) put(i, turned_step(steps[i / 4], i % 4, scale, 0, 255, 32), none);
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
