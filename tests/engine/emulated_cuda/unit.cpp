// Some of the kernels, which EMULATED_UNIT names: all in one source would take a compiler minutes with a sanitizer's checks.
#include EMULATED_HEADER
EMULATED_UNIT;
