// Keys and values as they are stored: each type of SWITCHYARD_KV_*.
#pragma once
#include <cstdint>

// Bytes of a number.
int64_t size_of_number(int32_t type);
// Writes x [dim] as row `row` of `rows` [any, dim], and its scale, where the type has one, to scales[row].
void write_row(int32_t type, const float *x, int64_t dim, int64_t row, void *rows, float *scales);
