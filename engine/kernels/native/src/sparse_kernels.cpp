// The experts of a layer with the norm, the router and the residual around them, for a few tokens.
#include <algorithm>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "dispatch.h"
#include "emulated_card.h"
#include "experts_call.h"
#include "routing.h"
#include "rows.h"
#include "shared_expert.h"
#include "stamps.h"

namespace {

struct SparseStep {
    const SwitchyardSparseBlock *block;
    ExpertsCall call;
    SwitchyardMatrix router;
    int32_t tokens;
    std::vector<int32_t> all;      // 0, 1, ..., tokens - 1
    std::vector<uint16_t> normed;  // [tokens, hidden]
    std::vector<uint16_t> others;  // [tokens, hidden]: the experts' norm, or the router's
    std::vector<float> exact;      // the router's
    Vectors normed_bf16;           // for the router, which is never quantised
    Routing routing[kDecodeTokens];
    SharedExpert shared;
    int64_t *chosen;
    float *shares;
    std::vector<const uint8_t *> found;  // of an emulated card: [experts] records of those with slots
    std::vector<float> joined;           // [tokens, hidden]: what a norm after it takes
    float *out;

    bool routes() const { return block->experts.count > 0; }
};

struct SparseRun {
    SparseStep &step;
    Phase norm, router, choice;
    SharedExpertRun shared;
    ExpertsRun experts;
    Phase after;

    SparseRun(SparseStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          router(blocks_of(step.router), threads, 1),
          choice(step.routes() ? 1 : 0, threads),
          shared(step.shared, threads),
          experts(step.call, most_active(step), step.tokens * int64_t{step.block->router.top_k}, threads),
          after(step.block->after_norm ? step.tokens : 0, threads, 1) {}

    // Not known before they are chosen: items beyond those that are there do nothing.
    static int64_t most_active(const SparseStep &step) {
        return std::min<int64_t>(step.tokens * int64_t{step.block->router.top_k}, step.block->experts.count);
    }
};

void router_blocks(SparseStep &step, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.call.kernels, step.router, block, step.normed_bf16, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, step.router.rows - row);
        const auto &router = step.block->router;
        for (int64_t token = 0; token < step.tokens; ++token)
            for (int64_t i = 0; i < rows; ++i) {
                const float dot = dots[token * kTileRows + i];
                const float logit = dot + (router.bias ? from_bf16(router.bias[row + i]) : 0.0f);
                step.routing[token].logits[row + i] = router.bf16_logits ? round_bf16(logit) : logit;
            }
    }
}

void choose_experts(SparseStep &step) {
    const auto &router = step.block->router;
    for (int64_t token = 0; token < step.tokens; ++token)
        step.routing[token].choose(router, token, step.chosen + token * router.top_k, step.shares + token * router.top_k);
    step.call.visits.group(step.block->experts.count, step.tokens, router.top_k, step.chosen, step.shares);
}

const uint16_t *norm_for_router(SparseStep &step, int64_t token) {
    const auto &block = *step.block;
    const int64_t hidden = block.experts.hidden;
    uint16_t *normed = &step.others[token * hidden];
    float *exact = &step.exact[token * hidden];
    rms_norm(step.call.residual + token * hidden, block.router.norm, block.epsilon, hidden, exact);
    for (int64_t i = 0; i < hidden; ++i) normed[i] = to_bf16(exact[i]);
    return normed;
}

const uint16_t *norm_for_experts(SparseStep &step, int64_t token) {
    const auto &block = *step.block;
    const int64_t hidden = block.experts.hidden;
    uint16_t *normed = &step.others[token * hidden];
    rms_norm(step.call.residual + token * hidden, block.experts_norm, block.epsilon, hidden, normed, block.norm_offset);
    return normed;
}

