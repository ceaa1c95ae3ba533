// Which kernels are in use.
#pragma once
#include "kernel_set.h"

Kernels kernels_in_use();
