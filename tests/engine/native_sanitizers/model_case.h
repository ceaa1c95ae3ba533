// A call for a whole model, of one layer after the other, against a call for each of its steps.
#pragma once
#include "own_memory.h"
#include "thread_pool.h"

namespace {

// Keys and values of one layer, and whom its tokens chose.
struct OwnHeld {
    std::vector<uint8_t> keys, values;
    std::vector<float> key_scales, value_scales;
    std::vector<int64_t> chosen;
    std::vector<float> shares;
};

// Layers with the same weights, so that a case stays small, each with a cache of its own.
void try_model(SwitchyardPool *pool, Random &random, int32_t format) {
    const OwnExperts own(pool, random, format);
    const int32_t hidden = own.layer.hidden, experts = own.layer.count;
    const auto norm = draw_row(random, hidden), router = draw_row(random, int64_t{experts} * hidden);
    SwitchyardSparseBlock block{};
    block.norm = norm.data();
    block.epsilon = 1e-6f;
    block.experts = own.layer;
    block.router.weight = router.data();
    block.router.groups = block.router.kept_groups = 1;
    block.router.top_k = static_cast<int32_t>(draw(random, 1, experts));
    block.router.normalise = coin(random);
    block.router.scale = 1.0f;
    SwitchyardAttention attention{};
    attention.kv_heads = static_cast<int32_t>(draw(random, 1, 2));
    attention.heads = attention.kv_heads * static_cast<int32_t>(draw(random, 1, 5));
    attention.head_dim = static_cast<int32_t>(2 * draw(random, 1, 24));
    attention.rotated = attention.head_dim;
    attention.hidden = hidden;
    attention.epsilon = 1e-6f;
    attention.scale = 0.1f;
    const int64_t dim = attention.head_dim, half = dim / 2;
    const int64_t queries = attention.heads * dim, width = attention.kv_heads * dim;
    const OwnMatrix q(pool, random, queries, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix k(pool, random, width, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix v(pool, random, width, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix o(pool, random, hidden, queries, format, SWITCHYARD_PLAIN);
    attention.norm = norm.data();
    attention.q = q.matrix, attention.k = k.matrix, attention.v = v.matrix, attention.o = o.matrix;

    const int64_t capacity = 32 * draw(random, 1, 3), length = draw(random, 0, capacity - 1);
    const auto tokens = static_cast<int32_t>(draw(random, 1, std::min<int64_t>(kDecodeTokens, capacity - length)));
    const auto type = static_cast<int32_t>(draw(random, 0, 2));
    const bool scaled = type == SWITCHYARD_KV_INT8;
    const auto count = static_cast<int32_t>(draw(random, 1, 3));
    std::vector<OwnHeld> held(static_cast<size_t>(count));
    const SwitchyardPiece piece = {nullptr, length, tokens, 0};
    std::vector<SwitchyardLayer> layers;
    for (OwnHeld &its : held) {
        const auto slots = static_cast<size_t>(attention.kv_heads * capacity);
        its.keys.resize(slots * static_cast<size_t>(dim) * (scaled ? 1 : 2));
        its.values = its.keys;
        if (scaled) its.key_scales.resize(slots, 0.01f), its.value_scales.resize(slots, 0.01f);
        its.chosen.resize(static_cast<size_t>(tokens * block.router.top_k));
        its.shares.resize(its.chosen.size());
        const SwitchyardPages pages = {its.keys.data(), its.values.data(), scaled ? its.key_scales.data() : nullptr,
                                       scaled ? its.value_scales.data() : nullptr, capacity, type, 0, 0};
        const int64_t part = draw(random, 0, 3);  // some layers are attention or experts alone
        layers.push_back({part ? &attention : nullptr, nullptr, nullptr, part != 1 ? &block : nullptr, pages, &piece, its.chosen.data(), its.shares.data(), coin(random)});
    }
    const int64_t words = draw(random, 1, 90);
    const OwnMatrix head(pool, random, words, hidden, format, SWITCHYARD_PLAIN);
    const auto bias = draw_row(random, words);
    SwitchyardModel model = {layers.data(), norm.data(), coin(random) ? bias.data() : nullptr, head.matrix, 1e-6f,
                             count, static_cast<float>(coin(random))};
    const auto x = draw_floats(random, int64_t{tokens} * hidden);
    const auto cos = draw_floats(random, 2 * tokens * half), sin = draw_floats(random, 2 * tokens * half);
    const SwitchyardAngles angles[2] = {{cos.data(), sin.data(), 1, 2 * half}, {cos.data() + half, sin.data() + half, 1, 2 * half}};
    std::vector<uint16_t> logits(static_cast<size_t>(2 * tokens * words));  // room for floats
    require(switchyard_model_step(pool, &model, 1, tokens, x.data(), angles, logits.data()) == 0, "no step of a model");

    // The same model whose layers are called one by one: what is left of it is the last norm and the head.
    auto now = x, next = x;
    for (const SwitchyardLayer &layer : layers) {
        const SwitchyardAngles &its = angles[layer.angles];
        if (layer.attention) {
            require(switchyard_attention_step(pool, layer.attention, &layer.held, layer.pieces, 1, now.data(), its.cos, its.sin, 1,
                                              its.token_step, next.data()) == 0, "no attention");
            now.swap(next);
        }
        if (layer.block) {
            require(switchyard_sparse_step(pool, layer.block, tokens, now.data(), layer.chosen, layer.shares,
                                           next.data()) == 0, "no sparse step");
            now.swap(next);
        }
    }
    std::vector<uint16_t> again(logits.size());
    model.count = 0;
    require(switchyard_model_step(pool, &model, 1, tokens, now.data(), angles, again.data()) == 0, "no step of a model");
    require(logits == again, "a model's step is not that of its layers");

    // The same between streams: attention's keys are written again, and what comes of them is the same with one thread.
    const auto n = static_cast<int32_t>(draw(random, 1, 5)), rounds = static_cast<int32_t>(draw(random, 1, 20));
    const auto mix = draw_floats(random, (2 + n) * n * n * hidden), base = draw_floats(random, (2 + n) * n);
    const SwitchyardStreams around = {mix.data(), base.data(), {0.5f, 0.25f, 0.125f}, 1e-6f, 1e-6f, n, rounds};
    const SwitchyardStreams last = {mix.data(), base.data(), {0.5f, 0, 0}, 1e-6f, 1e-6f, n, 0};
    for (SwitchyardLayer &layer : layers) layer.streams[0] = layer.streams[1] = &around;
    model.count = count, model.streams = &last;
    const OwnPool alone(1);
    require(switchyard_model_step(pool, &model, 1, tokens, x.data(), angles, logits.data()) == 0, "no step between streams");
    require(switchyard_model_step(alone.pool, &model, 1, tokens, x.data(), angles, again.data()) == 0, "no step between streams");
    require(logits == again, "a step between streams depends on the number of threads");
}

}  // namespace
