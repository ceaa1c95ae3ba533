// Which instruction set is in use.
#pragma once
#include "kernel_set.h"

const KernelSet &kernels_in_use();
