// A graphics card for CUDA C compiled as C++: what the kernels call, over threads of a block that take turns (fibers), or
// that are threads of this machine (EMULATED_THREADS), which a checker for races understands.  Blocks run one after the
// other in a random order; a barrier that not all reach ends the program.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
struct float2 { float x, y; };

namespace emulated {
struct Index { unsigned int x = 0, y = 0, z = 0; };
#ifdef EMULATED_THREADS
extern thread_local Index thread_index;
#else
extern Index thread_index;
#endif
extern Index block_index, grid_size;  // of the block that runs
void block_barrier();
void warp_barrier();
// A word of each lane of the warp.  Two places take turns: nobody writes one before all have read it.
std::uint32_t* exchange(std::uint32_t mine);
void run(Index grid, unsigned int threads, std::uint64_t seed, const std::function<void()>& kernel);
// Blocks of one thread, which is the caller: for checkers that know no fibers.
void run_alone(Index grid, std::uint64_t seed, const std::function<void()>& kernel);

inline long long clock_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Whoever is waited for may need this very core.
inline void rest() { std::this_thread::yield(); }

float float_of_half(std::uint16_t bits);
std::uint16_t half_of_float(float value);

template <class T>
std::uint32_t bits_of(T value) {
    static_assert(sizeof(T) == 4, "a word");
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
template <class T>
T from_bits(std::uint32_t bits) {
    T value;
    std::memcpy(&value, &bits, 4);
    return value;
}
}  // namespace emulated

#define threadIdx (emulated::thread_index)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid_size)

inline void __syncthreads() { emulated::block_barrier(); }
inline void __syncwarp(unsigned int = ~0u) { emulated::warp_barrier(); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned int, T value, int from) {
    return emulated::from_bits<T>(emulated::exchange(emulated::bits_of(value))[from & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned int mask, T value, int bits) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}
inline unsigned int __ballot_sync(unsigned int, bool is_true) {
    const std::uint32_t* lanes = emulated::exchange(is_true);
    unsigned int result = 0;
    for (unsigned int lane = 0; lane < 32; lane++) result |= lanes[lane] << lane;
    return result;
}

inline int __ffs(unsigned int bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(unsigned int bits) { return emulated::from_bits<float>(bits); }
inline unsigned int __float_as_uint(float value) { return emulated::bits_of(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline int __dp4a(int a, int b, int sum) {
    for (int byte = 0; byte < 4; byte++) {
        sum += static_cast<std::int8_t>(static_cast<unsigned int>(a) >> 8 * byte) * static_cast<std::int8_t>(static_cast<unsigned int>(b) >> 8 * byte);
    }
    return sum;
}
namespace emulated {
// What matrix units do for a warp: 16 x 32 codes of 8 bits times 32 x 8; the lanes' parts as in PTX (m16n8k32).
inline void multiply_codes(const unsigned int* left, unsigned int first, unsigned int second, int* sums) {
    const unsigned int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    unsigned int words[2][8], columns[2][8];
    for (unsigned int word = 0; word < 4; word++) {
        const std::uint32_t* lanes = exchange(left[word]);
        for (unsigned int part = 0; part < 4; part++) words[word % 2][word / 2 * 4 + part] = lanes[row * 4 + part];
    }
    for (unsigned int word = 0; word < 2; word++) {
        const std::uint32_t* lanes = exchange(word == 0 ? first : second);
        for (unsigned int part = 0; part < 8; part++) columns[part / 4][word * 4 + part % 4] = lanes[(column + part / 4) * 4 + part % 4];
    }
    for (int i = 0; i < 4; i++) {
        sums[i] = 0;
        for (int word = 0; word < 8; word++) sums[i] = __dp4a(static_cast<int>(words[i / 2][word]), static_cast<int>(columns[i % 2][word]), sums[i]);
    }
}
}  // namespace emulated
inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
    const std::uint64_t both = low | static_cast<std::uint64_t>(high) << 32;
    unsigned int result = 0;
    for (int byte = 0; byte < 4; byte++) result |= (both >> (8 * (selector >> 4 * byte & 7)) & 255) << 8 * byte;
    return result;
}

template <class T>
T __ldcs(const T* at) {
    if (reinterpret_cast<std::uintptr_t>(at) % alignof(T) || reinterpret_cast<std::uintptr_t>(at) % (sizeof(T) > 16 ? 16 : sizeof(T))) {
        std::fprintf(stderr, "a misaligned load of %zu bytes\n", sizeof(T));
        std::abort();
    }
    return *at;
}
template <class T>
T __ldcg(const T* at) { return __ldcs(at); }
inline unsigned int atomicAdd(unsigned int* at, unsigned int more) { return __atomic_fetch_add(at, more, __ATOMIC_ACQ_REL); }
