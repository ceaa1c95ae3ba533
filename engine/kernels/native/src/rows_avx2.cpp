// Compiled with AVX2, FMA and F16C.
#include "types/all.h"

extern const RowKernels kAvx2Rows;
const RowKernels kAvx2Rows = row_kernels();
