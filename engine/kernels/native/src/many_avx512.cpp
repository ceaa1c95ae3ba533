// Compiled with AVX-512 F, BW and VL.
#include <immintrin.h>

#include "row_kernels.h"
namespace {
constexpr int64_t kLanesOfMany = 16;
constexpr const RowKernels &kRowsOfMany = kAvx2Rows;
}
#include "many_floats.h"

namespace {

struct Avx512Floats {
    using V = __m512;
    static constexpr int lanes = 16, rows = 8, tiles = 3;
    static V load(const float *from) { return _mm512_loadu_ps(from); }
    static void store(float *to, V v) { _mm512_storeu_ps(to, v); }
    static V every(float value) { return _mm512_set1_ps(value); }
    static V madd(V a, V b, V sum) { return _mm512_fmadd_ps(a, b, sum); }
};

}  // namespace

const ManyKernels kAvx512Many = floats_kernels<Avx512Floats>(7);
