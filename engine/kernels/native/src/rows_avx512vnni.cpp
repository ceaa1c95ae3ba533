// Compiled with AVX-512 F, BW, VL and VNNI.
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kAvx512VnniRows;
constexpr RowKernels kAvx512VnniRows = row_kernels();
