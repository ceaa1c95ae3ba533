// The experts of a layer with the norm, the router and the residual around them, for one token.
#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "dispatch.h"
#include "experts_call.h"
#include "routing.h"
#include "rows.h"
#include "shared_expert.h"

namespace {

struct SparseStep {
    const SwitchyardSparseBlock *block;
    ExpertsCall call;
    SwitchyardMatrix router;
    std::vector<uint16_t> normed;  // [hidden]
    Vectors normed_bf16;           // for the router, which is never quantised
    Routing routing;
    SharedExpert shared;
    int64_t *chosen;
    float *shares;
};

struct SparseRun {
    SparseStep &step;
    Phase norm, router, choice;
    SharedExpertRun shared;
    ExpertsRun experts;

    SparseRun(SparseStep &step, int threads)
        : step(step),
          norm(1, threads),
          router(blocks_of(step.router), threads, 1),
          choice(1, threads),
          shared(step.shared, threads),
          experts(step.call, step.block->router.top_k, step.block->router.top_k, threads) {}
};

void router_blocks(SparseStep &step, int64_t begin, int64_t end) {
    const int32_t first = 0;
    for (int64_t block = begin; block < end; ++block) {
        float dots[kTileRows];
        block_dot(step.call.kernels, step.router, block, step.normed_bf16, &first, 1, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, step.router.rows - row);
        const auto &router = step.block->router;
        for (int64_t i = 0; i < rows; ++i) {
            const float logit = dots[i] + (router.bias ? from_bf16(router.bias[row + i]) : 0.0f);
            step.routing.logits[row + i] = router.bf16_logits ? round_bf16(logit) : logit;
        }
    }
}

void choose_experts(SparseStep &step) {
    step.routing.choose(step.block->router, step.chosen, step.shares);
    step.call.visits.group(step.block->experts.count, 1, step.block->router.top_k, step.chosen, step.shares);
}

void sparse_work(void *argument) {
    auto &run = *static_cast<SparseRun *>(argument);
    auto &step = run.step;
    const auto &block = *step.block;
    run.norm.run([&](int64_t, int64_t) {
        rms_norm(step.call.residual, block.norm, block.epsilon, block.experts.hidden, step.normed.data(),
                 block.norm_rounds_once);
        step.normed_bf16.set(step.call.kernels, 0, step.normed.data());
        step.call.x.set(step.call.kernels, 0, step.normed.data());
        if (step.shared.exists()) step.shared.x.set(step.call.kernels, 0, step.normed.data());
    });
    run.router.run([&](int64_t begin, int64_t end) { router_blocks(step, begin, end); });
    run.choice.run([&](int64_t, int64_t) { choose_experts(step); });
    run.shared.work(step.normed.data());
    run.experts.work();
}

}  // namespace

SWITCHYARD_API int32_t switchyard_sparse_step(SwitchyardPool *pool, const SwitchyardSparseBlock *block,
                                              const uint16_t *hidden, int64_t *chosen, float *shares,
                                              uint16_t *out) try {
    static thread_local SparseStep step;
    const auto &layer = block->experts;
    step.block = block;
    step.router = {block->router.weight, nullptr,         nullptr,         nullptr, layer.count,
                   layer.hidden,         SWITCHYARD_BF16, SWITCHYARD_PLAIN};
    step.chosen = chosen;
    step.shares = shares;
    step.normed.resize(static_cast<size_t>(layer.hidden));
    step.normed_bf16.resize(SWITCHYARD_BF16, 1, layer.hidden);
    step.routing.resize(layer.count);
    step.call.begin(&layer, 1, hidden, out);
    step.call.reserve(block->router.top_k);
    step.shared.begin(block, step.call.kernels);
    if (step.shared.exists()) step.call.addend = step.shared.out.data();
    SparseRun run(step, pool->threads());
    pool->run(sparse_work, &run,
              block->router.top_k * step.call.expert_bytes() + bytes_of(step.router) + step.shared.bytes());
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
