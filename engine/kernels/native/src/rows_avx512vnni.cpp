// Compiled with AVX-512 F, BW, VL and VNNI.
#include "types/all.h"

extern const RowKernels kAvx512VnniRows;
const RowKernels kAvx512VnniRows = row_kernels();
