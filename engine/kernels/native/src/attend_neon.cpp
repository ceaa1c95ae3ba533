#include "attend_impl.h"

const AttendKernels kNeonAttend = ATTEND_KERNELS;
