// Compiled with the dot products of Armv8.2 (asimddp).
#define SWITCHYARD_NEON
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kNeonDotRows;
constexpr RowKernels kNeonDotRows = row_kernels();
