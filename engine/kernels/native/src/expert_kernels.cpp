// The experts of a layer in one call.
#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "activation.h"
#include "dispatch.h"
#include "experts_call.h"
#include "many_experts.h"
#include "many_kernels.h"

namespace {

// Where parts of an expert begin that lie `step` bytes apart, or where `scattered` says, `step` starts further on.
const uint8_t *base_of(const SwitchyardExperts &layer, int32_t expert, int64_t step) {
    return layer.scattered ? layer.scattered[expert + step] : layer.records + expert * step;
}

SwitchyardMatrix matrix(const SwitchyardExperts &layer, int32_t expert, const SwitchyardRecordPart &part, int64_t rows,
                        int64_t columns, int32_t pairing) {
    const uint8_t *record = base_of(layer, expert, part.step);
    const bool has_second = part.format == SWITCHYARD_BLOCKS && part.second_type >= 0;
    return {record + part.weights,
            part.scales < 0 ? nullptr : reinterpret_cast<const uint16_t *>(record + part.scales),
            part.zeros < 0 ? nullptr : record + part.zeros,
            part.table < 0 ? nullptr : reinterpret_cast<const int8_t *>(record + part.table),
            rows, columns, part.format, pairing,
            has_second ? base_of(layer, expert, part.second_step) + part.second : nullptr, nullptr, part.type, part.second_type};
}

// Blocks [begin, end) of all active experts' first matrices, one after the other.
void first_blocks(ExpertsCall &call, int64_t begin, int64_t end) {
    static thread_local std::vector<float> dots;
    const auto &layer = *call.layer;
    const int64_t inner = layer.inner, per_expert = call.inner_blocks(), per_block = call.inner_block();
    const int64_t all = static_cast<int64_t>(call.visits.active.size()) * per_expert;
    for (int64_t item = begin; item < std::min(end, all); ++item) {
        const int64_t which = item / per_expert, block = item % per_expert;
        const int32_t expert = call.visits.active[which], first = call.visits.first[which];
        const int64_t count = call.visits.first[which + 1] - first;
        const SwitchyardMatrix weights = call.first_matrix(expert);
        const uint16_t *bias = call.bias(expert, layer.first);
        const RowOrder order(weights);
        dots.resize(static_cast<size_t>(count * kTileRows));
        block_dot(call.kernels, weights, block, call.x, &call.visits.token[first], count, dots.data());
        const int64_t rows = std::min(per_block, inner - block * per_block);
        float biases[kTileRows] = {};
        if (bias)
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t row = block * order.block + i * order.step;
                biases[i] = from_bf16(bias[row]);
                if (layer.pairing != SWITCHYARD_PLAIN) biases[kHalfRows + i] = from_bf16(bias[row + order.partner]);
            }
        call.kernels.many[layer.first.format]->activate(layer, biases, count, dots.data());
        for (int64_t v = 0; v < count; ++v)
            std::copy_n(&dots[v * kTileRows], rows, &call.inner[(first + v) * inner + block * per_block]);
    }
}

// Blocks [begin, end) of all active experts' down matrices, one after the other: memory is read in long runs.
void down_blocks(ExpertsCall &call, int64_t begin, int64_t end) {
    static thread_local std::vector<float> dots;
    const auto &layer = *call.layer;
    const Rounding round = {layer.down.format == SWITCHYARD_BF16};
    const int64_t per_expert = call.down_block_count();
    const int64_t all = static_cast<int64_t>(call.visits.active.size()) * per_expert;
    for (int64_t item = begin; item < std::min(end, all); ++item) {
        const int64_t which = item / per_expert, block = item % per_expert, row = block * kTileRows;
        const int64_t rows = std::min(kTileRows, layer.hidden - row);
        const int32_t first = call.visits.first[which];
        const int64_t count = call.visits.first[which + 1] - first;
        dots.resize(static_cast<size_t>(count * kTileRows));
        block_dot(call.kernels, call.down_matrix(call.visits.active[which]), block, call.activated, &call.one_by_one[first],
                  count, dots.data());
        const uint16_t *bias = call.bias(call.visits.active[which], layer.down);
        for (int64_t v = 0; v < count; ++v) {
            const float *dot = &dots[v * kTileRows];
            float *output = call.outputs[static_cast<size_t>(first + v)] + row;
            if (bias)
                for (int64_t i = 0; i < rows; ++i) output[i] = round(dot[i] + from_bf16(bias[row + i]));
            else
                for (int64_t i = 0; i < rows; ++i) output[i] = round(dot[i]);
        }
    }
}

// Blocks of rows of the result: each sum is in the experts' order.
void sum_blocks(ExpertsCall &call, int64_t begin, int64_t end) {
    static thread_local std::vector<float> sums;
    const auto &layer = *call.layer;
    const int64_t from = begin * kTileRows, rows = std::min(end * kTileRows, int64_t{layer.hidden}) - from;
    sums.assign(static_cast<size_t>(call.tokens * rows), 0.0f);
    for (int64_t v = 0; v < call.visits.count(); ++v) {
        float *sum = &sums[call.visits.token[v] * rows];
        const float *output = call.outputs[static_cast<size_t>(v)] + from, weight = call.visits.weight[v];
        for (int64_t i = 0; i < rows; ++i) sum[i] += weight * output[i];
    }
    for (int32_t token = 0; token < call.tokens; ++token)
        for (int64_t i = 0; i < rows; ++i) {
            const float sum = sums[token * rows + i];
            const int64_t at = int64_t{token} * layer.hidden + from + i;
            const float whole = call.addend ? sum + call.addend[at] : sum;
            if (call.out)
                call.out[at] = to_bf16(whole);
            else
                call.sums[at] = call.apart ? whole : call.residual[at] + call.multiple * whole;
        }
}

