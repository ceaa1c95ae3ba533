// A pool for work of some tens of microseconds.
//
// Threads take chunks as they arrive, and nobody waits for a thread that has taken none: on a busy machine a worker that
// is not scheduled costs nothing, the caller does its share.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "team_size.h"

// Waits for `done()` by spinning briefly, then yielding: the thread waited for may need this very core.
void relax_cpu();
struct Pause {
    int spins = 2000;  // before others have a turn
    void operator()() {
        relax_cpu();
        if (--spins < 0) std::this_thread::yield();
    }
};
template <class Done> void spin_until(Done done) {
    for (Pause pause; !done();) pause();
}

// Items that all threads share, each processed once.
class Phase {
  public:
    // For `threads` threads.  Chunks shrink with what is left, as in guided self-scheduling (Polychronopoulos and Kuck
    // 1987): the first are long, because memory is read fastest in long runs, the last short, so that all threads end at
    // about the same time.  Never fewer than `fewest` items.
    Phase(int64_t items, int threads, int64_t fewest = 8) : items_(items), parts_(int64_t{4} * threads), fewest_(fewest) {}

    // Calls body(begin, end) for chunks until none is left, then waits for those that other threads have taken.
    template <class Body> void run(Body body) {
        int64_t begin = next_.load(std::memory_order_relaxed);
        while (begin < items_) {
            const int64_t even = (items_ - begin) / parts_, chunk = even > fewest_ ? even : fewest_;
            const int64_t end = begin + chunk < items_ ? begin + chunk : items_;
            if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            body(begin, end);
            done_.fetch_add(end - begin, std::memory_order_acq_rel);
            begin = next_.load(std::memory_order_relaxed);
        }
        spin_until([this] { return done_.load(std::memory_order_acquire) == items_; });
    }

    // The item that a thread takes next, if no other comes before it.
    int64_t coming() const { return next_.load(std::memory_order_relaxed); }

  private:
    const int64_t items_, parts_, fewest_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

constexpr int32_t kDecodeTokens = 8;  // a step of more is prefill

// Called by whoever opens the work and by all that join it in time; ends only when all phases of the work are done.
using Work = void (*)(void *argument);

// Work that other threads may join while it is open.
class OpenWork {
  public:
    // By one thread at a time.  `wake`: called once it is open.  Afterwards nobody touches `argument` any more.
    template <class Wake> void run(Work work, void *argument, Wake wake) {
        work_ = work;
        argument_ = argument;
        gate_.fetch_add(1, std::memory_order_seq_cst);  // opens
        wake();
        work(argument);
        gate_.fetch_add(1, std::memory_order_seq_cst);  // closes
        spin_until([this] { return inside_.load(std::memory_order_seq_cst) == 0; });
    }
    // Whether there is any that a thread has not joined yet, which has joined `seen` last.
    bool is_news(uint64_t seen) const {
        const uint64_t gate = gate_.load(std::memory_order_seq_cst);
        return (gate & 1) != 0 && gate != seen;
    }
    // Takes part in it, if there is any.
    bool join(uint64_t &seen);

  private:
    Work work_ = nullptr;
    void *argument_ = nullptr;
    alignas(64) std::atomic<uint64_t> gate_{0};  // even: closed; odd: open for a run
    alignas(64) std::atomic<int> inside_{0};
};

// Something else that one of a pool's workers looks at again and again while the pool has no work: nobody can wake it.
class Watch {
  public:
    virtual ~Watch() = default;
    // Does what there is to do; whether there was anything.
    virtual bool look() = 0;
    // Whether there may be something to do at any moment, so that the worker must not sleep.
    virtual bool is_needed() const = 0;
};

struct SwitchyardPool {
    explicit SwitchyardPool(int threads);
    ~SwitchyardPool();
    SwitchyardPool(const SwitchyardPool &) = delete;
    SwitchyardPool &operator=(const SwitchyardPool &) = delete;

    int threads() const { return threads_; }
    // Runs `work`, which reads `bytes` of weights, on the caller and, where that is faster, the workers; when it
    // returns, none of them touches `argument` any more.
    void run(Work work, void *argument, int64_t bytes);
    // The same for long work that is not decoding: the workers sleep afterwards, because torch's come next.
    void run_long(Work work, void *argument, int64_t bytes);
    // The same with all threads in any case.
    void run_all(Work work, void *argument);
    // Takes part in the work of another caller, if there is any that this thread has not joined yet, as a worker would.
    bool join(uint64_t &seen) { return open_.join(seen); }

    // One of the workers looks at this too from now on; a pool without workers gets one for it.  One at a time.
    void watch(Watch *watch);
    // When it returns, none does.
    void unwatch();
    // After the watch has become needed.
    void wake();

  private:
    void worker(bool watches);
    void run_team(Work work, void *argument);
    template <class Ask> bool ask(Ask ask);

    const int threads_;
    TeamSize team_size_, team_size_long_;
    OpenWork open_;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> spin_{true};
    std::atomic<Watch *> watch_{nullptr};
    std::atomic<bool> looking_{false};
    std::mutex mutex_;
    std::mutex one_caller_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
