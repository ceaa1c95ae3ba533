// For AArch64.
#include <arm_neon.h>

#include "row_kernels.h"
namespace {
constexpr int64_t kLanesOfMany = 8;
constexpr const RowKernels &kRowsOfMany = kNeonRows;
}
#include "many_floats.h"

namespace {

struct NeonFloats {
    using V = float32x4x2_t;
    static constexpr int lanes = 8, rows = 4, tiles = 2;
    static V load(const float *from) { return vld1q_f32_x2(from); }
    static void store(float *to, V v) { vst1q_f32_x2(to, v); }
    static V every(float value) { return {{vdupq_n_f32(value), vdupq_n_f32(value)}}; }
    static V madd(V a, V b, V sum) { return {{vfmaq_f32(sum.val[0], a.val[0], b.val[0]), vfmaq_f32(sum.val[1], a.val[1], b.val[1])}}; }
};

}  // namespace

const ManyKernels kNeonMany = floats_kernels<NeonFloats>(5);
