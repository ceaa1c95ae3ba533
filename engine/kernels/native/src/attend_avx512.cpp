#include "attend_impl.h"

const AttendKernels kAvx512Attend = ATTEND_KERNELS;
