// For processors with none of the other instruction sets.
#include "block_halves.h"

const BlockKernels kPortableBlocks = block_kernels();
