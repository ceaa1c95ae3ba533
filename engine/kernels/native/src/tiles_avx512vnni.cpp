// Compiled with AVX-512 F, BW, VL and VNNI.
#include "tiles_512.h"

namespace {

struct VnniMath {
    static constexpr int most_vectors = 6;
    static constexpr bool joins_halves = true;
    using Nibbles = Products;
    // Weights are multiplied as unsigned bytes, 128 too large: the surplus is subtracted beforehand.
    static __m512i none(int32_t sum) { return _mm512_set1_epi32(-128 * sum); }
    static __m512i prepared(__m512i weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(-128)); }
    template <int> static __m512i add(__m512i sum, __m512i weights, __m512i x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    static Nibbles add_unsigned(Nibbles sum, __m512i nibbles, __m512i x) {
        return _mm512_dpbusd_epi32(sum, nibbles, x);
    }
    static constexpr bool has_small_sums = false;
    static Products whole_sums(Nibbles sum) { return sum; }
};

}  // namespace

const TileKernels kAvx512VnniTiles = tile_kernels<VnniMath>();
