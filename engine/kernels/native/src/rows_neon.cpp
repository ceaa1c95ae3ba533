// For AArch64.
#define SWITCHYARD_NEON
#include "types/all.h"

// Made by the compiler: a processor without these instructions loads the library, too.
extern const RowKernels kNeonRows;
constexpr RowKernels kNeonRows = row_kernels();
