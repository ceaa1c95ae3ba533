// Q6_K: 16 groups of 16 codes of 6 bits, 32 too large; a weight is scale * step * (code - 32).  128 bytes of low bits: of each
// 128 codes, 64 in low nibbles and then 64 in high ones; 64 bytes of two more bits: of each 128 codes, a pair of bits for each 32
// of them; steps: 16 signed bytes; d: fp16.
#pragma once
#include "q2_k.h"

namespace {

struct Q6K : scalar::Q6K {
    static constexpr bool kLowest = false, kLarge = false;
    static constexpr int kWidth = 16, kOffset = 32, kMost = 63;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        for (int half = 0; half < 2; ++half) {
            const Bytes low = held(bytes_at(block + 64 * half)), high = twice(block + 128 + 32 * half);
            made.codes[2 * half] = with_bits(low_bits(low, 15), rotated<-4, -2>(high), 48);
            made.codes[2 * half + 1] = with_bits(low_bits(shifted<4>(low), 15), rotated<0, 2>(high), 48);
        }
        const Words steps = words_of_signed(block + 192);
        Q2K::put_scales(steps, &made);
        made.mins = doubled<5>(steps);
        made.factors = one_half(block + 208);
        return made;
    }
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        for (int i = 0; i < 2; ++i) {
            Bytes high[8];
            turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 128 + 32 * i; }, [&](int j, Bytes q) SWITCHYARD_INLINE { high[j] = q; });
            for (int half = 0; half < 2; ++half)
                turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 64 * i + 32 * half; }, [&](int j, Bytes q) SWITCHYARD_INLINE {
                    put(4 * i + half, 0, j, with_bits(low_bits(q, 15), turned_by(high[j], 2 * half - 4), 48));
                    put(4 * i + half + 2, 1, j, with_bits(low_bits(shifted<4>(q), 15), turned_by(high[j], 2 * half), 48));
                });
        }
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        const FourTurned steps(rows, 192);
        const __m512 scale = turned_halves(rows, 208), none = _mm512_setzero_ps();
        for (int i = 0; i < 16; ++i)  // signed bytes
            put(i, turned_step(steps.of[i / 4] ^ 0x80808080, i % 4, scale, 0, 255, 128), none);
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        const Words steps = words_of_signed(block + 192);
        return {steps, doubled<5>(steps), half_at(block + 208), 0};
    }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const Bytes low = low_bits(shifted(bytes_at(block + part / 4 * 64 + part % 2 * 32), part % 4 / 2 * 4), 15);
        const Bytes high = low_bits(shifted(bytes_at(block + 128 + part / 4 * 32), part % 4 * 2), 3);
        return joined(low, shifted_left(high, 4));
    }
#endif
};

}  // namespace
