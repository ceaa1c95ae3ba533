// The worker of a pool that computes what a card's tokens miss.  It looks at its flag again and again while a token is under
// way, since a card cannot wake anybody, and takes part in the pool's other work when there is any: with a thread of its
// own for this, two would want one core.
#pragma once
#include <functional>

#include "exchange.h"
#include "thread_pool.h"

class ExchangeThread final : public Watch {
  public:
    // As for `ExchangeWorker::serve`.
    using Compute = std::function<int32_t(int32_t, int32_t, const int32_t *, const int32_t *, const uint16_t *, float *)>;

    ExchangeThread(const ExchangeMemory &memory, SwitchyardPool &pool, Compute compute)
        : worker_(memory), pool_(pool), compute_(std::move(compute)) {
        pool_.watch(this);
    }
    // No token is under way, or the exchange has stopped.
    ~ExchangeThread() override { pool_.unwatch(); }
    ExchangeThread(const ExchangeThread &) = delete;
    ExchangeThread &operator=(const ExchangeThread &) = delete;

    // After ExchangeHost::start: a token is under way.
    void wake() { pool_.wake(); }

    // Also for the emulated card's thread, which has nothing else to do while it waits: it computes what is asked for if
    // nobody has begun, or else its part of it.  `seen`: its own.
    bool help(uint64_t &seen) { return worker_.serve(compute_) || pool_.join(seen); }
    // What the card computes meanwhile, open to the worker once it has nothing else to do.
    OpenWork beside;

    bool look() override { return worker_.serve(compute_) || beside.join(seen_); }
    bool is_needed() const override { return worker_.is_needed() && !worker_.is_stopped(); }

  private:
    ExchangeWorker worker_;
    SwitchyardPool &pool_;
    const Compute compute_;
    uint64_t seen_ = 0;  // of the worker
};