void experts_work(void *argument) { static_cast<ExpertsRun *>(argument)->work(); }

}  // namespace

void ExpertsCall::begin(const SwitchyardExperts *experts, int32_t token_count, uint16_t *result) {
    begin(experts, token_count, nullptr, nullptr);
    out = result;
}

void ExpertsCall::begin(const SwitchyardExperts *experts, int32_t token_count, const float *add_to, float *result) {
    layer = experts;
    kernels = kernels_in_use();
    tokens = token_count;
    residual = add_to;
    addend = nullptr;
    sums = result;
    multiple = 1.0f;
    apart = false;
    out = nullptr;
    const SwitchyardMatrix first = first_matrix(0);
    x.resize({&first}, tokens, layer->hidden);
}

void ExpertsCall::reserve(int64_t count, float *rows) {
    inner.resize(static_cast<size_t>(count * layer->inner));
    if (rows == nullptr) {
        products.resize(static_cast<size_t>(count * layer->hidden));
        rows = products.data();
    }
    outputs.resize(static_cast<size_t>(count));
    for (auto &output : outputs) output = std::exchange(rows, rows + layer->hidden);
    const SwitchyardMatrix down = down_matrix(0);
    activated.resize({&down}, count, layer->inner);
    if (one_by_one.size() < static_cast<size_t>(count)) {
        one_by_one.resize(static_cast<size_t>(count));
        std::iota(one_by_one.begin(), one_by_one.end(), 0);
    }
}

SwitchyardMatrix ExpertsCall::first_matrix(int32_t expert) const {
    const int64_t rows = layer->pairing == SWITCHYARD_PLAIN ? layer->inner : 2 * int64_t{layer->inner};
    return matrix(*layer, expert, layer->first, rows, layer->hidden, layer->pairing);
}

SwitchyardMatrix ExpertsCall::down_matrix(int32_t expert) const {
    return matrix(*layer, expert, layer->down, layer->hidden, layer->inner, SWITCHYARD_PLAIN);
}

const uint16_t *ExpertsCall::bias(int32_t expert, const SwitchyardRecordPart &part) const {
    if (!part.has_bias) return nullptr;
    return reinterpret_cast<const uint16_t *>(base_of(*layer, expert, part.bias_step) + part.bias);
}

void ExpertsRun::add_up() {
    sums.run([&](int64_t begin, int64_t end) { sum_blocks(call, begin, end); });
}

void ExpertsRun::work_apart() {
    const int64_t inner = call.layer->inner;
    first.run([&](int64_t begin, int64_t end) { first_blocks(call, begin, end); });
    spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t v = begin; v < std::min(end, call.visits.count()); ++v)
            call.activated.set(call.kernels, v, &call.inner[v * inner]);
    });
    down.run([&](int64_t begin, int64_t end) { down_blocks(call, begin, end); });
}

int32_t experts_apart(SwitchyardPool *pool, const SwitchyardExperts &experts, int32_t count, const int32_t *ids,
                      const int32_t *row_of, const uint16_t *x, float *outputs) try {
    static thread_local ExpertsCall call;
    const int32_t rows = count ? *std::max_element(row_of, row_of + count) + 1 : 0;
    call.begin(&experts, rows, nullptr);
    call.visits.take(count, ids, row_of);
    call.reserve(call.visits.count(), outputs);
    for (int32_t row = 0; row < rows; ++row) call.x.set(call.kernels, row, x + int64_t{row} * experts.hidden);
    const auto active = static_cast<int64_t>(call.visits.active.size());
    ExpertsRun run(call, active, call.visits.count(), pool->threads());
    pool->run_all([](void *argument) { static_cast<ExpertsRun *>(argument)->work_apart(); }, &run);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}

SWITCHYARD_API int32_t switchyard_experts(SwitchyardPool *pool, const SwitchyardExperts *experts, int32_t tokens,
                                          int32_t k, const uint16_t *x, const int64_t *index, const float *weights,
                                          uint16_t *out) try {
    if (tokens > kDecodeTokens) {
        many_experts(*pool, *experts, tokens, k, x, index, weights, out);
        return 0;
    }
    // One call at a time per thread; the buffers live on, because allocating per layer would cost as much as a layer.
    static thread_local ExpertsCall call;
    call.begin(experts, tokens, out);
    call.visits.group(experts->count, tokens, k, index, weights);
    call.reserve(call.visits.count());
    for (int32_t token = 0; token < tokens; ++token)
        call.x.set(call.kernels, token, x + int64_t{token} * experts->hidden);
    const auto active = static_cast<int64_t>(call.visits.active.size());
    ExpertsRun run(call, active, call.visits.count(), pool->threads());
    pool->run(experts_work, &run, active * call.expert_bytes());
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
