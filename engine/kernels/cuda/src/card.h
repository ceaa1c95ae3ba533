// What the kernels need of a card, and numbers of 16 bits.  NVRTC knows everything here without a header; the tests
// give the same names to loops over blocks and fibers, and hip.h to what AMD's compilers have.
#pragma once

#ifdef SWITCHYARD_EMULATED
#include "emulated_card.h"
#elif defined(__HIP__)
#include "hip.h"
#endif

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int LANES = 32;
constexpr int THREADS = 128, WARPS = THREADS / LANES;  // of a block

__device__ __forceinline__ int lane_number() { return threadIdx.x % LANES; }
__device__ __forceinline__ int warp_number() { return threadIdx.x / LANES; }

__device__ __forceinline__ float float_of_bits(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u32 word_of(const uint4& words, int at) {
    return at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
}
__device__ __forceinline__ u16 half_at(const uint4& words, int at) { return static_cast<u16>(word_of(words, at / 2) >> (16 * (at & 1))); }

// Elements of matrices and vectors, as they lie in memory.
struct Bf16 {
    u16 bits;
    __device__ __forceinline__ float value() const { return float_of_bits(static_cast<u32>(bits) << 16); }
    static __device__ __forceinline__ Bf16 of(float value) {
        const u32 bits = __float_as_uint(value);
        if (value != value) return Bf16{static_cast<u16>(bits >> 16 | 0x40)};
        return Bf16{static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // ties to even
    }
};

struct Fp16 {
    u16 bits;
    __device__ __forceinline__ float value() const {
#ifdef SWITCHYARD_EMULATED
        return emulated::float_of_half(bits);
#elif defined(__HIP__)
        return hip::float_of_half(bits);
#else
        float result;
        asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
        return result;
#endif
    }
    static __device__ __forceinline__ Fp16 of(float value) {
#ifdef SWITCHYARD_EMULATED
        return Fp16{emulated::half_of_float(value)};
#elif defined(__HIP__)
        return Fp16{hip::half_of_float(value)};
#else
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return Fp16{bits};
#endif
    }
};

struct Fp32 {
    float number;
    __device__ __forceinline__ float value() const { return number; }
    static __device__ __forceinline__ Fp32 of(float value) { return Fp32{value}; }
};

// Sums over the lanes whose numbers differ in the bits from `low` to `high`; every lane gets the sum.
template <int low, int high>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
    for (int bit = low; bit <= high; bit *= 2) value += __shfl_xor_sync(ALL_LANES, value, bit);
    return value;
}

// Sums over the threads of a block; every thread gets the sum.
__device__ __forceinline__ float sum_over_block(float value) {
    __shared__ float of_warps[WARPS];
    value = sum_over_lanes<1, LANES / 2>(value);
    __syncthreads();  // nobody reads the sum before this one any more
    if (lane_number() == 0) of_warps[warp_number()] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) value += of_warps[warp];
    return value;
}

// Whether this block is the last of `expected` to come here; what the others wrote before is then visible to all its
// threads (through `__ldcg`).  The counter is 0 again afterwards, so that a graph can be replayed.
__device__ __forceinline__ bool is_last_block(u32* arrived, u32 expected) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived, 1u) == expected - 1;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}
