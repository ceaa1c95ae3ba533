// x as whole numbers: 8 bits per 32 columns for tiled matrices, as the CPU's kernels round it.
#pragma once
#include "formats.h"

// 4 WORDS elements of x as codes of 8 bits; the 8 / WORDS lanes of a group agree on its scale.  What is no number makes
// the scale none, so that it is not lost.
template <int WORDS>
__device__ __forceinline__ void round_to_codes(const float* values, int* codes, float* scale) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) {
        const float size = fabsf(values[i]);
        largest = size <= 3.0e38f ? fmaxf(largest, size) : float_of_bits(0x7f800000);
    }
#pragma unroll
    for (int bit = 1; bit < GROUP_WORDS / WORDS; bit *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, bit));
    }
    const bool is_finite = largest <= 3.0e38f;
    *scale = is_finite ? largest * (1.0f / 127.0f) : float_of_bits(0x7fc00000);
    const float inverse = is_finite && largest >= 1e-30f ? 127.0f / largest : 0.0f;
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float value = inverse == 0.0f ? 0.0f : values[4 * word + i] * inverse;
            bits |= (static_cast<u32>(__float2int_rn(value)) & 255u) << (8 * i);
        }
        codes[word] = static_cast<int>(bits);
    }
}
