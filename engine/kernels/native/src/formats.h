// The weight formats in tiles, for the instruction set of the including file, which defines tile_rows and its vectors and
// gives tile_kernels a Math.  A new format is a file like these three, its line here, and its row in kFormats.
#pragma once
#include "format_int4.h"
#include "format_int8.h"
#include "format_lut4.h"

namespace {

template <class Codes, class Math> void dot(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return tile_rows<Codes, Math, 1>(row, x, out);
    if (count == 2) return tile_rows<Codes, Math, 2>(row, x, out);
    if (count == 3) return tile_rows<Codes, Math, 3>(row, x, out);
    tile_rows<Codes, Math, 4>(row, x, out);
}

template <class Codes, class Math> constexpr FormatKernels kernels_of_format() {
    return {dot<Codes, Math>, Codes::expand, Codes::fit};
}

// In the order of switchyard_kernels.h; bf16 is not in tiles.
template <class Math> constexpr TileKernels tile_kernels() {
    return {quantise_floats,
            quantise_bf16,
            {{}, kernels_of_format<Int8, Math>(), kernels_of_format<Int4, Math>(), kernels_of_format<Lut4, Math>()}};
}

}  // namespace
