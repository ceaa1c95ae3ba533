// Compiled with the dot product instructions of Armv8.2 (asimddp).
#include "tiles_neon.h"

namespace {

struct NeonDotMath {
    using Nibbles = int32x4_t;
    static constexpr int parts(int) { return 4; }

    template <int lane> static int32x4_t add(int32x4_t sum, int8x16_t weights, int8x16_t x) {
        return vdotq_laneq_s32(sum, weights, x, lane);
    }
    static Nibbles no_nibbles() { return vdupq_n_s32(0); }
    template <int lane> static void add_nibbles(Nibbles &sum, int8x16_t nibbles, int8x16_t x) {
        sum = vdotq_laneq_s32(sum, nibbles, x, lane);
    }
    static int32x4_t whole_sums(Nibbles sum) { return sum; }
};

}  // namespace

const TileKernels kNeonDotTiles = tile_kernels<NeonDotMath>();
