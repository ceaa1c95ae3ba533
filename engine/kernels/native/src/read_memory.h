// Reading memory, to measure how fast that is.
#pragma once
#include "switchyard_kernels.h"

// Reads all bytes, with all threads of the pool; returns a sum of them, so that no compiler leaves the reading out.
SWITCHYARD_API uint64_t switchyard_read_memory(SwitchyardPool *pool, const uint8_t *from, int64_t bytes);
