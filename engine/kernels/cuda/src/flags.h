// Flags between a card and the host, in memory that both see: stored with release after all that they announce, loaded
// with acquire before any of that is read.
//
// Cards before compute capability 7.0 have no such stores and loads.  They fence instead, which orders more.
#pragma once
#include "card.h"

// As in `ExchangeFlags` of exchange.h, each in a line of its own.
constexpr int FLAG_BYTES = 128;
constexpr int STARTED = 0, POSTED = 1, ANSWERED = 2, OVERDUE = 4, FINISHED = 5, CANCELLED = 6, STOPPED = 7;

#ifdef SWITCHYARD_EMULATED
inline u64 load_flag(const u64* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
inline void store_flag(u64* flag, u64 number) { __atomic_store_n(flag, number, __ATOMIC_RELEASE); }
inline u64 look_at(const u64* own) { return __atomic_load_n(own, __ATOMIC_RELAXED); }
inline void let_know(u64* own, u64 number) { __atomic_store_n(own, number, __ATOMIC_RELAXED); }
template <class T>
T load_shared(const T* at) { return *at; }
inline void announce() { __syncthreads(); }
inline i64 card_clock_ns() { return emulated::clock_ns(); }
inline void rest() { emulated::rest(); }
#else
__device__ __forceinline__ u64 load_flag(const u64* flag) {
    u64 number;
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(number) : "l"(flag) : "memory");
#else
    number = *reinterpret_cast<const volatile u64*>(flag);
    __threadfence_system();
#endif
    return number;
}

__device__ __forceinline__ void store_flag(u64* flag, u64 number) {
#if __CUDA_ARCH__ >= 700
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(flag), "l"(number) : "memory");
#else
    __threadfence_system();
    *reinterpret_cast<volatile u64*>(flag) = number;
#endif
}

// What blocks of one kernel tell each other, in the card's own memory.
__device__ __forceinline__ u64 look_at(const u64* own) { return *reinterpret_cast<const volatile u64*>(own); }
__device__ __forceinline__ void let_know(u64* own, u64 number) { *reinterpret_cast<volatile u64*>(own) = number; }

// What the host has written: never from a cache that may hold what was there before.
template <class T>
__device__ __forceinline__ T load_shared(const T* at) { return __ldcv(at); }

// Before a thread stores a flag for what its whole block has written.
__device__ __forceinline__ void announce() {
    __threadfence_system();
    __syncthreads();
}

__device__ __forceinline__ i64 card_clock_ns() {
    i64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Between two looks at a flag: each of them goes over the link.
__device__ __forceinline__ void rest() {
#if __CUDA_ARCH__ >= 700
    __nanosleep(200);
#endif
}
#endif
