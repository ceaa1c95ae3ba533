#include "attend_impl.h"

const AttendKernels kPortableAttend = ATTEND_KERNELS;
