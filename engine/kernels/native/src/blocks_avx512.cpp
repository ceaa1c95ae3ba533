// Compiled with AVX-512 F, BW and VL.
#include "block_halves.h"

const BlockKernels kAvx512Blocks = block_kernels();
