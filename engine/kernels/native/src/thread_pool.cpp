#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
void relax_cpu() { _mm_pause(); }
#elif defined(__aarch64__)
void relax_cpu() { asm volatile("yield"); }
#else
void relax_cpu() {}
#endif

namespace {
// Between two layers of a decoding model lie some hundred microseconds of attention: longer silence means idle.
constexpr auto kSpin = std::chrono::microseconds(1500);
constexpr int64_t kWakingBytes = 1 << 20;  // less is done before a sleeping thread wakes up
}  // namespace

SwitchyardPool::SwitchyardPool(int threads) : threads_(threads), team_size_(threads > 1), team_size_long_(threads > 1) {
    workers_.reserve(threads > 1 ? threads - 1 : 0);
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back(&SwitchyardPool::worker, this);
}

SwitchyardPool::~SwitchyardPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
}

void SwitchyardPool::run(Work work, void *argument, int64_t bytes) {
    std::lock_guard<std::mutex> only(one_caller_);
    if (team_size_.use_team(bytes)) {
        spin_.store(true, std::memory_order_relaxed);
        run_team(work, argument);
    } else {
        work(argument);
    }
    team_size_.done();
}

void SwitchyardPool::run_long(Work work, void *argument, int64_t bytes) {
    std::lock_guard<std::mutex> only(one_caller_);
    if (bytes < kWakingBytes) {
        work(argument);
        return;
    }
    if (team_size_long_.use_team(bytes)) {
        spin_.store(false, std::memory_order_relaxed);
        run_team(work, argument);
    } else {
        work(argument);
    }
    team_size_long_.done();
}

void SwitchyardPool::run_all(Work work, void *argument) {
    std::lock_guard<std::mutex> only(one_caller_);
    run_team(work, argument);
}

void SwitchyardPool::run_team(Work work, void *argument) {
    work_ = work;
    argument_ = argument;
    gate_.fetch_add(1, std::memory_order_seq_cst);  // opens
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        // The empty lock orders this after a worker that has looked at the gate but does not wait yet.
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    work(argument);
    gate_.fetch_add(1, std::memory_order_seq_cst);  // closes
    spin_until([this] { return inside_.load(std::memory_order_seq_cst) == 0; });
}

void SwitchyardPool::worker() {
    uint64_t seen = 0;
    const auto is_news = [&] {
        const uint64_t gate = gate_.load(std::memory_order_seq_cst);
        return (gate & 1) != 0 && gate != seen;
    };
    for (;;) {
        const auto idle_since = std::chrono::steady_clock::now();
        int spins = 0;
        while (!is_news() && !stop_.load(std::memory_order_relaxed)) {
            relax_cpu();
            if ((++spins & 255) != 0) continue;
            if (spin_.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() < idle_since + kSpin) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return is_news() || stop_.load(); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        // Registers before checking that the gate is still open: the caller does the two in the opposite order.
        inside_.fetch_add(1, std::memory_order_seq_cst);
        const uint64_t gate = gate_.load(std::memory_order_seq_cst);
        if ((gate & 1) != 0 && gate != seen) {
            seen = gate;
            work_(argument_);
        }
        inside_.fetch_sub(1, std::memory_order_seq_cst);
    }
}
