// Compiled with AVX-512 VNNI and BF16 too, where the compiler knows them.
#include "attend.h"
#if defined(__AVX512BF16__)
#include "attend_impl.h"

static const AttendKernels kernels = ATTEND_KERNELS;
const AttendKernels *const kAvx512Bf16Attend = &kernels;
#else
const AttendKernels *const kAvx512Bf16Attend = nullptr;
#endif
