// For AArch64 without the dot product instructions: a Raspberry Pi 4, for one.
#include "tiles_neon.h"

namespace {

struct NeonMath {
    static constexpr int most_vectors = 4;
    static constexpr int parts(int count) { return count < 3 ? 4 : 2; }

    static Bytes prepared(Bytes weights) { return weights; }
    template <int lane> static Bytes columns(Bytes x) {
        return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), lane));
    }
    // Two products of 128 * 127 fit 16 bits.
    template <int lane> static void add(int32x4_t &sum, Bytes weights, Bytes x) {
        const Bytes four = columns<lane>(x);
        const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(four));
        sum = vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(weights, four)));
    }
    static int32x4_t whole_sums(int32x4_t sum) { return sum; }

    // Of the two upper and the two lower rows; 8 times 2 products of 16 * 127 fit 16 bits.
    static constexpr bool has_small_sums = true;
    static constexpr int raised_by = 0;  // numbers may be negative, too
    struct Nibbles {
        int16x8_t low, high;
    };
    template <int lane> static void add(Nibbles &sum, Bytes nibbles, Bytes x) {
        const Bytes four = columns<lane>(x);
        sum.low = vmlal_s8(sum.low, vget_low_s8(nibbles), vget_low_s8(four));
        sum.high = vmlal_high_s8(sum.high, nibbles, four);
    }
    static int32x4_t whole_sums(const Nibbles &sum) { return vpaddlq_s16(vpaddq_s16(sum.low, sum.high)); }
};

}  // namespace

const TileKernels kNeonTiles = tile_kernels<NeonMath>();
