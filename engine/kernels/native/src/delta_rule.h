// The gated delta rule for one token (Yang et al. 2024, "Gated Delta Networks", equation 10), in the target's registers.
#pragma once
#include "attend.h"
#include "attend_lanes.h"

namespace {

// The columns [at, at + count * kWidth) of the state, which stay in the cache between both passes.
template <int count> void delta_columns(const DeltaHead &head, int64_t at) {
    const int64_t step = head.value_dim;
    V found[count];
    repeat<count>([&](auto i) { found[i] = all(0.0f); });
    const float *row = head.state + at;
    for (int64_t k = 0; k < head.key_dim; ++k, row += step) {
        const V key = all(head.key[k] * head.decay[k]);
        repeat<count>([&](auto i) { found[i] = fma(load(row + i * kWidth), key, found[i]); });
    }
    V change[count], out[count];
    repeat<count>([&](auto i) {
        change[i] = multiply(subtract(load(head.value + at + i * kWidth), found[i]), all(head.beta));
        out[i] = all(0.0f);
    });
    float *state = head.state + at;
    for (int64_t k = 0; k < head.key_dim; ++k, state += step) {
        const V key = all(head.key[k]), query = all(head.query[k]), decay = all(head.decay[k]);
        repeat<count>([&](auto i) {
            const V now = fma(change[i], key, multiply(load(state + i * kWidth), decay));
            store(state + i * kWidth, now);
            out[i] = fma(now, query, out[i]);
        });
    }
    repeat<count>([&](auto i) { store(head.out + at + i * kWidth, out[i]); });
}

void delta_column(const DeltaHead &head, int64_t at) {
    const int64_t step = head.value_dim;
    float found = 0, out = 0;
    for (int64_t k = 0; k < head.key_dim; ++k) found += head.state[k * step + at] * (head.key[k] * head.decay[k]);
    const float change = (head.value[at] - found) * head.beta;
    for (int64_t k = 0; k < head.key_dim; ++k) {
        float &state = head.state[k * step + at];
        state = state * head.decay[k] + change * head.key[k];
        out += state * head.query[k];
    }
    head.out[at] = out;
}

void delta_rule(const DeltaHead &head) {
    constexpr int together = 4;
    int64_t at = 0;
    for (; at + together * kWidth <= head.value_dim; at += together * kWidth) delta_columns<together>(head, at);
    for (; at + kWidth <= head.value_dim; at += kWidth) delta_columns<1>(head, at);
    for (; at < head.value_dim; ++at) delta_column(head, at);
}

}  // namespace
