// When the steps of few tokens ran, and whom they chose: written into a ring that a reader empties now and then.
#pragma once

#include <cstdint>

#include "switchyard_kernels.h"

// Lives as long as a step, and stamps it when it ends.  Costs one look at a flag while nothing is recorded.
class Stamp {
  public:
    // `which`: the structure that describes the step.  `chosen`, [count]: by all tokens, filled in by its end.
    Stamp(const void *which, const int64_t *chosen = nullptr, int64_t count = 0);
    ~Stamp();
    Stamp(const Stamp &) = delete;
    Stamp &operator=(const Stamp &) = delete;

  private:
    bool is_first(int64_t place) const;  // whether no token before chose that expert

    const void *which_;
    const int64_t *chosen_;
    int64_t count_, begun_ns_;
};
