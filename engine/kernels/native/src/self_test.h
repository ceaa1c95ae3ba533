// Every kernel of an instruction set on small problems, against plain arithmetic.
#pragma once
#include "kernel_set.h"
#include "many_kernels.h"

// 0 if right, else which kernel is wrong.
int32_t test_rows(const KernelSet &kernels);
int32_t test_tiles(const TileKernels &kernels);
int32_t test_many(const ManyKernels &kernels);
