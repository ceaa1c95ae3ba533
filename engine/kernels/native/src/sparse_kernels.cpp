// The experts of a layer with the norm, the router and the residual around them, for one token.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <vector>

#include "dispatch.h"
#include "experts_call.h"
#include "rows.h"

namespace {

struct SparseStep {
    const SwitchyardSparseBlock *block;
    ExpertsCall call;
    SwitchyardMatrix router;
    std::vector<uint16_t> normed;  // [hidden]
    Vectors normed_bf16;           // for the router, which is never quantised
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
          router(blocks_of(step.router), threads, 1),
          choice(1, threads),
          experts(step.call, step.block->top_k, step.block->top_k, threads) {}
};

void router_blocks(SparseStep &step, int64_t begin, int64_t end) {
    const int32_t first = 0;
    for (int64_t block = begin; block < end; ++block) {
        float dots[kTileRows];
        block_dot(step.call.kernels, step.router, block, step.normed_bf16, &first, 1, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, step.router.rows - row);
        for (int64_t i = 0; i < rows; ++i) step.logits[row + i] = round_bf16(dots[i]);
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
    step.call.visits.group(count, 1, k, step.chosen, step.shares);
}

void sparse_work(void *argument) {
    auto &run = *static_cast<SparseRun *>(argument);
    auto &step = run.step;
    const auto &block = *step.block;
    run.norm.run([&](int64_t, int64_t) {
        rms_norm(step.call.residual, block.norm, block.epsilon, block.experts.hidden, step.normed.data());
        step.normed_bf16.set(step.call.kernels, 0, step.normed.data());
        step.call.x.set(step.call.kernels, 0, step.normed.data());
    });
    run.router.run([&](int64_t begin, int64_t end) { router_blocks(step, begin, end); });
    run.choice.run([&](int64_t, int64_t) { choose_experts(step); });
    run.experts.work();
}

}  // namespace

SWITCHYARD_API int32_t switchyard_sparse_step(SwitchyardPool *pool, const SwitchyardSparseBlock *block,
                                              const uint16_t *hidden, int64_t *chosen, float *shares,
                                              uint16_t *out) try {
    static thread_local SparseStep step;
    const auto &layer = block->experts;
    step.block = block;
    step.router = {block->router, nullptr, nullptr, layer.count, layer.hidden, SWITCHYARD_BF16, SWITCHYARD_PLAIN};
    step.chosen = chosen;
    step.shares = shares;
    step.normed.resize(static_cast<size_t>(layer.hidden));
    step.normed_bf16.resize(SWITCHYARD_BF16, 1, layer.hidden);
    step.logits.resize(static_cast<size_t>(layer.count));
    step.order.resize(static_cast<size_t>(layer.count));
    step.call.begin(&layer, 1, hidden, out);
    step.call.reserve(block->top_k);
    SparseRun run(step, pool->threads());
    pool->run(sparse_work, &run, block->top_k * step.call.expert_bytes() + bytes_of(step.router));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
