// For processors with none of the other instruction sets.
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kPortableRows;
constexpr RowKernels kPortableRows = row_kernels();
