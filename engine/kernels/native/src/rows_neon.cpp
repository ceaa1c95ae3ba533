// For AArch64.
#define SWITCHYARD_NEON
#include "types/all.h"

extern const RowKernels kNeonRows;
const RowKernels kNeonRows = row_kernels();
