// The experts of a layer in one call, alone or with the norm, the router and the residual around them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <vector>

#include "dispatch.h"
#include "rows.h"
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
    const uint16_t *residual;      // [tokens, hidden] to add to the result, or null
    uint16_t *out;
};

// The three steps of a layer, gone through by all threads together.
struct ExpertsRun {
    ExpertsCall &call;
    Phase gate_up, spreading, down;

    ExpertsRun(ExpertsCall &call, int64_t active, int64_t visits, int threads)
        : call(call),
          gate_up(active * call.layer->inner, threads),
          spreading(visits, threads),
          down((call.layer->hidden + 1) / 2, threads) {}
};

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
            for (int64_t place : {row, other}) {
                float sum = sums[2 * token + (place - row)];
                const int64_t at = token * hidden + place;
                if (call.residual) sum = from_bf16(call.residual[at]) + round_bf16(sum);
                call.out[at] = to_bf16(sum);
            }
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

struct SparseStep {
    const SwitchyardSparseBlock *block;
    ExpertsCall call;
    std::vector<uint16_t> normed;  // [hidden]
    std::vector<float> logits;     // [experts]
    std::vector<int32_t> order;
    int64_t *chosen;
    float *shares;
};

struct SparseRun {
    SparseStep &step;
    Phase norm, router, choice;
    ExpertsRun experts;

    SparseRun(SparseStep &step, int threads)
        : step(step),
          norm(1, threads),
          router((step.block->experts.count + 1) / 2, threads),
          choice(1, threads),
          experts(step.call, step.block->top_k, step.block->top_k, threads) {}
};

void router_row_pairs(SparseStep &step, int64_t begin, int64_t end) {
    const auto &layer = step.block->experts;
    for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t row = 2 * pair, other = std::min<int64_t>(row + 1, layer.count - 1);
        float a, b;
        step.call.kernels->dot_pair(step.block->router + row * layer.hidden, step.block->router + other * layer.hidden,
                                    step.call.spread_x.data(), layer.hidden, &a, &b);
        step.logits[row] = round_bf16(a);
        step.logits[other] = round_bf16(b);
    }
}

// Softmax in fp32, the k likeliest, their weights made to sum to 1 if the family does so.
void choose_experts(SparseStep &step) {
    const auto &block = *step.block;
    const int32_t count = block.experts.count, k = block.top_k;
    const float top = *std::max_element(step.logits.begin(), step.logits.end());
    float total = 0;
    for (float &logit : step.logits) total += logit = std::exp(logit - top);
    for (float &logit : step.logits) logit /= total;
    for (int32_t expert = 0; expert < count; ++expert) step.order[expert] = expert;
    std::partial_sort(step.order.begin(), step.order.begin() + k, step.order.end(), [&](int32_t a, int32_t b) {
        return step.logits[a] > step.logits[b] || (step.logits[a] == step.logits[b] && a < b);
    });
    float kept = 0;
    for (int32_t i = 0; i < k; ++i) kept += step.logits[step.order[i]];
    for (int32_t i = 0; i < k; ++i) {
        step.chosen[i] = step.order[i];
        const float share = step.logits[step.order[i]] / (block.normalise ? kept : 1.0f);
        step.shares[i] = block.bf16_shares ? round_bf16(share) : share;
    }
    group_visits(step.call, k, step.chosen, step.shares);
}

void sparse_work(void *argument) {
    auto &run = *static_cast<SparseRun *>(argument);
    auto &step = run.step;
    const auto &block = *step.block;
    run.norm.run([&](int64_t, int64_t) {
        rms_norm(step.call.residual, block.norm, block.epsilon, block.experts.hidden, step.normed.data());
        step.call.kernels->spread(step.normed.data(), block.experts.hidden, step.call.spread_x.data());
    });
    run.router.run([&](int64_t begin, int64_t end) { router_row_pairs(step, begin, end); });
    run.choice.run([&](int64_t, int64_t) { choose_experts(step); });
    experts_work(&run.experts);
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
    call.residual = nullptr;
    call.out = out;
    group_visits(call, k, index, weights);
    call.spread_x.resize(static_cast<size_t>(tokens) * call.hidden_padded);
    call.inner.resize(call.visits.size() * experts->inner);
    call.spread_in.resize(call.visits.size() * call.inner_padded);
    for (int32_t token = 0; token < tokens; ++token)
        call.kernels->spread(x + int64_t{token} * experts->hidden, experts->hidden,
                             &call.spread_x[token * call.hidden_padded]);
    ExpertsRun run(call, static_cast<int64_t>(call.active.size()), static_cast<int64_t>(call.visits.size()),
                   pool->threads());
    pool->run(experts_work, &run,
              static_cast<int64_t>(call.active.size()) * 3 * experts->hidden * experts->inner * sizeof(uint16_t));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}

SWITCHYARD_API int32_t switchyard_sparse_step_bf16(SwitchyardPool *pool, const SwitchyardSparseBlock *block,
                                                   const uint16_t *hidden, int64_t *chosen, float *shares,
                                                   uint16_t *out) try {
    static thread_local SparseStep step;
    const auto &layer = block->experts;
    const size_t k = static_cast<size_t>(block->top_k);
    step.block = block;
    step.chosen = chosen;
    step.shares = shares;
    step.normed.resize(static_cast<size_t>(layer.hidden));
    step.logits.resize(static_cast<size_t>(layer.count));
    step.order.resize(static_cast<size_t>(layer.count));
    auto &call = step.call;
    call.layer = &layer;
    call.kernels = &kernels_in_use();
    call.tokens = 1;
    call.hidden_padded = padded(layer.hidden);
    call.inner_padded = padded(layer.inner);
    call.residual = hidden;
    call.out = out;
    call.spread_x.resize(static_cast<size_t>(call.hidden_padded));
    call.inner.resize(k * layer.inner);
    call.spread_in.resize(k * call.inner_padded);
    SparseRun run(step, pool->threads());
    pool->run(sparse_work, &run, (static_cast<int64_t>(k) * 3 * layer.inner + layer.count) * layer.hidden * 2);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
