#include "streams.h"

#include <algorithm>
#include <cmath>

#include "rows.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kNumbers = 1024;  // of a stream that a thread takes at once

float dot(const float *a, const float *b, int64_t n) {
    // As squares_of.
    float sums[16] = {};
    int64_t at = 0;
    for (; at + 16 <= n; at += 16)
        for (int64_t i = 0; i < 16; ++i) sums[i] += a[at + i] * b[at + i];
    float sum = 0;
    for (; at < n; ++at) sum += a[at] * b[at];
    for (float each : sums) sum += each;
    return sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// A matrix whose rows and columns sum to 1, as nearly as so many rounds bring it (Sinkhorn and Knopp 1967).
void balance(float *x, int64_t n, int32_t rounds, float epsilon) {
    const auto divide = [&](int64_t step, int64_t each) {  // lines of numbers `step` apart
        for (int64_t line = 0; line < n; ++line) {
            float sum = epsilon;
            for (int64_t i = 0; i < n; ++i) sum += x[line * each + i * step];
            for (int64_t i = 0; i < n; ++i) x[line * each + i * step] /= sum;
        }
    };
    for (int64_t row = 0; row < n; ++row) {
        float *own = x + row * n, total = 0;
        const float top = *std::max_element(own, own + n);
        for (int64_t i = 0; i < n; ++i) total += own[i] = std::exp(own[i] - top);
        for (int64_t i = 0; i < n; ++i) own[i] = own[i] / total + epsilon;
    }
    divide(n, 1);
    for (int32_t round = 1; round < rounds; ++round) {
        divide(1, n);
        divide(n, 1);
    }
}

}  // namespace

struct Streams::Run {
    Streams &own;
    const SwitchyardStreams *mix;
    const float *given;
    Phase products, weighing, sums;

    Run(Streams &own, const SwitchyardStreams *mix, const float *given, int threads)
        : own(own),
          mix(mix),
          given(given),
          products(mix ? own.tokens_ * rows(*mix) : 0, threads, 1),
          weighing(mix ? own.tokens_ : 0, threads, 1),
          sums(own.tokens_ * parts(own), threads, 1) {}

    static int64_t rows(const SwitchyardStreams &mix) { return int64_t{mix.streams} * (mix.rounds ? 2 + mix.streams : 1); }
    static int64_t parts(const Streams &own) { return (own.width_ + kNumbers - 1) / kNumbers; }
    // body(token, begin, end) of parts of a stream.
    template <class Body> void each_part(Body body) {
        const int64_t count = parts(own);
        sums.run([&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) {
                const int64_t from = item % count * kNumbers;
                body(item / count, from, std::min(from + kNumbers, own.width_));
            }
        });
    }
};

void Streams::begin(const float *hidden, int32_t count, int32_t tokens, int64_t width) {
    count_ = count;
    tokens_ = tokens;
    width_ = width;
    states_.resize(static_cast<size_t>(tokens * count * width));
    next_.resize(states_.size());
    sum_.resize(static_cast<size_t>(tokens * width));
    shares_.resize(static_cast<size_t>(tokens * (2 + count) * count));
    for (int64_t i = 0; i < tokens * int64_t{count}; ++i) std::copy_n(hidden + i / count * width, width, &states_[i * width]);
}

void Streams::weigh(const SwitchyardStreams &mix, int64_t token) {
    const int64_t n = count_, all = n * width_;
    float *shares = &shares_[token * (2 + n) * n];
    const float squares = squares_of(&states_[token * all], all) / static_cast<float>(all);
    const float length = 1.0f / std::sqrt(squares + mix.norm_epsilon);
    for (int64_t i = 0; i < (2 + n) * n; ++i) shares[i] *= length;
    for (int64_t i = 0; i < n; ++i) shares[i] = sigmoid(shares[i] * mix.scale[0] + mix.base[i]) + mix.epsilon;
    if (!mix.rounds) return;
    for (int64_t i = n; i < 2 * n; ++i) shares[i] = 2.0f * sigmoid(shares[i] * mix.scale[1] + mix.base[i]);
    for (int64_t i = 2 * n; i < (2 + n) * n; ++i) shares[i] = shares[i] * mix.scale[2] + mix.base[i];
    balance(shares + 2 * n, n, mix.rounds, mix.epsilon);
}

void Streams::collapse_work(void *argument) {
    auto &run = *static_cast<Run *>(argument);
    Streams &own = run.own;
    const SwitchyardStreams &mix = *run.mix;
    const int64_t n = own.count_, width = own.width_, all = n * width;
    run.products.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t token = item % own.tokens_, row = item / own.tokens_;
            own.shares_[token * (2 + n) * n + row] = dot(mix.mix + row * all, &own.states_[token * all], all);
        }
    });
    run.weighing.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) own.weigh(mix, token);
    });
    run.each_part([&](int64_t token, int64_t begin, int64_t end) {
        const float *states = &own.states_[token * all], *shares = &own.shares_[token * (2 + n) * n];
        float *sum = &own.sum_[token * width];
        for (int64_t i = begin; i < end; ++i) sum[i] = shares[0] * states[i];
        for (int64_t stream = 1; stream < n; ++stream)
            for (int64_t i = begin; i < end; ++i) sum[i] += shares[stream] * states[stream * width + i];
    });
}

void Streams::spread_work(void *argument) {
    auto &run = *static_cast<Run *>(argument);
    Streams &own = run.own;
    const int64_t n = own.count_, width = own.width_;
    run.each_part([&](int64_t token, int64_t begin, int64_t end) {
        const float *states = &own.states_[token * n * width], *shares = &own.shares_[token * (2 + n) * n];
        const float *post = shares + n, *matrix = shares + 2 * n, *sum = &own.sum_[token * width];
        const float *given = run.given + token * width;
        for (int64_t to = 0; to < n; ++to) {
            float *next = &own.next_[(token * n + to) * width];
            for (int64_t i = begin; i < end; ++i) next[i] = post[to] * (given[i] - sum[i]);
            for (int64_t from = 0; from < n; ++from)
                for (int64_t i = begin; i < end; ++i) next[i] += matrix[from * n + to] * states[from * width + i];
        }
    });
}

const float *Streams::collapse(SwitchyardPool *pool, const SwitchyardStreams &mix) {
    Run run(*this, &mix, nullptr, pool->threads());
    pool->run(collapse_work, &run, Run::rows(mix) * count_ * width_ * 4);
    return sum_.data();
}

void Streams::spread(SwitchyardPool *pool, const float *given) {
    Run run(*this, nullptr, given, pool->threads());
    pool->run(spread_work, &run, tokens_ * count_ * width_ * 4);
    states_.swap(next_);
}
