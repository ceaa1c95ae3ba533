#define MOST_ACCUMULATORS 6
#include "paged_impl.h"

const PagedKernels kNeonPaged[4] = PAGED_KERNELS;
