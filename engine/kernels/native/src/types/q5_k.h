// Q5_K: Q4_K with a fifth bit of each code, that of group g in bit g of 32 bytes before the others.
#pragma once
#include "q4_k.h"

namespace {

struct Q5K : scalar::Q5K {
    static constexpr bool kLowest = true, kLarge = false;
    static constexpr int kWidth = 32, kOffset = 0, kMost = 31;

#if defined(__AVX512VNNI__)
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) {
        Wide made;
        const Bytes high = twice(block + 16);
        for (int j = 0; j < 4; ++j) made.codes[j] = low_bits(shifted_apart<0, 4>(twice(block + 48 + 32 * j)), 15);
        made.codes[0] = with_bits(made.codes[0], rotated<-4, -3>(high), 16);
        made.codes[1] = with_bits(made.codes[1], rotated<-2, -1>(high), 16);
        made.codes[2] = with_bits(made.codes[2], rotated<0, 1>(high), 16);
        made.codes[3] = with_bits(made.codes[3], rotated<2, 3>(high), 16);
        uint64_t steps, least;
        unpack_steps(block + 4, &steps, &least);
        Q4K::put_steps(_mm256_cvtepu8_epi16(sixteen(steps, least)), &made);
        made.factors = two_halves(block);
        return made;
    }
    static constexpr int kSlots = 2;
    template <class Put> SWITCHYARD_INLINE static void turned(const uint8_t *const *rows, Put put) {
        Bytes high[8];
        turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 16; }, [&](int j, Bytes q) SWITCHYARD_INLINE { high[j] = q; });
        for (int i = 0; i < 8; i += 2)
            turn([&](int row) SWITCHYARD_INLINE { return rows[row] + 48 + 16 * i; }, [&](int j, Bytes q) SWITCHYARD_INLINE {
                put(i, 0, j, with_bits(low_bits(q, 15), turned_by(high[j], i - 4), 16));
                put(i + 1, 1, j, with_bits(low_bits(shifted<4>(q), 15), turned_by(high[j], i - 3), 16));
            });
    }
    template <class Put> SWITCHYARD_INLINE static void turned_steps(const uint8_t *const *rows, Put put) {
        Q4K::turned_steps(rows, put);
    }
#else
    SWITCHYARD_INLINE static Wide wide(const uint8_t *block) { return Q4K::wide(block); }
    SWITCHYARD_INLINE static Bytes codes(const uint8_t *block, int part) {
        const Bytes low = low_bits(shifted(bytes_at(block + 48 + part / 2 * 32), part % 2 * 4), 15);
        return joined(low, shifted_left(low_bits(shifted(bytes_at(block + 16), part), 1), 4));
    }
#endif
};

}  // namespace
