// The gated delta rule (Yang et al. 2024, "Gated Delta Networks", equation 10), and the short convolutions and gates around
// it, in the target's registers.
//
// Token by token, in prompts too: with as many columns of the state as the first cache holds, that takes fewer operations
// than the rule's form for chunks of tokens, which is made for units that multiply matrices.
#pragma once
#include <cmath>

#include "attend.h"
#include "attend_lanes.h"

namespace {

constexpr int64_t kRowsAhead = 16;   // of a state, which memory delivers while others are computed
constexpr int64_t kLocalKeys = 128;  // rows of a state that have a place of their own

// What tokens [from the first to the last) make of the columns [at, at + count * kWidth) of the state.  Rows of a state lie a
// power of two apart, so that few of them stay in the first cache: they are kept side by side meanwhile, in `local`, or
// where they are if there is no room.
template <int count> void delta_columns(const DeltaHead &head, int64_t at, float *local) {
    const int64_t step = head.value_dim, local_step = local ? count * kWidth : step;
    float *const state = head.state + at, *const kept = local ? local : state;
    for (int64_t token = 0; token < head.tokens; ++token) {
        const int64_t place = token * head.step;
        const float *keys = head.key + place, *queries = head.query + place, *decays = head.decay + token * head.key_dim;
        V found[count];
        repeat<count>([&](auto i) { found[i] = all(0.0f); });
        if (token == 0) {
            const float *row = head.before + at;
            float *to = kept;
            for (int64_t k = 0; k < head.key_dim; ++k, row += step, to += local_step) {
                repeat<count>([&](auto i) { prefetch(row + kRowsAhead * step + i * kWidth); });
                const V key = all(keys[k] * decays[k]);
                repeat<count>([&](auto i) {
                    const V held = load(row + i * kWidth);
                    found[i] = fma(held, key, found[i]);
                    store(to + i * kWidth, held);
                });
            }
        } else {
            const float *row = kept;
            for (int64_t k = 0; k < head.key_dim; ++k, row += local_step) {
                const V key = all(keys[k] * decays[k]);
                repeat<count>([&](auto i) { found[i] = fma(load(row + i * kWidth), key, found[i]); });
            }
        }
        V change[count], out[count];
        repeat<count>([&](auto i) {
            change[i] = multiply(subtract(load(head.value + place + at + i * kWidth), found[i]), all(head.beta[token]));
            out[i] = all(0.0f);
        });
        const bool is_last = token + 1 == head.tokens;
        const float *next = keys + head.step, *asked = queries + head.step;
        const float *row = kept;
        float *to = is_last ? state : kept;
        const int64_t to_step = is_last ? step : local_step;
        for (int64_t k = 0; k < head.key_dim; ++k, row += local_step, to += to_step) {
            if (!is_last && k % 16 == 0) prefetch(next + k), prefetch(asked + k);
            const V key = all(keys[k]), query = all(queries[k]), decay = all(decays[k]);
            repeat<count>([&](auto i) {
                const V now = fma(change[i], key, multiply(load(row + i * kWidth), decay));
                store(to + i * kWidth, now);
                out[i] = fma(now, query, out[i]);
            });
        }
        repeat<count>([&](auto i) { store(head.out + token * head.out_step + at + i * kWidth, out[i]); });
    }
}

void delta_column(const DeltaHead &head, int64_t token, int64_t at) {
    const int64_t step = head.value_dim, place = token * head.step;
    const float *key = head.key + place, *query = head.query + place, *decay = head.decay + token * head.key_dim;
    const float *before = token ? head.state : head.before;
    float found = 0, out = 0;
    for (int64_t k = 0; k < head.key_dim; ++k) found += before[k * step + at] * (key[k] * decay[k]);
    const float change = (head.value[place + at] - found) * head.beta[token];
    for (int64_t k = 0; k < head.key_dim; ++k) {
        const float now = before[k * step + at] * decay[k] + change * key[k];
        head.state[k * step + at] = now;
        out += now * query[k];
    }
    head.out[token * head.out_step + at] = out;
}

void delta_rule(const DeltaHead &head) {
    constexpr int together = 4;
    alignas(64) float room[kLocalKeys * together * kWidth];
    float *const local = head.key_dim <= kLocalKeys ? room : nullptr;
    int64_t at = 0;
    for (; at + together * kWidth <= head.value_dim; at += together * kWidth) delta_columns<together>(head, at, local);
    for (; at + kWidth <= head.value_dim; at += kWidth) delta_columns<1>(head, at, local);
    for (; at < head.value_dim; ++at)
        for (int64_t token = 0; token < head.tokens; ++token) delta_column(head, token, at);
}

// What tokens make of rows [at, at + count) of a state of Mamba 2: each decays, and takes in the key times the row's value.
template <int count> void space_rows(const DeltaHead &head, int64_t at) {
    const int64_t dim = head.key_dim, whole = dim / kWidth * kWidth;
    float *const to = head.state + at * dim;
    for (int64_t token = 0; token < head.tokens; ++token) {
        const int64_t place = token * head.step;
        const float *key = head.key + place, *query = head.query + place, decay = head.decay[token];
        const float *from = token ? to : head.before + at * dim;
        float *out = head.out + token * head.out_step + at;
        float taken[count];
        V sums[count];
        repeat<count>([&](auto i) {
            taken[i] = head.value[place + at + i] * head.beta[token];
            sums[i] = all(0.0f);
        });
        for (int64_t k = 0; k < whole; k += kWidth) {
            const V keys = load(key + k), queries = load(query + k);
            repeat<count>([&](auto i) {
                const V now = fma(all(taken[i]), keys, multiply(load(from + i * dim + k), all(decay)));
                store(to + i * dim + k, now);
                sums[i] = fma(now, queries, sums[i]);
            });
        }
        repeat<count>([&](auto i) {
            float sum = sum_of(sums[i]);
            for (int64_t k = whole; k < dim; ++k) {
                const float now = from[i * dim + k] * decay + taken[i] * key[k];
                to[i * dim + k] = now;
                sum += now * query[k];
            }
            out[i] = sum;
        });
    }
}

void state_space(const DeltaHead &head) {
    constexpr int together = 4;
    int64_t at = 0;
    for (; at + together <= head.value_dim; at += together) space_rows<together>(head, at);
    for (; at < head.value_dim; ++at) space_rows<1>(head, at);
}

constexpr int64_t kMostTaps = 8;
constexpr int kChannels = 8;  // vectors of channels that go through tokens together: a token's lie side by side

// Channels from `at` on, up to kChannels vectors.  kernel: 0 if it is not known when this is compiled.
template <int known> void convolve_channels(const Convolution &c, int64_t at) {
    constexpr int64_t room = kChannels * kWidth;
    const int64_t kernel = known ? known : c.kernel, width = c.count - at < room ? c.count - at : room;
    alignas(64) float lines[kMostTaps][room] = {}, weights[kMostTaps][room] = {}, few[room] = {}, biases[room] = {};
    for (int64_t i = 0; i < kernel; ++i)
        for (int64_t lane = 0; lane < width; ++lane) {
            lines[i][lane] = c.before[(at + lane) * kernel + i];
            weights[i][lane] = c.taps[i * c.taps_step + at + lane];
        }
    const auto bytes = static_cast<size_t>(width) * sizeof(float);
    if (c.bias) std::memcpy(biases, c.bias + at, bytes);
    const int64_t vectors = (width + kWidth - 1) / kWidth;
    for (int64_t token = 0; token < c.tokens; ++token) {
        // The line that went in first gives its place to the newest.
        float *const newest = lines[token % kernel];
        std::memcpy(newest, c.x + token * c.x_step + at, bytes);
        for (int64_t v = 0; v < vectors; ++v) {
            V sum = load(biases + v * kWidth);
            for (int64_t i = 0; i < kernel; ++i) {
                const int64_t line = token + 1 + i;
                sum = fma(load(weights[i] + v * kWidth), load(lines[line % kernel] + v * kWidth), sum);
            }
            store(few + v * kWidth, c.is_linear ? sum : multiply(sum, sigmoid(sum)));
        }
        std::memcpy(c.out + token * c.out_step + at, few, bytes);
    }
    for (int64_t i = 0; i < kernel; ++i)
        for (int64_t lane = 0; lane < width; ++lane)
            c.recent[(at + lane) * kernel + i] = lines[(c.tokens + i) % kernel][lane];
}

void convolve_all(const Convolution &c) {
    for (int64_t at = 0; at < c.count; at += kChannels * kWidth)
        c.kernel == 4 ? convolve_channels<4>(c, at) : convolve_channels<0>(c, at);
}

// A row of vectors, whatever is left over of it: change(values of x, values of y).
template <class Change> void change_rows(const float *x, const float *y, int64_t n, float *out, Change change) {
    for (int64_t at = 0; at < n; at += kWidth) {
        float some[2][kWidth] = {};
        const auto bytes = static_cast<size_t>(n - at < kWidth ? n - at : kWidth) * sizeof(float);
        std::memcpy(some[0], x + at, bytes);
        std::memcpy(some[1], y + at, bytes);
        store(some[0], change(load(some[0]), load(some[1])));
        std::memcpy(out + at, some[0], bytes);
    }
}

void gate_all(const float *x, const float *gate, int64_t n, bool twice, float *out) {
    change_rows(x, gate, n, out, [twice](V value, V by) {
        const V open = sigmoid(by);
        return multiply(value, twice ? multiply(by, open) : open);
    });
}

void decay_all(const float *x, const float *bias, float rate, int64_t n, float *out) {
    change_rows(x, bias, n, out, [rate](V value, V more) {
        // softplus(v) = max(v, 0) + log(1 + e to the power of -|v|), whose logarithm is 2 atanh(e / (2 + e)).
        const V v = add(value, more), less = subtract(all(0.0f), v), e = exponential(subtract(all(0.0f), larger(v, less)));
        const V s = divide(e, add(e, all(2.0f))), t = multiply(s, s);
        V sum = all(1.0f / 13);
        for (const float part : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = fma(sum, t, all(part));
        const V soft = fma(multiply(s, all(2.0f)), sum, unless_below(v, v, 0.0f));
        return exponential(multiply(soft, all(rate)));
    });
}

}  // namespace
