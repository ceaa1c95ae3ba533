// Calls of everything that the native kernels export, on random shapes.  What they give goes to `record`, which the
// including file defines: record(name, std::vector<uint16_t>), in bf16.
#pragma once
#include "blocks_case.h"
#include "model_case.h"
#include "own_memory.h"
#include "paged_attention.h"
#include "prompt_attention.h"
#include "read_memory.h"
#include "rows_kernels.h"
#include "thread_pool.h"

namespace {

void expand(SwitchyardPool *pool, Random &random, const OwnMatrix &own) {
    const auto &matrix = own.matrix;
    const int64_t blocks = (matrix.rows + 31) / 32, begin = draw(random, 0, blocks - 1);
    const int64_t end = draw(random, begin + 1, blocks);
    const bool halves = matrix.pairing == SWITCHYARD_HALVES;
    const int64_t per_block = halves ? 16 : 32, limit = halves ? matrix.rows / 2 : matrix.rows;
    const int64_t rows = ((end * per_block < limit ? end * per_block : limit) - begin * per_block) * (halves ? 2 : 1);
    std::vector<uint16_t> out(static_cast<size_t>(rows * matrix.columns));
    require(switchyard_dequantise(pool, &matrix, begin, end, out.data()) == 0, "not expanded");
    record("expanded", out);
}

void try_linear(SwitchyardPool *pool, Random &random, int32_t format) {
    const int64_t rows = draw(random, 1, 200), columns = draw(random, 1, 200);
    const OwnMatrix own(pool, random, rows, columns, format, SWITCHYARD_PLAIN);
    if (format != SWITCHYARD_BF16) expand(pool, random, own);
    const auto tokens = static_cast<int32_t>(draw(random, 1, 20));
    const auto x = draw_row(random, tokens * own.matrix.columns), bias = draw_row(random, own.matrix.rows);
    std::vector<uint16_t> out(static_cast<size_t>(tokens * own.matrix.rows)), again(out);
    const uint16_t *added = coin(random) ? bias.data() : nullptr;
    require(switchyard_linear(pool, &own.matrix, tokens, x.data(), added, 0, out.data()) == 0, "no product");
    const OwnPool alone(1);
    require(switchyard_linear(alone.pool, &own.matrix, tokens, x.data(), added, 0, again.data()) == 0, "no product");
    require(out == again, "a linear layer depends on the number of threads");
    record("linear", out);
    const auto many = static_cast<int32_t>(draw(random, 1, 90));
    const auto rows_x = draw_row(random, many * own.matrix.columns);
    std::vector<uint16_t> rows_out(static_cast<size_t>(many * own.matrix.rows)), rows_again(rows_out);
    require(switchyard_linear_rows(pool, &own.matrix, many, rows_x.data(), added, 0, rows_out.data()) == 0, "no products");
    require(switchyard_linear_rows(alone.pool, &own.matrix, many, rows_x.data(), added, 0, rows_again.data()) == 0,
            "no products");
    require(rows_out == rows_again, "many rows depend on the number of threads");
}

void try_experts(SwitchyardPool *pool, Random &random, int32_t format) {
    const OwnExperts own(pool, random, format);
    const int64_t most = draw(random, 0, 3) ? 20 : 150;  // rarely so many that a prefill's kernels take them
    const auto tokens = static_cast<int32_t>(draw(random, 1, most)), k = static_cast<int32_t>(draw(random, 1, 9));
    const auto x = draw_row(random, int64_t{tokens} * own.layer.hidden);
    std::vector<int64_t> index(static_cast<size_t>(tokens) * k);
    for (auto &id : index) id = draw(random, -1, own.layer.count);  // -1 and count are nobody
    std::vector<float> weights(index.size(), 0.25f);
    std::vector<uint16_t> out(x.size()), again(x.size());
    require(switchyard_experts(pool, &own.layer, tokens, k, x.data(), index.data(), weights.data(), out.data()) == 0,
            "no experts");
    const OwnPool alone(1);
    require(switchyard_experts(alone.pool, &own.layer, tokens, k, x.data(), index.data(), weights.data(),
                               again.data()) == 0, "no experts");
    require(out == again, "experts depend on the number of threads");
    record("experts", out);
}

void try_sparse(SwitchyardPool *pool, Random &random, int32_t format) {
    const OwnExperts own(pool, random, format);
    const int32_t experts = own.layer.count, hidden = own.layer.hidden;
    const int64_t inner = draw(random, 1, 90);
    const auto few = static_cast<int32_t>(draw(random, 1, kDecodeTokens));
    const auto norm = draw_row(random, hidden), shared_gate = draw_row(random, hidden);
    const auto after = draw_row(random, hidden);
    const auto x = draw_floats(random, int64_t{few} * hidden);
    const auto router = draw_row(random, int64_t{experts} * hidden), bias = draw_row(random, experts);
    const std::vector<float> correction(static_cast<size_t>(experts), 0.5f);
    const OwnMatrix gate(pool, random, inner, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix up(pool, random, inner, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix down(pool, random, hidden, inner, format, SWITCHYARD_PLAIN);
    SwitchyardSparseBlock block{};
    block.norm = norm.data();
    block.epsilon = 1e-6f;
    block.experts = own.layer;
    std::vector<float> exact(router.size());  // the same numbers
    for (size_t i = 0; i < exact.size(); ++i) {
        const uint32_t bits = static_cast<uint32_t>(router[i]) << 16;
        std::memcpy(&exact[i], &bits, 4);
    }
    block.router.is_exact = coin(random);
    block.router.weight = block.router.is_exact ? static_cast<const void *>(exact.data()) : router.data();
    if (coin(random)) block.router.bias = bias.data();
    if (coin(random)) block.router.correction = correction.data();
    block.router.scoring = coin(random);
    block.router.groups = experts % 3 == 0 ? 3 : 1;
    block.router.kept_groups = static_cast<int32_t>(draw(random, 1, block.router.groups));
    const int32_t choice = experts / block.router.groups * block.router.kept_groups;
    block.router.top_k = static_cast<int32_t>(draw(random, 1, choice));
    block.router.bf16_logits = coin(random);
    block.router.normalise = coin(random);
    block.router.bf16_shares = coin(random);
    block.router.scale = 1.5f;
    if (coin(random)) block.router.least = 1e-12f;
    const std::vector<float> router_norm = draw_floats(random, hidden), multiples(static_cast<size_t>(experts), 0.75f);
    const auto before = draw_row(random, hidden);
    if (coin(random)) block.after_norm = after.data(), block.norm_offset = 1.0f;
    block.multiple = coin(random) ? 0.25f : 0.0f, block.whole_multiple = coin(random) ? 1.5f : 0.0f;
    if (coin(random)) block.router.norm = router_norm.data(), block.router.multiples = multiples.data();
    if (coin(random)) block.experts_norm = before.data();
    block.shared_activation = static_cast<int32_t>(draw(random, 0, 5));
    block.shared_limit = coin(random) ? 0.25f : std::numeric_limits<float>::infinity(), block.shared_alpha = 1.5f;
    if (coin(random)) {
        block.shared_gate_proj = gate.matrix, block.shared_up_proj = up.matrix, block.shared_down_proj = down.matrix;
        if (coin(random)) block.shared_gate = shared_gate.data();
        if (block.after_norm && coin(random)) block.experts_after = after.data(), block.shared_after = before.data();
        if (block.shared_activation != 5 && coin(random)) block.shared_gate_proj = {};
    }
    const auto top_k = static_cast<size_t>(block.router.top_k);
    std::vector<int64_t> chosen(static_cast<size_t>(few) * top_k);
    std::vector<float> shares(chosen.size());
    std::vector<float> out(x.size()), alone(static_cast<size_t>(hidden));
    require(switchyard_sparse_step(pool, &block, few, x.data(), chosen.data(), shares.data(), out.data()) == 0,
            "no sparse step");
    for (int32_t token = 0; token < few; ++token) {
        const auto at = static_cast<size_t>(token) * alone.size();
        std::vector<int64_t> its(top_k);
        require(switchyard_sparse_step(pool, &block, 1, x.data() + at, its.data(), shares.data(), alone.data()) == 0,
                "no sparse step");
        require(same(alone.data(), out.data() + at, alone.size()) &&
                    std::equal(its.begin(), its.end(), chosen.begin() + token * static_cast<int64_t>(top_k)),
                "a sparse block's token depends on those it is computed with");
    }
    for (const int64_t expert : chosen) require(expert >= 0 && expert < experts, "an expert that is not there");
    record("chosen", std::vector<uint16_t>(chosen.begin(), chosen.end()));
    record("sparse", in_bf16(out));
    const auto tokens = static_cast<int32_t>(draw(random, 1, 20));
    const auto rows = draw_floats(random, int64_t{tokens} * hidden);
    std::vector<uint16_t> normed(rows.size());
    std::vector<int64_t> routed(static_cast<size_t>(tokens) * top_k);
    std::vector<float> parts(routed.size());
    require(switchyard_route_rows(pool, &block, tokens, rows.data(), normed.data(), routed.data(), parts.data()) == 0,
            "no routing of rows");
    for (const int64_t expert : routed) require(expert >= 0 && expert < experts, "an expert that is not there");
}

// What one page holds in pages of `each` tokens, in any order.
struct OwnPages {
    std::vector<int32_t> order;
    std::vector<uint8_t> keys, values;
    std::vector<float> key_scales, value_scales;
    SwitchyardPages held;

    OwnPages(Random &random, const SwitchyardPages &one, int64_t room, int64_t kv_heads, int64_t key_bytes,
             int64_t value_bytes, int64_t each)
        : held(one) {
        for (int64_t page = 0; page * each < room; ++page) order.push_back(static_cast<int32_t>(page));
        std::shuffle(order.begin(), order.end(), random);
        const auto slots = order.size() * static_cast<size_t>(each * kv_heads);
        keys.resize(slots * static_cast<size_t>(key_bytes)), values.resize(slots * static_cast<size_t>(value_bytes));
        key_scales.resize(slots), value_scales.resize(slots);
        for (int64_t head = 0; head < kv_heads; ++head)
            for (int64_t token = 0; token < room; ++token) {
                const int64_t to = (order[token / each] * kv_heads + head) * each + token % each, from = head * room + token;
                std::memcpy(&keys[to * key_bytes], static_cast<const char *>(one.keys) + from * key_bytes, key_bytes);
                std::memcpy(&values[to * value_bytes], static_cast<const char *>(one.values) + from * value_bytes, value_bytes);
                if (one.key_scales) key_scales[to] = one.key_scales[from], value_scales[to] = one.value_scales[from];
            }
        held.page_tokens = each;
        held.keys = keys.data(), held.values = values.data();
        if (one.key_scales) held.key_scales = key_scales.data(), held.value_scales = value_scales.data();
    }
};

// What an index looks up [room, dim], in the same pages.
std::vector<uint16_t> in_pages(const std::vector<uint16_t> &rows, int64_t room, int64_t dim, const OwnPages &pages) {
    const int64_t each = pages.held.page_tokens;
    std::vector<uint16_t> paged(pages.order.size() * static_cast<size_t>(each * dim));
    for (int64_t token = 0; token < room; ++token)
        std::copy_n(&rows[token * dim], dim, &paged[(pages.order[token / each] * each + token % each) * dim]);
    return paged;
}

// The same layer over pages: two sequences, some tokens each.
void try_attention_rows(SwitchyardPool *pool, Random &random, const SwitchyardAttention &layer) {
    SwitchyardPagedLayer paged{};
    paged.held.page_tokens = kPageTokens;
    paged.kv_heads = layer.kv_heads, paged.heads = layer.heads;
    paged.key_dim = paged.value_dim = layer.head_dim;
    paged.held.type = static_cast<int32_t>(draw(random, 0, 3));
    paged.scale = layer.scale;
    if (coin(random)) paged.held.window = static_cast<int32_t>(draw(random, 1, 90));
    const size_t element = paged.held.type == SWITCHYARD_KV_FP32 ? 4 : paged.held.type == SWITCHYARD_KV_INT8 ? 1 : 2;
    const auto slots = static_cast<size_t>(8 * kPageTokens * layer.kv_heads);
    std::vector<uint8_t> keys(slots * layer.head_dim * element), values(keys);
    std::vector<float> key_scales(slots), value_scales(slots);
    paged.held.keys = keys.data(), paged.held.values = values.data();
    if (paged.held.type == SWITCHYARD_KV_INT8) paged.held.key_scales = key_scales.data(), paged.held.value_scales = value_scales.data();
    const int32_t order[2][4] = {{5, 0, 3, 6}, {7, 2, 1, 4}};
    int64_t held[2] = {0, 0};
    for (int call = 0; call < 2; ++call) {
        const auto first = static_cast<int32_t>(draw(random, 1, 40)), second = static_cast<int32_t>(draw(random, 1, 40));
        const SwitchyardPiece pieces[2] = {{order[0], held[0], first, 0}, {order[1], held[1], second, first}};
        const int64_t tokens = first + second, half = layer.head_dim / 2;
        const auto x = draw_floats(random, tokens * layer.hidden);
        const auto cos = draw_floats(random, tokens * half), sin = draw_floats(random, tokens * half);
        std::vector<float> out(x.size());
        require(switchyard_attention_rows(pool, &layer, &paged, pieces, 2, x.data(), cos.data(), sin.data(), half,
                                          out.data()) == 0, "no attention of rows");
        held[0] += first, held[1] += second;
    }
}

void try_attention(SwitchyardPool *pool, Random &random, int32_t format) {
    SwitchyardAttention layer{};
    layer.kv_heads = static_cast<int32_t>(draw(random, 1, 3));
    layer.heads = layer.kv_heads * static_cast<int32_t>(draw(random, 1, 10));
    layer.head_dim = static_cast<int32_t>(2 * draw(random, 1, 40));
    layer.hidden = static_cast<int32_t>(draw(random, 1, 150));
    layer.epsilon = 1e-6f;
    layer.scale = 0.1f;
    layer.norms_span_heads = coin(random);
    layer.norms_come_last = coin(random);
    layer.rotated = static_cast<int32_t>(2 * draw(random, 0, layer.head_dim / 2));
    layer.rotation = 2 * coin(random);
    layer.norm_offset = static_cast<float>(coin(random));
    const int64_t dim = layer.head_dim, hidden = layer.hidden;
    const int64_t queries = layer.heads * dim, keys_width = layer.kv_heads * dim;
    layer.is_gated = layer.norms_span_heads ? 0 : coin(random);
    const int64_t of_queries = layer.is_gated ? 2 * queries : queries;
    const OwnMatrix q(pool, random, of_queries, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix k(pool, random, keys_width, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix v(pool, random, keys_width, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix o(pool, random, hidden, queries, format, SWITCHYARD_PLAIN);
    layer.q = q.matrix, layer.k = k.matrix, layer.v = v.matrix, layer.o = o.matrix;
    const auto norm = draw_row(random, hidden), sinks = draw_row(random, layer.heads);
    const auto of_q = draw_row(random, layer.norms_span_heads ? queries : dim);
    const auto of_k = draw_row(random, layer.norms_span_heads ? keys_width : dim);
    const auto q_bias = draw_row(random, of_queries), k_bias = draw_row(random, keys_width);
    const auto v_bias = draw_row(random, keys_width), o_bias = draw_row(random, hidden), after = draw_row(random, hidden);
    layer.norm = norm.data();
    if (coin(random)) layer.after_norm = after.data();
    if (layer.norms_span_heads || coin(random)) layer.q_norm = of_q.data(), layer.k_norm = of_k.data();
    if (coin(random)) layer.q_bias = q_bias.data(), layer.k_bias = k_bias.data(), layer.v_bias = v_bias.data();
    if (coin(random)) layer.o_bias = o_bias.data();
    if (coin(random)) layer.sinks = sinks.data();
    layer.multiple = coin(random) ? 0.25f : 0.0f;
    layer.norms_values = coin(random);
    if (coin(random)) layer.v = {};  // values are what keys are of
    // Sometimes long enough for threads to share a head's tokens.
    const int64_t capacity = draw(random, 1, draw(random, 0, 3) ? 70 : 900), length = draw(random, 0, capacity - 1);
    const auto tokens = static_cast<int32_t>(draw(random, 1, std::min<int64_t>(kDecodeTokens, capacity - length)));
    const auto type = static_cast<int32_t>(draw(random, 0, 2));
    const int64_t room = (capacity + 31) / 32 * 32;
    auto keys = draw_row(random, layer.kv_heads * room * dim), values = keys;
    std::vector<float> key_scales(static_cast<size_t>(layer.kv_heads * room), 0.01f), value_scales(key_scales);
    const bool scaled = type == SWITCHYARD_KV_INT8;
    float *of_keys = scaled ? key_scales.data() : nullptr, *of_values = scaled ? value_scales.data() : nullptr;
    const int64_t half = dim / 2;
    const auto x = draw_floats(random, tokens * hidden), cos = draw_floats(random, tokens * half);
    const auto sin = draw_floats(random, tokens * half);
    SwitchyardPages held = {keys.data(), values.data(), of_keys, of_values, room, type, 0, 0};
    if (coin(random)) held.window = static_cast<int32_t>(draw(random, 1, 300)), held.kept = static_cast<int32_t>(draw(random, 0, 40));
    SwitchyardBlockIndex index{};
    index.dim = layer.rotated + static_cast<int32_t>(draw(random, 1, 30)), index.block_tokens = static_cast<int32_t>(32 * draw(random, 1, 3));
    index.most = static_cast<int32_t>(draw(random, 1, 4)), index.local = static_cast<int32_t>(draw(random, 1, index.most));
    const OwnMatrix index_q(pool, random, int64_t{layer.kv_heads} * index.dim, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix index_k(pool, random, index.dim, hidden, format, SWITCHYARD_PLAIN);
    const auto of_index = draw_row(random, index.dim);
    auto index_keys = draw_row(random, room * index.dim);
    index.q = index_q.matrix, index.k = index_k.matrix, index.q_norm = index.k_norm = of_index.data();
    if (coin(random)) layer.index = &index;
    held.index_keys = index_keys.data();
    const int64_t bytes = dim * (scaled ? 1 : 2);
    OwnPages pages(random, held, room, layer.kv_heads, bytes, bytes, 32 * draw(random, 1, 3));
    auto paged_keys = in_pages(index_keys, room, index.dim, pages);
    pages.held.index_keys = paged_keys.data();
    std::vector<float> out(x.size()), paged(x.size());
    const SwitchyardPiece piece = {nullptr, length, tokens, 0}, its_pages = {pages.order.data(), length, tokens, 0};
    require(switchyard_attention_step(pool, &layer, &held, &piece, 1, x.data(), cos.data(), sin.data(), 1, half,
                                      out.data()) == 0, "no attention");
    require(switchyard_attention_step(pool, &layer, &pages.held, &its_pages, 1, x.data(), cos.data(), sin.data(), 1, half,
                                      paged.data()) == 0, "no attention");
    require(same(out, paged), "attention depends on where pages are");
    const OwnPool alone(1);
    std::vector<float> again(x.size());
    for (int32_t token = 0; token < tokens; ++token) {
        const SwitchyardPiece its = {nullptr, length + token, 1, 0};
        require(switchyard_attention_step(alone.pool, &layer, &held, &its, 1, x.data() + token * hidden,
                                          cos.data() + token * half, sin.data() + token * half, 1, half,
                                          again.data() + token * hidden) == 0, "no attention");
    }
    require(same(out, again), "attention depends on the number of threads, or on what is computed together");
    record("attention", in_bf16(out));
    if (!layer.is_gated && !layer.norms_values && layer.v.rows) try_attention_rows(pool, random, layer);
}

void try_latent(SwitchyardPool *pool, Random &random, int32_t format) {
    SwitchyardLatentAttention layer{};
    layer.hidden = static_cast<int32_t>(draw(random, 1, 150));
    layer.heads = static_cast<int32_t>(draw(random, 1, 5));
    layer.nope = static_cast<int32_t>(draw(random, 1, 40));
    layer.rope = static_cast<int32_t>(2 * draw(random, 1, 20));
    layer.rank = static_cast<int32_t>(draw(random, 1, 80));
    layer.value_dim = static_cast<int32_t>(draw(random, 1, 40));
    layer.rotation = static_cast<int32_t>(draw(random, 0, 2));
    layer.epsilon = layer.q_a_epsilon = layer.kv_epsilon = 1e-6f;
    layer.scale = 0.1f;
    const int64_t of_query = draw(random, 1, 70), hidden = layer.hidden;
    const bool has_q_latent = draw(random, 0, 1) != 0;
    const OwnMatrix q_a(pool, random, of_query, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix q(pool, random, layer.heads * (layer.nope + layer.rope), has_q_latent ? of_query : hidden, format,
                      SWITCHYARD_PLAIN);
    const OwnMatrix kv_a(pool, random, layer.rank + layer.rope, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix kv_b(pool, random, layer.heads * (layer.nope + layer.value_dim), layer.rank, format,
                         SWITCHYARD_PLAIN);
    const OwnMatrix k_b(pool, random, layer.heads * layer.rank, layer.nope, format, SWITCHYARD_PLAIN);
    const OwnMatrix v_b(pool, random, layer.heads * layer.value_dim, layer.rank, format, SWITCHYARD_PLAIN);
    const OwnMatrix o(pool, random, hidden, layer.heads * layer.value_dim, format, SWITCHYARD_PLAIN);
    layer.q = q.matrix, layer.kv_a = kv_a.matrix, layer.o = o.matrix;
    if (coin(random))
        layer.kv_b = kv_b.matrix;
    else
        layer.k_b = k_b.matrix, layer.v_b = v_b.matrix;
    if (has_q_latent) layer.q_a = q_a.matrix;
    const auto norm = draw_row(random, hidden), q_norm = draw_row(random, of_query);
    const auto kv_norm = draw_row(random, layer.rank), kv_bias = draw_row(random, layer.rank + layer.rope);
    layer.norm = norm.data(), layer.kv_norm = kv_norm.data();
    if (has_q_latent) layer.q_a_norm = q_norm.data();
    if (draw(random, 0, 1)) layer.kv_a_bias = kv_bias.data(), layer.o_bias = norm.data();
    const int64_t capacity = draw(random, 1, draw(random, 0, 3) ? 70 : 900), length = draw(random, 0, capacity - 1);
    auto latents = draw_row(random, capacity * layer.rank), keys = draw_row(random, capacity * layer.rope);
    const auto tokens = static_cast<int32_t>(draw(random, 1, std::min<int64_t>(kDecodeTokens, capacity - length)));
    const auto x = draw_floats(random, tokens * hidden);
    std::vector<float> angles(static_cast<size_t>(tokens * layer.rope));
    for (float &angle : angles) angle = static_cast<float>(draw(random, -8, 8)) * 0.125f;
    std::vector<float> out(x.size()), again(x.size());
    SwitchyardIndex index{};
    index.heads = static_cast<int32_t>(draw(random, 1, 12)), index.dim = layer.rope + static_cast<int32_t>(draw(random, 0, 20));
    index.most = static_cast<int32_t>(draw(random, 1, 90)), index.rotation = static_cast<int32_t>(draw(random, 0, 2));
    index.epsilon = 1e-6f, index.scale = 0.1f;
    const OwnMatrix index_q(pool, random, int64_t{index.heads} * index.dim, of_query, format, SWITCHYARD_PLAIN);
    const OwnMatrix index_k(pool, random, index.dim, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix index_weights(pool, random, index.heads, hidden, format, SWITCHYARD_PLAIN);
    const auto of_keys = draw_row(random, index.dim), of_bias = draw_row(random, index.dim);
    std::vector<int32_t> chosen(static_cast<size_t>(kDecodeTokens * index.most));
    auto index_keys = draw_row(random, (capacity + 31) / 32 * 32 * index.dim);
    index.k_norm = of_keys.data(), index.k_bias = of_bias.data(), index.chosen = chosen.data();
    const bool is_indexed = has_q_latent && coin(random) != 0;
    const bool is_own = coin(random) != 0;
    if (is_own) index.q = index_q.matrix, index.k = index_k.matrix, index.weights = index_weights.matrix;
    if (is_indexed) layer.index = &index;
    const auto choose = [&](int64_t first, int64_t count) {  // as a layer before would have, without an index of its own
        if (is_own) return;
        for (int64_t token = 0; token < count; ++token)
            for (int64_t i = 0; i < index.most; ++i) chosen[token * index.most + i] = static_cast<int32_t>((i + first) % capacity);
    };
    const SwitchyardPages held = {latents.data(), keys.data(), nullptr, nullptr, capacity, SWITCHYARD_KV_BF16, 0, 0, index_keys.data()};
    OwnPages pages(random, held, capacity, 1, 2 * layer.rank, 2 * layer.rope, 32 * draw(random, 1, 3));
    auto paged_keys = in_pages(index_keys, capacity, index.dim, pages);
    pages.held.index_keys = paged_keys.data();
    choose(0, tokens);
    const SwitchyardPiece piece = {nullptr, length, tokens, 0}, its_pages = {pages.order.data(), length, tokens, 0};
    require(switchyard_latent_step(pool, &layer, &held, &piece, 1, x.data(), angles.data(), angles.data() + 1, 2,
                                   layer.rope, out.data()) == 0, "no latent attention");
    require(switchyard_latent_step(pool, &layer, &pages.held, &its_pages, 1, x.data(), angles.data(), angles.data() + 1, 2,
                                   layer.rope, again.data()) == 0, "no latent attention");
    require(same(out, again), "latent attention depends on where pages are");
    for (int32_t token = 0; token < tokens; ++token) {
        const float *its = angles.data() + token * layer.rope;
        const SwitchyardPiece one = {nullptr, length + token, 1, 0};
        choose(0, 1);
        require(switchyard_latent_step(pool, &layer, &held, &one, 1, x.data() + token * hidden, its, its + 1, 2, layer.rope,
                                       again.data() + token * hidden) == 0, "no latent attention");
    }
    require(same(out, again), "latent attention of a token depends on those it is computed with");
    record("latent", in_bf16(out));
}

// The compressor of some matrices, of `dim` numbers to an entry.
struct OwnCompressor {
    OwnMatrix kv, gate;
    std::vector<float> bias, norm;
    std::vector<uint16_t> raw, entries;
    SwitchyardCompressor layer{};
    int64_t step;

    OwnCompressor(SwitchyardPool *pool, Random &random, int64_t hidden, int64_t dim, int64_t rate, bool overlaps, int64_t pages,
                  int32_t format)
        : kv(pool, random, overlaps ? 2 * dim : dim, hidden, format, SWITCHYARD_PLAIN),
          gate(pool, random, overlaps ? 2 * dim : dim, hidden, format, SWITCHYARD_PLAIN),
          bias(draw_floats(random, rate * kv.matrix.rows)),
          norm(draw_floats(random, dim)),
          raw(draw_row(random, pages * kPageTokens * 2 * kv.matrix.rows)),
          step((kPageTokens + rate - 1) / rate * dim) {
        entries = draw_row(random, pages * step);
        layer = {kv.matrix, gate.matrix, bias.data(), norm.data(), static_cast<int32_t>(dim)};
    }
};

void try_compressed(SwitchyardPool *pool, Random &random, int32_t format) {
    SwitchyardCompressedAttention layer{};
    layer.groups = static_cast<int32_t>(draw(random, 1, 3));
    layer.heads = layer.groups * static_cast<int32_t>(draw(random, 1, 4));
    layer.rope = static_cast<int32_t>(2 * draw(random, 1, 8));
    layer.head_dim = layer.rope + static_cast<int32_t>(draw(random, 0, 40));
    layer.hidden = static_cast<int32_t>(draw(random, 1, 150));
    layer.rate = static_cast<int32_t>(draw(random, 1, 40));
    layer.index_heads = static_cast<int32_t>(draw(random, 1, 12));
    layer.most = static_cast<int32_t>(draw(random, 1, 20));
    layer.epsilon = 1e-6f, layer.scale = layer.index_scale = 0.1f, layer.angle_scale = 1.0f;
    const int64_t hidden = layer.hidden, dim = layer.head_dim, width = layer.heads * dim, latent = draw(random, 1, 70);
    const int64_t middle = layer.groups * draw(random, 1, 40), index_dim = layer.rope + draw(random, 0, 20);
    const int64_t capacity = draw(random, 1, draw(random, 0, 3) ? 70 : 700), length = draw(random, 0, capacity - 1);
    const auto tokens = static_cast<int32_t>(draw(random, 1, std::min<int64_t>(kDecodeTokens, capacity - length)));
    const int64_t pages = (capacity + kPageTokens - 1) / kPageTokens;
    const OwnMatrix q_a(pool, random, latent, hidden, format, SWITCHYARD_PLAIN), q_b(pool, random, width, latent, format, SWITCHYARD_PLAIN);
    const OwnMatrix kv(pool, random, dim, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix o_a(pool, random, middle, width / layer.groups, format, SWITCHYARD_PLAIN);
    const OwnMatrix o_b(pool, random, hidden, middle, format, SWITCHYARD_PLAIN);
    const OwnMatrix index_q(pool, random, layer.index_heads * index_dim, latent, format, SWITCHYARD_PLAIN);
    const OwnMatrix index_weights(pool, random, layer.index_heads, hidden, format, SWITCHYARD_PLAIN);
    layer.q_a = q_a.matrix, layer.q_b = q_b.matrix, layer.kv = kv.matrix, layer.o_a = o_a.matrix, layer.o_b = o_b.matrix;
    layer.index_q = index_q.matrix, layer.index_weights = index_weights.matrix;
    const auto norm = draw_floats(random, hidden), q_norm = draw_floats(random, latent), kv_norm = draw_floats(random, dim);
    const auto sinks = draw_floats(random, layer.heads), frequencies = draw_floats(random, layer.rope / 2);
    layer.norm = norm.data(), layer.q_a_norm = q_norm.data(), layer.kv_norm = kv_norm.data();
    layer.sinks = sinks.data(), layer.frequencies = frequencies.data();
    const bool overlaps = coin(random) != 0, compresses = draw(random, 0, 3) > 0, looks_up = compresses && coin(random);
    OwnCompressor own(pool, random, hidden, dim, layer.rate, overlaps, pages, format);
    OwnCompressor index(pool, random, hidden, index_dim, layer.rate, overlaps, pages, format);
    auto keys = draw_row(random, pages * kPageTokens * dim), values = keys;
    SwitchyardPages held{};
    held.keys = keys.data(), held.values = values.data();
    held.page_tokens = kPageTokens, held.window = static_cast<int32_t>(draw(random, 1, 100));
    if (compresses) layer.compressor = &own.layer, held.values = own.raw.data(), held.entries = own.entries.data(), held.entry_step = own.step;
    if (looks_up) layer.index = &index.layer, held.index_keys = index.raw.data(), held.entry_keys = index.entries.data(), held.entry_key_step = index.step;
    std::vector<int32_t> order(static_cast<size_t>(pages)), others(order);
    for (int64_t page = 0; page < pages; ++page) order[page] = static_cast<int32_t>(page), others[page] = static_cast<int32_t>(pages - 1 - page);
    std::shuffle(order.begin(), order.end(), random);
    const int64_t half = layer.rope / 2;
    const auto x = draw_floats(random, tokens * hidden), cos = draw_floats(random, tokens * half), sin = draw_floats(random, tokens * half);
    std::vector<float> out(x.size()), again(x.size());
    const SwitchyardPiece piece = {order.data(), length, tokens, 0, 0, 0, others.data()};
    require(switchyard_compressed_step(pool, &layer, &held, &piece, 1, x.data(), cos.data(), sin.data(), 1, half, out.data()) == 0,
            "no attention that compresses");
    const OwnPool alone(1);
    for (int32_t token = 0; token < tokens; ++token) {
        const SwitchyardPiece its = {order.data(), length + token, 1, 0, 0, 0, others.data()};
        require(switchyard_compressed_step(alone.pool, &layer, &held, &its, 1, x.data() + token * hidden, cos.data() + token * half,
                                           sin.data() + token * half, 1, half, again.data() + token * hidden) == 0,
                "no attention that compresses");
    }
    require(same(out, again), "attention that compresses depends on the number of threads, or on what is computed together");
    record("compressed", in_bf16(out));
}

// What a delta net has summed up: pages, in memory that ends with the last one.
struct OwnStates {
    std::vector<float> recent, states;

    SwitchyardPages held() {
        SwitchyardPages pages{};
        pages.keys = recent.data(), pages.values = states.data();
        return pages;
    }
};

bool same(const OwnStates &some, const OwnStates &others) {
    return same(some.recent, others.recent) && same(some.states, others.states);
}

// Some sequences' tokens, which go on from any page, several perhaps from one, and end in the same or in another.
std::vector<SwitchyardPiece> draw_pieces(Random &random, int64_t pages, int64_t count, int64_t tokens) {
    std::vector<int32_t> order(static_cast<size_t>(pages));
    for (int64_t i = 0; i < pages; ++i) order[i] = static_cast<int32_t>(i);
    for (int64_t i = 0; i < pages; ++i) std::swap(order[i], order[draw(random, i, pages - 1)]);
    std::vector<SwitchyardPiece> pieces(static_cast<size_t>(count));
    int64_t first = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t later = count - 1 - i, its = later ? draw(random, 1, tokens - first - later) : tokens - first;
        const bool moves = count < pages && coin(random);
        pieces[i] = {nullptr, 0, static_cast<int32_t>(its), static_cast<int32_t>(first),
                     moves ? order[draw(random, count, pages - 1)] : order[i], order[i]};
        first += its;
    }
    return pieces;
}

// The same tokens, each as a piece of its own, and its place among all.
template <typename Call>
void one_by_one(const std::vector<SwitchyardPiece> &pieces, const Call &call) {
    for (const SwitchyardPiece &piece : pieces)
        for (int32_t token = 0; token < piece.tokens; ++token)
            call({nullptr, 0, 1, 0, token ? piece.next_state : piece.state, piece.next_state}, piece.first + token);
}

void try_delta(SwitchyardPool *pool, Random &random, int32_t format) {
    SwitchyardDelta layer{};
    layer.hidden = static_cast<int32_t>(draw(random, 1, 150));
    layer.key_heads = static_cast<int32_t>(draw(random, 1, 4));
    layer.value_heads = layer.key_heads * static_cast<int32_t>(draw(random, 1, 3));
    layer.key_dim = static_cast<int32_t>(draw(random, 1, 40));
    layer.value_dim = static_cast<int32_t>(draw(random, 1, 90));
    layer.kernel = static_cast<int32_t>(draw(random, 1, 5));
    layer.epsilon = layer.out_epsilon = 1e-6f;
    layer.norm_offset = static_cast<float>(coin(random));
    layer.multiple = coin(random) ? 0.5f : 0.0f;
    // 2: decays of each key, matrices of each part; 3: a state space; 4: a convolution
    const int32_t kind = static_cast<int32_t>(draw(random, 0, 4));
    const bool together = kind == 0;
    if (kind == 2) layer.key_heads = layer.value_heads, layer.decays_keys = layer.gates_once = 1;
    if (kind == 3) layer.rule = SWITCHYARD_STATE_SPACE;
    if (kind == 4) layer.rule = SWITCHYARD_CONVOLUTION, layer.key_heads = layer.value_heads, layer.key_dim = 0;
    const int64_t hidden = layer.hidden, heads = layer.value_heads, values = heads * layer.value_dim;
    const int64_t keys = int64_t{layer.key_heads} * layer.key_dim, channels = 2 * keys + values, inner = draw(random, 1, 50);
    const int64_t mixed_rows[] = {channels + values, channels, keys, channels + values + heads, 3 * values};
    const OwnMatrix mixed(pool, random, mixed_rows[kind], hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix k(pool, random, std::max<int64_t>(keys, 1), hidden, format, SWITCHYARD_PLAIN), v(pool, random, values, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix first(pool, random, inner, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix later_z(pool, random, values, inner, format, SWITCHYARD_PLAIN);
    const OwnMatrix later_a(pool, random, std::max<int64_t>(keys, 1), inner, format, SWITCHYARD_PLAIN);
    const OwnMatrix z(pool, random, values, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix b(pool, random, together ? 2 * heads : heads, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix a(pool, random, heads, hidden, format, SWITCHYARD_PLAIN);
    const OwnMatrix o(pool, random, hidden, values, format, SWITCHYARD_PLAIN);
    layer.mixed = mixed.matrix, layer.o = o.matrix;
    if (kind < 3) layer.b = b.matrix;
    if (kind == 1) layer.z = z.matrix, layer.a = a.matrix;
    if (kind == 2) {
        layer.k = k.matrix, layer.v = v.matrix, layer.z_first = layer.a_first = first.matrix;
        layer.z = later_z.matrix, layer.a = later_a.matrix;
    }
    const auto norm = draw_row(random, hidden);
    const auto taps = draw_floats(random, channels * layer.kernel);
    const auto out_norm = draw_row(random, values);
    const auto tap_bias = draw_floats(random, channels), skip = draw_floats(random, heads);
    if (coin(random)) layer.tap_bias = tap_bias.data();
    layer.skip = skip.data();
    auto rate = draw_floats(random, heads);
    const auto rate_bias = draw_floats(random, std::max(heads, keys));
    for (float &each : rate) each = -std::fabs(each);
    layer.norm = norm.data(), layer.taps = taps.data(), layer.out_norm = out_norm.data();
    layer.rate = rate.data(), layer.rate_bias = rate_bias.data();
    const auto tokens = static_cast<int32_t>(draw(random, 1, kDecodeTokens));
    const auto x = draw_floats(random, tokens * hidden);
    const int64_t pages = draw(random, 1, 6);
    OwnStates states = {draw_floats(random, pages * channels * layer.kernel),
                        draw_floats(random, pages * heads * layer.key_dim * layer.value_dim)};
    OwnStates states_again = states;
    const SwitchyardPages held = states.held(), held_again = states_again.held();
    const auto pieces = draw_pieces(random, pages, draw(random, 1, std::min<int64_t>(pages, tokens)), tokens);
    std::vector<float> out(x.size()), again(x.size());
    require(switchyard_delta_step(pool, &layer, &held, pieces.data(), static_cast<int32_t>(pieces.size()), x.data(),
                                  out.data()) == 0, "no delta net");
    const OwnPool alone(1);
    one_by_one(pieces, [&](const SwitchyardPiece &one, int64_t place) {
        require(switchyard_delta_step(alone.pool, &layer, &held_again, &one, 1, x.data() + place * hidden,
                                      again.data() + place * hidden) == 0, "no delta net");
    });
    require(same(out, again) && same(states, states_again),
            "a delta net depends on the number of threads, or on what is computed together");
    record("delta", in_bf16(out));

    // Prompts', whose projections are done.
    const int64_t rows = draw(random, 1, draw(random, 0, 3) ? 40 : 300);
    const auto prompts = draw_pieces(random, pages, draw(random, 1, std::min<int64_t>({pages, rows, 3})), rows);
    const auto of_mixed = draw_floats(random, rows * layer.mixed.rows), of_z = draw_floats(random, rows * layer.z.rows);
    const auto of_k = draw_floats(random, rows * layer.k.rows), of_v = draw_floats(random, rows * layer.v.rows);
    const auto of_b = draw_floats(random, rows * layer.b.rows), of_a = draw_floats(random, rows * layer.a.rows);
    std::vector<float> answers(static_cast<size_t>(rows * values)), answers_again(answers);
    const auto some = [&](SwitchyardPool *by, const SwitchyardPages &in, const SwitchyardPiece &piece, int64_t place,
                          std::vector<float> &to) {
        std::vector<const float *> given(6);
        const std::pair<const std::vector<float> *, const SwitchyardMatrix *> parts[6] = {
            {&of_mixed, &layer.mixed}, {&of_k, &layer.k}, {&of_v, &layer.v}, {&of_z, &layer.z}, {&of_b, &layer.b}, {&of_a, &layer.a}};
        for (int i = 0; i < 6; ++i)
            if (parts[i].second->rows) given[i] = parts[i].first->data() + place * parts[i].second->rows;
        require(switchyard_delta_rows(by, &layer, &in, &piece, given.data(), to.data() + place * values) == 0,
                "no prompt of a delta net");
    };
    for (const SwitchyardPiece &piece : prompts) some(pool, held, piece, piece.first, answers);
    one_by_one(prompts, [&](const SwitchyardPiece &one, int64_t place) {
        some(alone.pool, held_again, one, place, answers_again);
    });
    require(same(answers, answers_again) && same(states, states_again),
            "a delta net's prompt depends on the number of threads, or on what is computed together");
}

// Two sequences whose tokens come in one call and in several; pages in any order.
void try_paged(SwitchyardPool *pool, Random &random) {
    SwitchyardPagedLayer layer{};
    layer.held.page_tokens = kPageTokens;
    layer.kv_heads = static_cast<int32_t>(draw(random, 1, 3));
    layer.heads = layer.kv_heads * static_cast<int32_t>(draw(random, 1, 5));
    layer.key_dim = static_cast<int32_t>(draw(random, 1, 70));
    layer.value_dim = static_cast<int32_t>(draw(random, 1, 70));
    layer.held.type = static_cast<int32_t>(draw(random, 0, 3));
    layer.scale = 0.2f;
    if (coin(random)) layer.softcap = 5.0f;
    if (coin(random)) layer.held.window = static_cast<int32_t>(draw(random, 1, 90));
    if (coin(random)) layer.held.kept = static_cast<int32_t>(draw(random, 1, 40));
    const std::vector<float> sinks(static_cast<size_t>(layer.heads), 0.3f);
    if (coin(random)) layer.sinks = sinks.data();
    const size_t element = layer.held.type == SWITCHYARD_KV_FP32 ? 4 : layer.held.type == SWITCHYARD_KV_INT8 ? 1 : 2;
    const int32_t order[2][4] = {{5, 0, 3, 6}, {7, 2, 1, 4}};
    const auto slots = static_cast<size_t>(8 * kPageTokens * layer.kv_heads);
    std::vector<uint8_t> keys(slots * layer.key_dim * element), values(slots * layer.value_dim * element);
    std::vector<float> key_scales(slots), value_scales(slots);
    layer.held.keys = keys.data(), layer.held.values = values.data();
    if (layer.held.type == SWITCHYARD_KV_INT8) layer.held.key_scales = key_scales.data(), layer.held.value_scales = value_scales.data();
    int64_t held[2] = {0, 0};
    for (int call = 0; call < 3; ++call) {
        const auto first = static_cast<int32_t>(draw(random, 1, 40)), second = static_cast<int32_t>(draw(random, 1, 40));
        const SwitchyardPiece pieces[2] = {{order[0], held[0], first, 0}, {order[1], held[1], second, first}};
        const int64_t tokens = first + second, width = int64_t{layer.kv_heads} * layer.key_dim;
        const auto draw_finite = [&](int64_t count) {
            std::vector<float> row(static_cast<size_t>(count));
            for (auto &value : row) value = static_cast<float>(draw(random, -1000, 1000)) * 1e-3f;
            return row;
        };
        const auto q = draw_finite(tokens * layer.heads * layer.key_dim), k = draw_finite(tokens * width);
        const auto v = draw_finite(tokens * layer.kv_heads * layer.value_dim);
        const SwitchyardStates of_q = {q.data(), int64_t{layer.heads} * layer.key_dim, layer.key_dim, 1};
        const SwitchyardStates of_k = {k.data(), width, layer.key_dim, 1};
        const SwitchyardStates of_v = {v.data(), int64_t{layer.kv_heads} * layer.value_dim, layer.value_dim, 1};
        std::vector<float> out(static_cast<size_t>(tokens * layer.heads * layer.value_dim));
        require(switchyard_paged_attention(pool, &layer, pieces, 2, &of_q, &of_k, &of_v, out.data()) == 0,
                "no paged attention");
        std::vector<uint16_t> halves;
        for (const float number : out) {
            uint32_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            halves.push_back(static_cast<uint16_t>(bits >> 16));
        }
        record("paged", halves);
        held[0] += first, held[1] += second;
    }
}

// Queries and values that lie token by token or head by head; every token sees what comes before it, or any range.
void try_prompt(SwitchyardPool *pool, Random &random) {
    SwitchyardPrompt prompt{};
    prompt.kv_heads = static_cast<int32_t>(draw(random, 1, 3));
    prompt.heads = prompt.kv_heads * static_cast<int32_t>(draw(random, 1, 4));
    prompt.key_dim = static_cast<int32_t>(draw(random, 1, 70));
    prompt.value_dim = static_cast<int32_t>(draw(random, 1, 70));
    prompt.scale = 0.2f;
    prompt.tokens = draw(random, 1, draw(random, 0, 3) ? 40 : 150);
    prompt.held = prompt.tokens + draw(random, 0, 90);
    const int64_t heads = prompt.heads, kv_heads = prompt.kv_heads, tokens = prompt.tokens, held = prompt.held;
    const auto finite_row = [&](int64_t count) {
        std::vector<uint16_t> row(static_cast<size_t>(count));
        for (auto &value : row) {
            const float number = static_cast<float>(draw(random, -1000, 1000)) * 1e-3f;
            uint32_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            value = static_cast<uint16_t>(bits >> 16);
        }
        return row;
    };
    const auto queries = finite_row(tokens * heads * prompt.key_dim), keys = finite_row(held * kv_heads * prompt.key_dim);
    const auto values = finite_row(held * kv_heads * prompt.value_dim);
    prompt.queries = queries.data(), prompt.keys = keys.data(), prompt.values = values.data();
    const bool by_token = coin(random) != 0;
    prompt.query_token = by_token ? heads * prompt.key_dim : prompt.key_dim;
    prompt.query_head = by_token ? prompt.key_dim : tokens * prompt.key_dim;
    prompt.key_head = held * prompt.key_dim;
    prompt.value_token = by_token ? kv_heads * prompt.value_dim : prompt.value_dim;
    prompt.value_head = by_token ? prompt.value_dim : held * prompt.value_dim;
    std::vector<uint8_t> sees(static_cast<size_t>(tokens * held));
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t from = draw(random, 0, held - 1), to = draw(random, from + 1, held);
        std::fill(sees.begin() + token * held + from, sees.begin() + token * held + to, uint8_t{1});
    }
    if (coin(random)) prompt.sees = sees.data(), prompt.sees_token = held;
    std::vector<uint16_t> out(static_cast<size_t>(tokens * heads * prompt.value_dim)), again(out);
    require(switchyard_prompt_attention(pool, &prompt, out.data()) == 0, "no attention of a prompt");
    const OwnPool alone(1);
    require(switchyard_prompt_attention(alone.pool, &prompt, again.data()) == 0, "no attention of a prompt");
    require(out == again, "a prompt's attention depends on the number of threads");
    record("prompt", out);
    if (!prompt.sees) return;
    std::fill(sees.begin(), sees.begin() + held, uint8_t{0});  // a token that sees nothing
    require(switchyard_prompt_attention(pool, &prompt, out.data()) == 2, "attention of nothing");
}

void try_reading(SwitchyardPool *pool, Random &random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(draw(random, 0, 300000)), 1);
    const uint64_t sum = switchyard_read_memory(pool, bytes.data(), static_cast<int64_t>(bytes.size()));
    require(bytes.size() < 64 || sum != 0, "nothing was read");
}

// Any bytes are blocks; gate and up rows lie apart, one of them in another order.
void try_repack(SwitchyardPool *pool, Random &random, int32_t format) {
    const bool one_tile = format == SWITCHYARD_LUT4;  // as in OwnMatrix: fitting would be all that a sanitizer sees
    for (const RowType &type : kPortableRows) {
        const int64_t pairs = draw(random, 1, one_tile ? 20 : 40);
        const int64_t columns = one_tile ? std::max<int64_t>(type.elements, 32) : 256 * draw(random, 1, 3);
        OwnMatrix own(pool, random, 2 * pairs, columns, format, SWITCHYARD_HALVES);
        std::vector<uint8_t> gate(static_cast<size_t>(pairs * columns / type.elements * type.bytes)), up(gate);
        for (auto *bytes : {&gate, &up})
            for (auto &byte : *bytes) byte = static_cast<uint8_t>(draw(random, 0, 255));
        std::vector<int64_t> order(static_cast<size_t>(pairs));
        for (auto &row : order) row = draw(random, 0, pairs - 1);
        const SwitchyardRepack job = {
            own.matrix, {gate.data(), nullptr, type.number, nullptr}, {up.data(), order.data(), type.number, nullptr}};
        require(switchyard_repack(pool, &job, 1, static_cast<int32_t>(draw(random, 0, 4))) == 0, "not repacked");
        std::vector<uint16_t> out(static_cast<size_t>(pairs * columns));
        require(switchyard_unpack(pool, &job.second, pairs, columns, 0, out.data()) == 0, "not unpacked");
        record("unpacked", out);
        std::vector<float> floats(out.size());
        require(switchyard_unpack(pool, &job.first, pairs, columns, 1, floats.data()) == 0, "not unpacked");
    }
}

// Any words are codes, and any numbers their scales.
void try_codes(SwitchyardPool *pool, Random &random) {
    for (const int32_t arrangement : {SWITCHYARD_ROWS, SWITCHYARD_COLUMNS, SWITCHYARD_AWQ})
        for (const int32_t bits : {2, 4, 8}) {
            const bool is_awq = arrangement == SWITCHYARD_AWQ;
            if (is_awq && bits != 4) continue;
            const int64_t rows = 8 * draw(random, 1, 9), group = 32 * draw(random, 1, 3), columns = group * draw(random, 1, 3);
            OwnMatrix own(pool, random, rows, columns, bits == 8 ? SWITCHYARD_INT8 : SWITCHYARD_INT4, SWITCHYARD_PLAIN);
            std::vector<uint32_t> words(static_cast<size_t>(rows * columns * bits / 32));
            for (auto &word : words)
                word = static_cast<uint32_t>(draw(random, 0, 0xffff)) << 16 | static_cast<uint32_t>(draw(random, 0, 0xffff));
            std::vector<float> scales(static_cast<size_t>(rows * columns / group)), others(scales);
            for (auto &scale : scales) scale = static_cast<float>(draw(random, 0, 4)) * 0.01f;
            for (auto &other : others) other = static_cast<float>(draw(random, -20, 20));
            const bool adds = bits < 8 && draw(random, 0, 1) == 1;
            const int64_t stride = arrangement == SWITCHYARD_ROWS ? columns * bits / 32 : is_awq ? rows / 8 : rows;
            const SwitchyardCodes codes = {reinterpret_cast<const uint8_t *>(words.data()), scales.data(),
                                           adds || bits == 8 ? nullptr : others.data(), adds ? others.data() : nullptr,
                                           stride, group, arrangement, bits, 1};
            const SwitchyardRepack job = {own.matrix, {nullptr, nullptr, -1, &codes}, {}};
            require(switchyard_repack(pool, &job, 1, 8) == 0, "codes not repacked");
        }
}

// A matrix so large that the pool wakes its workers for long work.
void try_large(SwitchyardPool *pool, Random &random) {
    for (const int32_t format : {SWITCHYARD_INT8, SWITCHYARD_INT4, SWITCHYARD_LUT4}) {
        const OwnMatrix own(pool, random, 1024, 640, format, SWITCHYARD_HALVES);
        std::vector<uint16_t> out(own.plain.size());
        require(switchyard_dequantise(pool, &own.matrix, 0, 32, out.data()) == 0, "not expanded");
    }
}

void go_through(SwitchyardPool *pool, uint32_t seed, int rounds) {
    Random random(seed);
    for (int round = 0; round < rounds; ++round)
        for (const int32_t format : {SWITCHYARD_BF16, SWITCHYARD_INT8, SWITCHYARD_INT4, SWITCHYARD_LUT4}) {
            try_linear(pool, random, format);
            if (format != SWITCHYARD_BF16) try_repack(pool, random, format);
            if (format == SWITCHYARD_INT4) try_codes(pool, random);
            try_experts(pool, random, format);
            try_sparse(pool, random, format);
            try_attention(pool, random, format);
            try_latent(pool, random, format);
            try_compressed(pool, random, format);
            try_delta(pool, random, format);
            try_model(pool, random, format);
            try_blocks(pool, random);
            try_block_experts(pool, random);
            try_paged(pool, random);
            try_prompt(pool, random);
            try_reading(pool, random);
        }
    try_large(pool, random);
}

}  // namespace
