// Compiled with AVX2, FMA, F16C and AVX-VNNI, where the compiler knows it.
#if defined(__AVXVNNI__)
#include "tiles_256.h"

namespace {

struct AvxVnniMath {
    static constexpr int most_vectors = 4;
    static constexpr bool joins_halves = false;
    using Nibbles = Products;
    // Weights are multiplied as unsigned bytes, 128 too large: the surplus is subtracted beforehand.
    static Products none(int32_t sum) { return _mm256_set1_epi32(-128 * sum); }
    static __m256i prepared(__m256i weights) { return _mm256_xor_si256(weights, _mm256_set1_epi8(-128)); }
    template <int> static Products add(Products sum, __m256i weights, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
    static Nibbles add_unsigned(Nibbles sum, __m256i nibbles, __m256i x) {
        return _mm256_dpbusd_avx_epi32(sum, nibbles, x);
    }
    static constexpr bool has_small_sums = false;
    static Products whole_sums(Nibbles sum) { return sum; }
};

}  // namespace

static const TileKernels kTiles = tile_kernels<AvxVnniMath>();
extern const TileKernels *const kAvxVnniTiles = &kTiles;
#else
#include "kernel_set.h"
extern const TileKernels *const kAvxVnniTiles = nullptr;
#endif
