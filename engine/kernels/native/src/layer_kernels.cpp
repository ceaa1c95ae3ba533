// One call per MoE layer, one per linear layer: the work is cut into equal runs of rows over the pool's threads.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <vector>

#include "dispatch.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

// A token that wants an expert, and with which weight.
struct Visit {
    int32_t token;
    float weight;
};

struct ExpertsCall {
    const SwitchyardExperts *layer;
    const KernelSet *kernels;
    int32_t tokens;
    int64_t hidden_padded, inner_padded;
    std::vector<int32_t> active;       // experts that are wanted, each once
    std::vector<int32_t> first_visit;  // [active + 1] into visits
    std::vector<Visit> visits;
    std::vector<float> spread_x;   // [tokens, hidden_padded]
    std::vector<float> inner;      // [visits, inner]: silu(gate) * up
    std::vector<float> spread_in;  // [visits, inner_padded]
    uint16_t *out;
};

// The three steps of a layer, gone through by all threads together.
struct ExpertsRun {
    ExpertsCall &call;
    Phase gate_up, spreading, down;

    ExpertsRun(ExpertsCall &call, int threads)
        : call(call),
          gate_up(static_cast<int64_t>(call.active.size()) * call.layer->inner, threads),
          spreading(static_cast<int64_t>(call.visits.size()), threads),
          down((call.layer->hidden + 1) / 2, threads) {}
};

constexpr int64_t padded(int64_t n) { return (n + 31) & ~int64_t{31}; }

inline const uint16_t *matrix(const SwitchyardExperts &layer, int32_t expert, int64_t offset) {
    return reinterpret_cast<const uint16_t *>(layer.records + expert * layer.stride + offset);
}

// Rows [begin, end) of all active experts' gate and up, one after the other.
void gate_up_rows(ExpertsCall &call, int64_t begin, int64_t end) {
    const auto &layer = *call.layer;
    const int64_t inner = layer.inner, hidden = layer.hidden;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t which = item / inner, row = item % inner;
        const uint16_t *gate = matrix(layer, call.active[which], layer.gate_up_offset) + row * hidden;
        for (int32_t v = call.first_visit[which]; v < call.first_visit[which + 1]; ++v) {
            float g, u;
            call.kernels->dot_pair(gate, gate + inner * hidden, &call.spread_x[call.visits[v].token * call.hidden_padded],
                                   hidden, &g, &u);
            g = round_bf16(g);
            g = round_bf16(g / (1.0f + std::exp(-g)));
            call.inner[v * inner + row] = round_bf16(g * round_bf16(u));
        }
    }
}

// Pairs of rows of the result: no two threads write the same one, and each sum is in the experts' order.
void down_row_pairs(ExpertsCall &call, int64_t begin, int64_t end) {
    const auto &layer = *call.layer;
    const int64_t inner = layer.inner, hidden = layer.hidden, active = static_cast<int64_t>(call.active.size());
    static thread_local std::vector<float> sums;
    for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t row = 2 * pair, other = std::min(row + 1, hidden - 1);
        sums.assign(static_cast<size_t>(call.tokens) * 2, 0.0f);
        for (int64_t which = 0; which < active; ++which) {
            const uint16_t *down = matrix(layer, call.active[which], layer.down_offset);
            for (int32_t v = call.first_visit[which]; v < call.first_visit[which + 1]; ++v) {
                float a, b;
                call.kernels->dot_pair(down + row * inner, down + other * inner, &call.spread_in[v * call.inner_padded],
                                       inner, &a, &b);
                const Visit visit = call.visits[v];
                sums[2 * visit.token] += visit.weight * round_bf16(a);
                sums[2 * visit.token + 1] += visit.weight * round_bf16(b);
            }
        }
        for (int32_t token = 0; token < call.tokens; ++token) {
            call.out[token * hidden + row] = to_bf16(sums[2 * token]);
            if (other != row) call.out[token * hidden + other] = to_bf16(sums[2 * token + 1]);
        }
    }
}

void experts_work(void *argument) {
    auto &run = *static_cast<ExpertsRun *>(argument);
    auto &call = run.call;
    const int64_t inner = call.layer->inner;
    run.gate_up.run([&](int64_t begin, int64_t end) { gate_up_rows(call, begin, end); });
    run.spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t v = begin; v < end; ++v)
            call.kernels->spread_floats(&call.inner[v * inner], inner, &call.spread_in[v * call.inner_padded]);
    });
    run.down.run([&](int64_t begin, int64_t end) { down_row_pairs(call, begin, end); });
}