void route_work(void *argument) {
    auto &run = *static_cast<SparseRun *>(argument);
    auto &step = run.step;
    const auto &block = *step.block;
    run.norm.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t hidden = block.experts.hidden;
            uint16_t *normed = &step.normed[token * hidden];
            const float *x = step.call.residual + token * hidden;
            if (block.wide_norm)
                rms_norm(x, block.wide_norm, block.epsilon, hidden, normed);
            else
                rms_norm(x, block.norm, block.epsilon, hidden, normed, block.norm_offset);
            if (step.routes()) {
                step.normed_bf16.set(step.call.kernels, token, block.router.norm ? norm_for_router(step, token) : normed);
                step.call.x.set(step.call.kernels, token, block.experts_norm ? norm_for_experts(step, token) : normed);
            }
            if (step.shared.exists()) step.shared.x.set(step.call.kernels, token, normed);
        }
    });
    run.router.run([&](int64_t begin, int64_t end) { router_blocks(step, begin, end); });
    run.choice.run([&](int64_t, int64_t) { choose_experts(step); });
}

void add_joined(SparseStep &step, int64_t begin, int64_t end) {
    const auto &block = *step.block;
    const int64_t hidden = block.experts.hidden;
    for (int64_t at = begin * hidden; at < end * hidden; at += hidden) {
        float *joined = &step.joined[at], *out = step.out + at;
        if (block.experts_after) {
            rms_norm(joined, block.experts_after, block.epsilon, hidden, joined, block.norm_offset);
            rms_norm(&step.shared.out[at], block.shared_after, block.epsilon, hidden, &step.shared.out[at], block.norm_offset);
            for (int64_t i = 0; i < hidden; ++i) joined[i] += step.shared.out[at + i];
        }
        add_normed(step.call.residual + at, joined, block.after_norm, block.epsilon, hidden, out, block.norm_offset);
        if (block.whole_multiple != 0)
            for (int64_t i = 0; i < hidden; ++i) out[i] *= block.whole_multiple;
    }
}

void sparse_work(void *argument) {
    route_work(argument);
    auto &run = *static_cast<SparseRun *>(argument);
    run.shared.work(run.step.normed.data());
    run.experts.work();
    run.after.run([&](int64_t begin, int64_t end) { add_joined(run.step, begin, end); });
}

// What the card computes of a layer while the host computes the rest.
struct OnCardRun {
    SparseStep &step;
    SharedExpertRun shared;
    ExpertsRun hits;

    OnCardRun(SparseStep &step, int32_t hits) : step(step), shared(step.shared, kThreads), hits(step.call, hits, hits, kThreads) {}
    void work() {
        shared.work(step.normed.data());
        hits.work_apart();
    }
    static constexpr int kThreads = 2;  // the caller, and the host's once it has no more to do
};

