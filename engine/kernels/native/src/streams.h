// Several streams of hidden states, and the parts of layers between them: see SwitchyardStreams.
#pragma once
#include <cstdint>
#include <vector>

#include "switchyard_kernels.h"

class Streams {
  public:
    // All of them begin as hidden [tokens, width].
    void begin(const float *hidden, int32_t count, int32_t tokens, int64_t width);
    // What the next part is given, [tokens, width]: their sum.
    const float *collapse(SwitchyardPool *pool, const SwitchyardStreams &mix);
    // Takes in what the part gave of that, hidden states with what it adds.
    void spread(SwitchyardPool *pool, const float *given);

  private:
    struct Run;
    void weigh(const SwitchyardStreams &mix, int64_t token);
    static void collapse_work(void *argument);
    static void spread_work(void *argument);

    int32_t count_ = 0, tokens_ = 0;
    int64_t width_ = 0;
    std::vector<float> states_, next_;  // [tokens, streams, width]
    std::vector<float> sum_;            // [tokens, width]
    std::vector<float> shares_;         // [tokens, (2 + streams) * streams]: products, and then pre, post and the matrix
};
