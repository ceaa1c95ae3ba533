// Compiled with AVX2 and FMA.
#include <immintrin.h>

#include "row_kernels.h"
namespace {
constexpr int64_t kLanesOfMany = 8;
constexpr const RowKernels &kRowsOfMany = kAvx2Rows;
}
#include "many_floats.h"

namespace {

struct Avx2Floats {
    using V = __m256;
    static constexpr int lanes = 8, rows = 4, tiles = 3;
    static V load(const float *from) { return _mm256_loadu_ps(from); }
    static void store(float *to, V v) { _mm256_storeu_ps(to, v); }
    static V every(float value) { return _mm256_set1_ps(value); }
    static V madd(V a, V b, V sum) { return _mm256_fmadd_ps(a, b, sum); }
};

}  // namespace

const ManyKernels kAvx2Many = floats_kernels<Avx2Floats>(5);