// The routed token's experts on an emulated card, whose thread is the caller: those in slots, while the host computes the
// others; whoever is done first helps.  Outputs are added up as if all were in one place, so the sum does not depend on
// which were.
void compute_on_card(SparseStep &step) {
    const auto &block = *step.block;
    const int32_t layer = block.card->layer, top_k = block.router.top_k;
    SwitchyardExchange &exchange = *block.card->exchange;
    ExchangeCard &card = *exchange.card;
    const uint16_t *given = block.experts_norm ? step.others.data() : step.normed.data();
    const bool asks = card.look_up(layer, top_k, step.chosen) > 0;
    if (asks && !exchange.in_turn) card.post(layer, given);
    SwitchyardCardLayer &record = card.record(layer);

    int64_t found[SWITCHYARD_MOST_CHOSEN];
    float shares[SWITCHYARD_MOST_CHOSEN];
    int32_t hits = 0;
    step.found.assign(static_cast<size_t>(block.experts.count), nullptr);
    for (int32_t i = 0; i < top_k; ++i) {
        if (record.slots[i] < 0) continue;
        step.found[static_cast<size_t>(step.chosen[i])] = block.card->slots[record.slots[i]];
        found[hits] = step.chosen[i];
        shares[hits++] = step.shares[i];
    }
    SwitchyardExperts in_slots = block.experts;
    in_slots.scattered = step.found.data();
    for (auto *part : {&in_slots.first, &in_slots.down}) part->step = part->second_step = part->bias_step = 0;
    step.call.layer = &in_slots;
    step.call.visits.group(block.experts.count, 1, hits, found, shares);
    step.call.reserve(step.call.visits.count());
    OnCardRun run(step, hits);
    exchange.thread.beside.run([](void *argument) { static_cast<OnCardRun *>(argument)->work(); }, &run, [] {});
    record.computed_ns = clock_ns();
    if (asks && exchange.in_turn) card.post(layer, given);

    float *answer = nullptr;
    const auto help = [&, pause = Pause{64}, seen = uint64_t{0}]() mutable {
        if (!exchange.thread.help(seen)) pause();
    };
    if (asks && (answer = card.wait(layer, help)) == nullptr) {
        std::copy_n(step.call.residual, block.experts.hidden, step.out);  // given up: nobody reads it
        return;
    }
    step.call.layer = &block.experts;
    const std::vector<float *> computed = step.call.outputs;
    step.call.visits.group(block.experts.count, 1, top_k, step.chosen, step.shares);
    step.call.outputs.clear();
    size_t hit = 0;
    for (const int32_t expert : step.call.visits.active) {
        const bool is_hit = step.found[static_cast<size_t>(expert)] != nullptr;
        step.call.outputs.push_back(is_hit ? computed[hit++] : answer);
        if (!is_hit) answer += block.experts.hidden;
    }
    ExpertsRun(step.call, 0, 0, 1).add_up();
    if (block.after_norm) add_joined(step, 0, 1);
    record.joined_ns = clock_ns();
}

}  // namespace

SWITCHYARD_API int32_t switchyard_sparse_step(SwitchyardPool *pool, const SwitchyardSparseBlock *block, int32_t tokens,
                                              const float *hidden, int64_t *chosen, float *shares,
                                              float *out) try {
    // What a card does is in its records.
    const Stamp stamp(block, chosen, block->card ? 0 : tokens * int64_t{block->router.top_k});
    static thread_local SparseStep step;
    const auto &layer = block->experts;
    step.block = block;
    step.router = router_matrix(*block);
    step.chosen = chosen;
    step.shares = shares;
    step.tokens = tokens;
    step.all.resize(static_cast<size_t>(tokens));
    std::iota(step.all.begin(), step.all.end(), 0);
    step.normed.resize(static_cast<size_t>(tokens * int64_t{layer.hidden}));
    step.normed_bf16.resize({&step.router}, tokens, layer.hidden);
    if (block->router.norm || block->experts_norm) step.others.resize(step.normed.size());
    if (block->router.norm) step.exact.resize(step.normed.size());
    for (int32_t token = 0; token < tokens; ++token) step.routing[token].resize(layer.count);
    step.out = out;
    step.call.begin(&layer, tokens, hidden, out);
    if (block->multiple != 0) step.call.multiple = block->multiple;
    if (block->after_norm) {
        step.joined.resize(static_cast<size_t>(tokens * int64_t{layer.hidden}));
        step.call.sums = step.joined.data();
        step.call.apart = true;
    }
    step.call.reserve(tokens * int64_t{block->router.top_k});
    if (!step.routes()) step.call.visits.group(0, 0, 0, nullptr, nullptr);
    step.shared.begin(block, tokens, step.call.kernels);
    if (step.shared.exists() && !block->experts_after) step.call.addend = step.shared.out.data();
    SparseRun run(step, pool->threads());
    if (block->card) {
        pool->run(route_work, &run, bytes_of(step.router));
        compute_on_card(step);
        return 0;
    }
    pool->run(sparse_work, &run,
              SparseRun::most_active(step) * step.call.expert_bytes() + bytes_of(step.router) + step.shared.bytes());
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
