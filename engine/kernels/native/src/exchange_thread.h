// The thread of the host that computes what a card's tokens miss.  It looks at its flag again and again while a token is
// under way, since a card cannot wake anybody, but lets others have its core; between tokens it sleeps.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "exchange.h"
#include "thread_pool.h"

class ExchangeThread {
  public:
    // (layer, count, experts in ascending order, row, rows) -> 0, or else the token has failed.
    using Compute = std::function<int32_t(int32_t, int32_t, const int32_t *, const uint16_t *, float *)>;

    ExchangeThread(const ExchangeMemory &memory, Compute compute)
        : worker_(memory), compute_(std::move(compute)), thread_([this] { run(); }) {}
    // After ExchangeHost::stop.
    ~ExchangeThread() {
        wake();
        thread_.join();
    }
    ExchangeThread(const ExchangeThread &) = delete;
    ExchangeThread &operator=(const ExchangeThread &) = delete;

    // After ExchangeHost::start: a token is under way.  The lock orders this after a look at the flags that saw none.
    void wake() {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_one();
    }

  private:
    void run() {
        for (int idle = 0; !worker_.is_stopped();) {
            if (worker_.serve(compute_)) {
                idle = 0;
            } else if (++idle < kLooks || worker_.is_needed()) {
                relax_cpu();
                if (idle % kLooksPerTurn == 0) std::this_thread::yield();
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return worker_.is_needed() || worker_.is_stopped(); });
                idle = 0;
            }
        }
    }

    static constexpr int kLooks = 4000;       // some 100 microseconds: between two tokens of a small model
    static constexpr int kLooksPerTurn = 64;  // where there are more threads than cores, others compute meanwhile

    ExchangeWorker worker_;
    const Compute compute_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::thread thread_;
};
