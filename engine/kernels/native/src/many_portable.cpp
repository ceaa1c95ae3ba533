// Plain loops, for processors with none of the other instruction sets.
#include "row_kernels.h"
namespace {
constexpr int64_t kLanesOfMany = 8;
constexpr const RowKernels &kRowsOfMany = kPortableRows;
}
#include "many_floats.h"

namespace {

struct PlainMath {
    struct V {
        float lane[8];
    };
    static constexpr int lanes = 8, rows = 2, tiles = 1;
    static V load(const float *from) {
        V v;
        std::memcpy(v.lane, from, sizeof v.lane);
        return v;
    }
    static void store(float *to, const V &v) { std::memcpy(to, v.lane, sizeof v.lane); }
    static V every(float value) {
        V v;
        for (float &lane : v.lane) lane = value;
        return v;
    }
    static V madd(const V &a, const V &b, V sum) {
        for (int i = 0; i < 8; ++i) sum.lane[i] += a.lane[i] * b.lane[i];
        return sum;
    }
};

}  // namespace

const ManyKernels kPortableMany = floats_kernels<PlainMath>(8);
