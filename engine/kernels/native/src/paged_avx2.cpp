#define MOST_ACCUMULATORS 6
#include "paged_impl.h"

const PagedKernels kAvx2Paged[4] = PAGED_KERNELS;
