// Compiled with AVX2, FMA and F16C.
#include "tiles_256.h"

namespace {

struct Avx2Math {
    static constexpr int most_vectors = 4;
    static constexpr bool joins_halves = false;
    // Compilers reorder additions of whole numbers, and keep all products until the end, which no registers hold.
    static __m256i in_turn(__m256i sum) {
        __asm__("" : "+x"(sum));
        return sum;
    }
    using Nibbles = Products;
    static Products none(int32_t) { return _mm256_setzero_si256(); }
    static __m256i prepared(__m256i weights) { return weights; }
    // The instruction multiplies unsigned by signed bytes: the weight's sign goes to the other operand.
    template <int> static Products add(Products sum, __m256i weights, __m256i x) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
        return in_turn(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
    // 8 times 2 products of 15 * 127 fit 16 bits.
    static Nibbles add_unsigned(Nibbles sum, __m256i nibbles, __m256i x) {
        return in_turn(_mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, x)));
    }
    static Products whole_sums(Nibbles sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
    // 4 times 2 products of 32 * 127 fit 16 bits in each.
    static constexpr bool has_small_sums = true;
    static constexpr int raised_by = kSmallTable;
    static Products whole_sums(Nibbles first, Nibbles second, int32_t start) {
        return _mm256_add_epi32(_mm256_add_epi32(_mm256_set1_epi32(start), whole_sums(first)), whole_sums(second));
    }
};

}  // namespace

const TileKernels kAvx2Tiles = tile_kernels<Avx2Math>();
