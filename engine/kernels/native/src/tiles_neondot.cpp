// Compiled with the dot product instructions of Armv8.2 (asimddp).
#include "tiles_neon.h"

namespace {

struct NeonDotMath {
    static constexpr int most_vectors = 4;
    using Nibbles = int32x4_t;
    static constexpr bool has_small_sums = false;
    static constexpr int parts(int) { return 4; }

    static Bytes prepared(Bytes weights) { return weights; }
    template <int lane> static void add(int32x4_t &sum, Bytes weights, Bytes x) {
        sum = vdotq_laneq_s32(sum, weights, x, lane);
    }
    static int32x4_t whole_sums(int32x4_t sum) { return sum; }
};

}  // namespace

const TileKernels kNeonDotTiles = tile_kernels<NeonDotMath>();
