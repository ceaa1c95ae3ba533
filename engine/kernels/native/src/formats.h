// The weight formats in tiles, for the instruction set of the including file, which defines tile_rows and its vectors and
// gives tile_kernels a Math.  A new format is a file like these three, its line here, and its row in kFormats.
#pragma once
#include "format_int4.h"
#include "format_int8.h"
#include "format_lut4.h"

namespace {

template <class Codes, class Math, bool small>
void dot_rows(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if (count == 1) return tile_rows<Codes, Math, 1, small>(row, x, out);
    if (count == 2) return tile_rows<Codes, Math, 2, small>(row, x, out);
    if (count == 3) return tile_rows<Codes, Math, 3, small>(row, x, out);
    if constexpr (Math::most_vectors > 4) {
        if (count == 5) return tile_rows<Codes, Math, 5, small>(row, x, out);
        if (count == 6) return tile_rows<Codes, Math, 6, small>(row, x, out);
    }
    tile_rows<Codes, Math, 4, small>(row, x, out);
}

template <class Codes, class Math> void dot(const TileRow &row, const QuantisedVector *x, int count, float *out) {
    if constexpr (kFormats[Codes::kFormat].has_table && Math::has_small_sums) {
        alignas(16) int8_t raised[16];
        bool small = true;
        for (int code = 0; code < 16; ++code) {
            small &= row.table[code] >= -kSmallTable && row.table[code] <= kSmallTable;
            raised[code] = static_cast<int8_t>(row.table[code] + Math::raised_by);
        }
        TileRow of_small = row;
        of_small.table = raised;
        if (small) return dot_rows<Codes, Math, true>(of_small, x, count, out);
    }
    dot_rows<Codes, Math, false>(row, x, count, out);
}

template <class Codes, class Math> constexpr FormatKernels kernels_of_format() {
    return {dot<Codes, Math>, Codes::expand, Codes::fit};
}

// In the order of switchyard_kernels.h; bf16 is not in tiles.
template <class Math> constexpr TileKernels tile_kernels() {
    return {quantise_floats,
            quantise_bf16,
            {{}, kernels_of_format<Int8, Math>(), kernels_of_format<Int4, Math>(), kernels_of_format<Lut4, Math>()},
            Math::most_vectors};
}

}  // namespace
