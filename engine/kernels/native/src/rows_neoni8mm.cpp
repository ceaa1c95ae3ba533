// Compiled with the dot products of Armv8.2 and the matrix products of bytes of Armv8.6 (i8mm).
#define SWITCHYARD_NEON
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kNeonI8mmRows;
constexpr RowKernels kNeonI8mmRows = row_kernels();
