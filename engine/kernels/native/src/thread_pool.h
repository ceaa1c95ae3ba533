// A pool for pieces of work of some ten microseconds: the hand-over costs about one.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

struct SwitchyardPool {
    using Work = void (*)(void *argument, int thread, int threads);

    explicit SwitchyardPool(int threads);
    ~SwitchyardPool();
    SwitchyardPool(const SwitchyardPool &) = delete;
    SwitchyardPool &operator=(const SwitchyardPool &) = delete;

    // Runs `work` on all threads, the caller as number 0, and returns when all have ended.  One caller at a time.
    void run(Work work, void *argument);

    // All threads of the present `run` wait here for each other.
    void barrier();

  private:
    void worker(int thread);

    const int threads_;
    Work work_ = nullptr;
    void *argument_ = nullptr;
    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<uint64_t> barrier_epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::mutex one_caller_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
