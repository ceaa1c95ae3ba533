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
constexpr int kLooksPerTurn = 64;  // of a worker that watches: the threads that it watches for may need its core
constexpr int64_t kWakingBytes = 1 << 20;  // less is done before a sleeping thread wakes up
}  // namespace

SwitchyardPool::SwitchyardPool(int threads) : threads_(threads), team_size_(threads > 1), team_size_long_(threads > 1) {
    workers_.reserve(threads > 1 ? threads - 1 : 0);
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back(&SwitchyardPool::worker, this, thread == 1);
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
    if (threads_ > 1) {
        run_team(work, argument);
    } else {
        work(argument);
    }
}

void SwitchyardPool::run_team(Work work, void *argument) {
    open_.run(work, argument, [this] {
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    });
}

void SwitchyardPool::watch(Watch *watch) {
    watch_.store(watch, std::memory_order_seq_cst);
    if (workers_.empty()) workers_.emplace_back(&SwitchyardPool::worker, this, true);
}

void SwitchyardPool::unwatch() {
    watch_.store(nullptr, std::memory_order_seq_cst);
    spin_until([this] { return !looking_.load(std::memory_order_seq_cst); });
}

void SwitchyardPool::wake() {
    // The empty lock orders this after a worker that has looked and seen nothing but does not wait yet.
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

// What the watch, if there is one, says to a question.
template <class Ask> bool SwitchyardPool::ask(Ask ask) {
    if (watch_.load(std::memory_order_relaxed) == nullptr) return false;
    looking_.store(true, std::memory_order_seq_cst);  // and then looks again: `unwatch` does the two in the opposite order
    Watch *watch = watch_.load(std::memory_order_seq_cst);
    const bool answer = watch != nullptr && ask(*watch);
    looking_.store(false, std::memory_order_seq_cst);
    return answer;
}

void SwitchyardPool::worker(bool watches) {
    uint64_t seen = 0;
    const auto is_needed = [&] { return watches && ask([](const Watch &watch) { return watch.is_needed(); }); };
    for (;;) {
        auto idle_since = std::chrono::steady_clock::now();
        int spins = 0;
        while (!open_.is_news(seen) && !stop_.load(std::memory_order_relaxed)) {
            relax_cpu();
            if (watches && ask([](Watch &watch) { return watch.look(); })) {
                idle_since = std::chrono::steady_clock::now();
                continue;
            }
            ++spins;
            if (watches && spins % kLooksPerTurn == 0 && watch_.load(std::memory_order_relaxed)) std::this_thread::yield();
            if ((spins & 255) != 0) continue;
            if (is_needed()) {
                idle_since = std::chrono::steady_clock::now();
                continue;
            }
            if (spin_.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() < idle_since + kSpin) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return open_.is_news(seen) || stop_.load() || is_needed(); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        open_.join(seen);
    }
}

bool OpenWork::join(uint64_t &seen) {
    if (!is_news(seen)) return false;
    // Registers before checking that the gate is still open: the caller does the two in the opposite order.
    inside_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t gate = gate_.load(std::memory_order_seq_cst);
    const bool joins = (gate & 1) != 0 && gate != seen;
    if (joins) {
        seen = gate;
        work_(argument_);
    }
    inside_.fetch_sub(1, std::memory_order_seq_cst);
    return joins;
}
