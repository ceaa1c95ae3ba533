// Compiled with AVX-512 F, BW and VL.
#include "tiles_512.h"

namespace {

struct Avx512Math {
    static constexpr int most_vectors = 4;
    static constexpr bool joins_halves = false;
    using Nibbles = Products;
    static __m512i none(int32_t) { return _mm512_setzero_si512(); }
    static __m512i prepared(__m512i weights) { return weights; }
    // As in AVX2, with a mask for the sign. One vector's goes to the weights, as it is the same for all rows; several
    // vectors get that of the weights.
    template <int count> static __m512i add(__m512i sum, __m512i weights, __m512i x) {
        const __m512i pairs = count == 1 ? _mm512_maddubs_epi16(_mm512_abs_epi8(x), signed_as(x, weights))
                                         : _mm512_maddubs_epi16(_mm512_abs_epi8(weights), signed_as(weights, x));
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    static __m512i signed_as(__m512i signs, __m512i values) {
        return _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), values);
    }
    static Nibbles add_unsigned(Nibbles sum, __m512i nibbles, __m512i x) {
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, x));
    }
    static Products whole_sums(Nibbles sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
    // 4 times 2 products of 32 * 127 fit 16 bits in each.
    static constexpr bool has_small_sums = true;
    static constexpr int raised_by = kSmallTable;
    static Products whole_sums(Nibbles first, Nibbles second, int32_t start) {
        return _mm512_add_epi32(_mm512_add_epi32(_mm512_set1_epi32(start), whole_sums(first)), whole_sums(second));
    }
};

}  // namespace

const TileKernels kAvx512Tiles = tile_kernels<Avx512Math>();
