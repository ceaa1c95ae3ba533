#include "attend_impl.h"

const AttendKernels kAvx2Attend = ATTEND_KERNELS;
