// Which kernels are in use.
#pragma once
#include "kernel_set.h"

Kernels kernels_in_use();
// The same for many vectors, where all come of the sets that were chosen for those.
Kernels kernels_for_many();
