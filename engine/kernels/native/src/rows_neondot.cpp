// Compiled with the dot products of Armv8.2 (asimddp).
#define SWITCHYARD_NEON
#include "types/all.h"

extern const RowKernels kNeonDotRows;
const RowKernels kNeonDotRows = row_kernels();
