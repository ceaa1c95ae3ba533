// Compiled with AVX-512 F, BW and VL.
#include "tiles_512.h"

namespace {

struct Avx512Math {
    using Nibbles = Products;
    static __m512i none(int32_t) { return _mm512_setzero_si512(); }
    static __m512i prepared(__m512i weights) { return weights; }
    // As in AVX2, with a mask for the sign.
    static __m512i add(__m512i sum, __m512i weights, __m512i x) {
        const __m512i signed_x =
            _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), x);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), signed_x);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    static Nibbles add_unsigned(Nibbles sum, __m512i nibbles, __m512i x) {
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, x));
    }
    static Products whole_sums(Nibbles sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
};

}  // namespace

const TileKernels kAvx512Tiles = tile_kernels<Avx512Math>();
