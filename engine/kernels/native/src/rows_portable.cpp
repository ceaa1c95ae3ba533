// For processors with none of the other instruction sets.
#include "types/all.h"

extern const RowKernels kPortableRows;
const RowKernels kPortableRows = row_kernels();
