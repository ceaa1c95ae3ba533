"""Native CPU kernels: C++ behind a plain C interface, built where a compiler is, never required."""
