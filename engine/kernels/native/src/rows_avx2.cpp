// Compiled with AVX2, FMA and F16C.
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kAvx2Rows;
constexpr RowKernels kAvx2Rows = row_kernels();