// Sorts the visits by expert, so that a row of weights is read once for all tokens that want it.
void group_visits(ExpertsCall &call, int32_t k, const int64_t *index, const float *weights) {
    const int32_t count = call.layer->count;
    std::vector<int32_t> tally(static_cast<size_t>(count), 0);
    for (int64_t i = 0; i < int64_t{call.tokens} * k; ++i)
        if (index[i] >= 0 && index[i] < count) ++tally[index[i]];
    call.active.clear();
    call.first_visit.assign(1, 0);
    for (int32_t expert = 0; expert < count; ++expert) {
        if (tally[expert] == 0) continue;
        const int32_t begin = call.first_visit.back();
        call.active.push_back(expert);
        call.first_visit.push_back(begin + tally[expert]);
        tally[expert] = begin;
    }
    call.visits.resize(call.first_visit.back());
    for (int64_t i = 0; i < int64_t{call.tokens} * k; ++i)
        if (index[i] >= 0 && index[i] < count)
            call.visits[tally[index[i]]++] = {static_cast<int32_t>(i / k), weights[i]};
}

struct LinearCall {
    const KernelSet *kernels;
    const uint16_t *weight;
    int64_t rows, columns;
    const float *spread_x;
    const uint16_t *bias;
    uint16_t *out;
    Phase row_pairs;
};

void linear_work(void *argument) {
    auto &call = *static_cast<LinearCall *>(argument);
    call.row_pairs.run([&](int64_t begin, int64_t end) {
        for (int64_t pair = begin; pair < end; ++pair) {
            const int64_t row = 2 * pair, other = std::min(row + 1, call.rows - 1);
            float a, b;
            call.kernels->dot_pair(call.weight + row * call.columns, call.weight + other * call.columns, call.spread_x,
                                   call.columns, &a, &b);
            if (call.bias) {
                a += from_bf16(call.bias[row]);
                b += from_bf16(call.bias[other]);
            }
            call.out[row] = to_bf16(a);
            if (other != row) call.out[other] = to_bf16(b);
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_experts_bf16(SwitchyardPool *pool, const SwitchyardExperts *experts, int32_t tokens,
                                               int32_t k, const uint16_t *x, const int64_t *index, const float *weights,
                                               uint16_t *out) try {
    // One call at a time per thread; the buffers live on, because allocating per layer would cost as much as a layer.
    static thread_local ExpertsCall call;
    call.layer = experts;
    call.kernels = &kernels_in_use();
    call.tokens = tokens;
    call.hidden_padded = padded(experts->hidden);
    call.inner_padded = padded(experts->inner);
    call.out = out;
    group_visits(call, k, index, weights);
    call.spread_x.resize(static_cast<size_t>(tokens) * call.hidden_padded);
    call.inner.resize(call.visits.size() * experts->inner);
    call.spread_in.resize(call.visits.size() * call.inner_padded);
    for (int32_t token = 0; token < tokens; ++token)
        call.kernels->spread(x + int64_t{token} * experts->hidden, experts->hidden,
                             &call.spread_x[token * call.hidden_padded]);
    ExpertsRun run(call, pool->threads());
    pool->run(experts_work, &run,
              static_cast<int64_t>(call.active.size()) * 3 * experts->hidden * experts->inner * sizeof(uint16_t));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}

SWITCHYARD_API int32_t switchyard_linear_bf16(SwitchyardPool *pool, const uint16_t *weight, int64_t rows,
                                              int64_t columns, const uint16_t *x, const uint16_t *bias,
                                              uint16_t *out) try {
    static thread_local std::vector<float> spread_x;
    spread_x.resize(static_cast<size_t>(padded(columns)));
    const KernelSet &kernels = kernels_in_use();
    kernels.spread(x, columns, spread_x.data());
    LinearCall call = {&kernels, weight, rows, columns, spread_x.data(), bias, out,
                       Phase((rows + 1) / 2, pool->threads())};
    pool->run(linear_work, &call, rows * columns * static_cast<int64_t>(sizeof(uint16_t)));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
