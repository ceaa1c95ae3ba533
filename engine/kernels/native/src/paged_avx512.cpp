#define MOST_ACCUMULATORS 16
#include "paged_impl.h"

const PagedKernels kAvx512Paged[4] = PAGED_KERNELS;
