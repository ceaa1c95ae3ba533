#define MOST_ACCUMULATORS 6
#include "paged_impl.h"

const PagedKernels kPortablePaged[4] = PAGED_KERNELS;
