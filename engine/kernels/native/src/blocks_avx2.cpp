// Compiled with AVX2.
#include "block_halves.h"

const BlockKernels kAvx2Blocks = block_kernels();
