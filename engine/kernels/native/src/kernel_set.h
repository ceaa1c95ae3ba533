// What differs between instruction sets: dot products of bf16 rows.
#pragma once
#include <cstdint>

struct KernelSet {
    // Spreads a bf16 vector of n into `out`, in the order that `dot_pair` reads: room for n rounded up to 32.
    void (*spread)(const uint16_t *x, int64_t n, float *out);
    // The same from floats.
    void (*spread_floats)(const float *x, int64_t n, float *out);
    // Dot products of two bf16 rows of n with a spread vector.
    void (*dot_pair)(const uint16_t *a, const uint16_t *b, const float *spread, int64_t n, float *a_out, float *b_out);
    // out[i] = sum over rows r of shares[r] * x[r, i]: x bf16 [rows, n].
    void (*mix_rows)(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out);
};

extern const KernelSet kPortableKernels;
#if defined(__x86_64__) || defined(_M_X64)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#endif

inline float from_bf16(uint16_t value) {
    union {
        uint32_t bits;
        float number;
    } cast = {static_cast<uint32_t>(value) << 16};
    return cast.number;
}

// Round to nearest, ties to even, as torch does; a NaN stays one.
inline uint16_t to_bf16(float value) {
    union {
        float number;
        uint32_t bits;
    } cast = {value};
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((cast.bits + 0x7fff + ((cast.bits >> 16) & 1)) >> 16);
}

inline float round_bf16(float value) { return from_bf16(to_bf16(value)); }
