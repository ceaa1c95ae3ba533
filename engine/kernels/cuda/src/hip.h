// What AMD's compilers (HIP) call otherwise than CUDA C, or do not have.  Their own header is there before this one.
//
// A warp is 32 lanes here as there: a wave of RDNA's cards, or one half of a wave of GCN's and CDNA's, which have 64 lanes.
// Halves may go different ways: nothing here asks lanes of the other half.
#pragma once

// The second number means something else to HIP; without it a kernel may use as many registers as a block leaves.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

namespace hip {
typedef unsigned int Four __attribute__((ext_vector_type(4)));
typedef unsigned int Two __attribute__((ext_vector_type(2)));

__device__ __forceinline__ int lane_of_wave() { return static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))); }

template <class T>
__device__ __forceinline__ T from_lane(T value, int lane) {
    static_assert(sizeof(T) == 4, "a word");
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(4 * lane, __builtin_bit_cast(int, value)));
}

__device__ __forceinline__ unsigned int ballot(bool is_true) {
    return static_cast<unsigned int>(static_cast<unsigned long long>(__ballot(is_true)) >> (lane_of_wave() & 32));
}

__device__ __forceinline__ void warp_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

// Four products of signed bytes, and a sum.
__device__ __forceinline__ int dot(int a, int b, int sum) {
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || \
    defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1011__) || defined(__gfx1012__) || defined(__gfx1030__) || \
    defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1033__) || defined(__gfx1034__) || defined(__gfx1035__) || \
    defined(__gfx1036__)
    return __builtin_amdgcn_sdot4(a, b, sum, false);
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || defined(__gfx1150__) || \
    defined(__gfx1151__) || defined(__gfx1152__) || defined(__gfx1153__) || defined(__gfx1200__) || defined(__gfx1201__)
    return __builtin_amdgcn_sudot4(true, a, true, b, sum, false);
#else
#pragma unroll
    for (int shift = 0; shift < 32; shift += 8) sum += static_cast<signed char>(a >> shift) * static_cast<signed char>(b >> shift);
    return sum;
#endif
}

// CUDA's selector has a nibble for each byte, AMD's a byte.
__device__ __forceinline__ unsigned int byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
    selector = (selector | selector << 8) & 0x00ff00ffu;
    selector = (selector | selector << 4) & 0x07070707u;
    return __builtin_amdgcn_perm(high, low, selector);
}

// Read once: it need not stay in a cache.  HIP's vectors are no vectors to the compiler.
template <class T, class Vector>
__device__ __forceinline__ T streamed_as(const T* at) {
    const Vector read = __builtin_nontemporal_load(reinterpret_cast<const Vector*>(at));
    T result;
    __builtin_memcpy(&result, &read, sizeof(T));
    return result;
}

template <class T>
__device__ __forceinline__ T streamed(const T* at) {
    static_assert(sizeof(T) == 16 || sizeof(T) == 8 || sizeof(T) == 4, "words");
    if constexpr (sizeof(T) == 16) return streamed_as<T, Four>(at);
    else if constexpr (sizeof(T) == 8) return streamed_as<T, Two>(at);
    else return streamed_as<T, unsigned int>(at);
}

// What other blocks have written.
template <class T>
__device__ __forceinline__ T from_others(const T* at) {
    static_assert(sizeof(T) == 4, "a word");
    return __builtin_bit_cast(T, __hip_atomic_load(reinterpret_cast<const unsigned int*>(at), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT));
}

// Rounded by themselves, never fused.
__device__ __forceinline__ float product(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
__device__ __forceinline__ float difference(float a, float b) {
#pragma clang fp contract(off)
    return a - b;
}

__device__ __forceinline__ float float_of_half(unsigned short bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
__device__ __forceinline__ unsigned short half_of_float(float value) { return __builtin_bit_cast(unsigned short, static_cast<_Float16>(value)); }
}  // namespace hip

#define __shfl_sync(lanes, value, from) hip::from_lane(value, (hip::lane_of_wave() & 32) | (from))
// Some versions of HIP's header have some of these, with masks of 64 lanes.
#undef __shfl_sync
#undef __shfl_xor_sync
#undef __ballot_sync
#undef __syncwarp
#undef __dp4a
#undef __byte_perm
#undef __fmul_rn
#undef __fsub_rn
#define __fmul_rn hip::product
#define __fsub_rn hip::difference
#undef __ldcs
#undef __ldcg
#define __shfl_xor_sync(lanes, value, bits) hip::from_lane(value, hip::lane_of_wave() ^ (bits))
#define __shfl_sync(lanes, value, lane) hip::from_lane(value, (hip::lane_of_wave() & 32) | (lane))
#define __ballot_sync(lanes, is_true) hip::ballot(is_true)
#define __syncwarp() hip::warp_barrier()
#define __dp4a hip::dot
#define __byte_perm hip::byte_perm
#define __ldcs hip::streamed
#define __ldcg hip::from_others
