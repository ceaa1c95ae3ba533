#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { asm volatile("yield"); }
#else
static inline void relax() {}
#endif

namespace {
// Between two layers of a decoding model lie some hundred microseconds of attention: longer silence means idle.
constexpr auto kSpin = std::chrono::microseconds(1500);
// A waiter that has spun this often yields: on a busy machine the thread it waits for may need this core.
constexpr int kSpinsBeforeYield = 4000;

template <class Done> void spin_until(Done done) {
    for (int spins = 0; !done(); ++spins) {
        relax();
        if (spins > kSpinsBeforeYield) std::this_thread::yield();
    }
}
}  // namespace

SwitchyardPool::SwitchyardPool(int threads) : threads_(threads) {
    workers_.reserve(threads > 1 ? threads - 1 : 0);
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back(&SwitchyardPool::worker, this, thread);
}

SwitchyardPool::~SwitchyardPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
}

void SwitchyardPool::run(Work work, void *argument) {
    if (threads_ == 1) {
        work(argument, 0, 1);
        return;
    }
    std::lock_guard<std::mutex> only(one_caller_);
    work_ = work;
    argument_ = argument;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        // The empty lock orders us after a worker that has looked at the epoch but does not wait yet.
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    work(argument, 0, threads_);
    spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
}

void SwitchyardPool::barrier() {
    if (threads_ == 1) return;
    const uint64_t now = barrier_epoch_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        waiting_.store(0, std::memory_order_relaxed);
        barrier_epoch_.store(now + 1, std::memory_order_release);
    } else {
        spin_until([this, now] { return barrier_epoch_.load(std::memory_order_acquire) != now; });
    }
}

void SwitchyardPool::worker(int thread) {
    uint64_t seen = 0;
    for (;;) {
        const auto give_up = std::chrono::steady_clock::now() + kSpin;
        int spins = 0;
        while (epoch_.load(std::memory_order_acquire) == seen && !stop_.load(std::memory_order_relaxed)) {
            relax();
            if ((++spins & 255) != 0 || std::chrono::steady_clock::now() < give_up) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen || stop_.load(); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        seen = epoch_.load(std::memory_order_acquire);
        work_(argument_, thread, threads_);
        running_.fetch_sub(1, std::memory_order_acq_rel);
    }
}
