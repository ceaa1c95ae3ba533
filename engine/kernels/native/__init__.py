"""Native CPU kernels: C++ behind a C interface, built if there is a compiler, never required."""
