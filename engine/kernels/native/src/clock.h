// The clock of Python's time.perf_counter_ns.
#pragma once
#include <chrono>
#include <cstdint>
#ifdef __APPLE__
#include <time.h>
#endif

inline int64_t clock_ns() {
#ifdef __APPLE__
    return static_cast<int64_t>(clock_gettime_nsec_np(CLOCK_UPTIME_RAW));
#else
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
#endif
}
