// Plain loops, for processors without anything else.
#include "kernel_set.h"

namespace {

// Calls dot(group, vector, sums) for each group and adds to the sums of 32 rows.
template <class Dot> void each_group(const TileRow &row, const QuantisedVector *x, int count, float *out, Dot dot) {
    for (int v = 0; v < count; ++v) {
        float *sums = out + v * kTileRows;
        for (int r = 0; r < kTileRows; ++r) sums[r] = 0;
        for (int64_t group = 0; group < row.groups; ++group) dot(group, x[v], sums);
    }
}

struct PlainMath {};

}  // namespace

#define SWITCHYARD_VECTOR_BITS 0
#include "formats.h"

const TileKernels kPortableTiles = tile_kernels<PlainMath>();
