// Compiled with the dot products of Armv8.2 and the matrix products of bytes of Armv8.6 (i8mm).
#define SWITCHYARD_NEON
#include "types/all.h"

extern const RowKernels kNeonI8mmRows;
const RowKernels kNeonI8mmRows = row_kernels();
