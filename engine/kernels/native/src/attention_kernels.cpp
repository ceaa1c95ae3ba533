// A few tokens of one sequence, or of several, through a layer's attention: norm, projections, rotary embedding, KV, attention, output and residual.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "block_index.h"
#include "cached_attention.h"
#include "dispatch.h"
#include "held_rows.h"
#include "matrix.h"
#include "rows.h"
#include "stamps.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

struct AttentionStep {
    const SwitchyardAttention *layer;
    Kernels kernels;
    const SwitchyardPages *held;
    int32_t tokens;
    const float *hidden;
    const float *cos, *sin;
    int64_t angle_step, token_step;
    float *out;
    std::vector<int32_t> all;      // 0, 1, ..., tokens - 1
    std::vector<float> normed;     // [tokens, hidden]
    Vectors x;                     // the same, for the projections
    std::vector<float> projected;  // q, k and v: [tokens, (heads + 2 kv_heads) * head_dim]
    PieceAttention attention;
    BlockIndex index;
    std::vector<float> attended;   // [tokens, heads * head_dim]
    Vectors attended_x;            // the same, for the output
    std::vector<float> joined;     // [tokens, hidden]: what a norm after it takes

    int64_t query_step() const { return layer->is_gated ? 2 * layer->head_dim : layer->head_dim; }
    int64_t width() const { return layer->heads * query_step() + int64_t{2 * layer->kv_heads} * layer->head_dim; }
    int64_t heads() const { return layer->heads + 2 * layer->kv_heads; }

    HeldHead head_of(int64_t kv_head) const { return {*held, layer->kv_heads, kv_head}; }
    HeldRows rows_of(const SwitchyardPiece &piece, int64_t kv_head) const {
        return head_of(kv_head).rows_of(piece.pages, layer->head_dim, layer->head_dim);
    }
};

struct AttentionRun {
    AttentionStep &step;
    Phase norm, projections, long_norms, heads, scoring, choosing, attention, joining, spreading, output, after;

    AttentionRun(AttentionStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          projections(blocks_of(step.layer->q) + blocks_of(step.layer->k) + blocks_of(step.layer->v) + step.index.blocks(),
                      threads, 1),
          long_norms(step.layer->norms_span_heads ? 2 * step.tokens : 0, threads, 1),
          heads(step.tokens * (step.heads() + step.index.heads()), threads, 1),
          scoring(step.index.scoring(), threads, 1),
          choosing(step.index.choosing(), threads, 1),
          attention(step.attention.items(), threads, 1),
          joining(int64_t{step.tokens} * step.layer->heads, threads, 4),
          spreading(step.tokens, threads, 1),
          output(blocks_of(step.layer->o), threads, 1),
          after(step.layer->after_norm ? step.tokens : 0, threads, 1) {}
};

// Blocks of q, k and v, one after the other.
void projection_blocks(AttentionStep &step, int64_t begin, int64_t end) {
    const auto &layer = *step.layer;
    const int64_t width = step.width(), of_all = blocks_of(layer.q) + blocks_of(layer.k) + blocks_of(layer.v);
    for (int64_t item = begin; item < end; ++item) {
        if (item >= of_all) {
            step.index.project(step.kernels, item - of_all, step.x, step.all.data());
            continue;
        }
        int64_t block = item, place = 0;
        const SwitchyardMatrix *weight = &layer.q;
        const uint16_t *bias = layer.q_bias;
        for (const SwitchyardMatrix *next : {&layer.k, &layer.v}) {
            if (block < blocks_of(*weight)) break;
            block -= blocks_of(*weight);
            place += weight->rows;
            weight = next;
            bias = next == &layer.k ? layer.k_bias : layer.v_bias;
        }
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, *weight, block, step.x, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight->rows - row);
        for (int64_t token = 0; token < step.tokens; ++token) {
            float *to = &step.projected[token * width + place + row];
            const float *from = dots + token * kTileRows;
            for (int64_t i = 0; i < rows; ++i) to[i] = from[i] + (bias ? from_bf16(bias[row + i]) : 0.0f);
            if (weight == &layer.k && layer.v.rows == 0) std::copy_n(to, rows, to + layer.k.rows);
        }
    }
}

// The norm of all queries of a token together (0) or of all its keys (1).
void norm_all(AttentionStep &step, int64_t token, int64_t which) {
    const auto &layer = *step.layer;
    const int64_t queries = int64_t{layer.heads} * layer.head_dim, keys = int64_t{layer.kv_heads} * layer.head_dim;
    float *x = &step.projected[token * step.width() + (which ? layer.heads * step.query_step() : 0)];
    rms_norm(x, which ? layer.k_norm : layer.q_norm, layer.epsilon, which ? keys : queries, x, layer.norm_offset);
}

// One projected head: a query is kept, keys and values go to their rows.
void prepare_head(AttentionStep &step, int64_t token, int64_t head) {
    const auto &layer = *step.layer;
    if (head >= step.heads()) {
        const int64_t angles = token * step.token_step;
        step.index.prepare(token, head - step.heads(), [&](float *x) {
            rotate_head(x, layer.rotated, layer.rotation, step.cos + angles, step.sin + angles, step.angle_step);
        });
        return;
    }
    const int64_t dim = layer.head_dim, after = std::max<int64_t>(head - layer.heads, 0);
    float *x = &step.projected[token * step.width() + (head - after) * step.query_step() + after * dim];
    const auto keep = [&](int64_t kv_head, void *rows, float *scales) {
        const int64_t row = step.head_of(kv_head).row_of(step.attention.piece_of(token).pages, step.attention.position_of(token));
        write_row(step.held->type, x, dim, row, rows, scales);
    };
    if (head >= layer.heads + layer.kv_heads) {
        if (layer.norms_values) rms_norm(x, static_cast<const float *>(nullptr), layer.epsilon, dim, x);
        keep(head - layer.heads - layer.kv_heads, step.held->values, step.held->value_scales);
        return;
    }
    const bool is_query = head < layer.heads;
    const uint16_t *norm = is_query ? layer.q_norm : layer.k_norm;
    const bool has_norm = norm && !layer.norms_span_heads;
    if (has_norm && !layer.norms_come_last) rms_norm(x, norm, layer.epsilon, dim, x, layer.norm_offset);
    const int64_t angles = token * step.token_step;
    rotate_head(x, layer.rotated, layer.rotation, step.cos + angles, step.sin + angles, step.angle_step);
    if (has_norm && layer.norms_come_last) rms_norm(x, norm, layer.epsilon, dim, x, layer.norm_offset);
    if (is_query)
        std::copy_n(x, dim, step.attention[token].query(head));
    else
        keep(head - layer.heads, step.held->keys, step.held->key_scales);
}

void join_head(AttentionStep &step, int64_t token, int64_t head) {
    const int64_t dim = step.layer->head_dim;
    float *out = &step.attended[(token * step.layer->heads + head) * dim];
    step.attention[token].finish(head, out);
    if (!step.layer->is_gated) return;
    step.kernels.attention->gate(out, &step.projected[token * step.width() + (2 * head + 1) * dim], dim, false, out);
}

void output_blocks(AttentionStep &step, int64_t begin, int64_t end) {
    const auto &weight = step.layer->o;
    const uint16_t *bias = step.layer->o_bias;
    const bool is_normed = step.layer->after_norm != nullptr;
    const float multiple = step.layer->multiple != 0 ? step.layer->multiple : 1.0f;
    for (int64_t block = begin; block < end; ++block) {
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, weight, block, step.attended_x, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
        for (int64_t token = 0; token < step.tokens; ++token) {
            const int64_t at = token * weight.rows + row;
            const float *from = dots + token * kTileRows;
            for (int64_t i = 0; i < rows; ++i) {
                const float value = from[i] + (bias ? from_bf16(bias[row + i]) : 0.0f);
                if (is_normed)
                    step.joined[at + i] = value;
                else
                    step.out[at + i] = step.hidden[at + i] + multiple * value;
            }
        }
    }
}

void attention_work(void *argument) {
    auto &run = *static_cast<AttentionRun *>(argument);
    auto &step = run.step;
    const auto &layer = *step.layer;
    const int64_t heads = step.heads() + step.index.heads(), dim = layer.head_dim;
    run.norm.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            float *normed = &step.normed[token * layer.hidden];
            rms_norm(step.hidden + token * layer.hidden, layer.norm, layer.epsilon, layer.hidden, normed, layer.norm_offset);
            step.x.set(step.kernels, token, normed);
        }
    });
    run.projections.run([&](int64_t begin, int64_t end) { projection_blocks(step, begin, end); });
    run.long_norms.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) norm_all(step, at / 2, at % 2);
    });
    run.heads.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) prepare_head(step, at / heads, at % heads);
    });
    const auto all_rows = [&](int64_t token, int64_t group) { return step.rows_of(step.attention.piece_of(token), group); };
    run.scoring.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) step.index.score(step.kernels, item);
    });
    run.choosing.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
            step.index.choose(item, all_rows(item / layer.kv_heads, item % layer.kv_heads));
    });
    run.attention.run([&](int64_t begin, int64_t end) {
        const auto rows = [&](int64_t token, int64_t group) { return step.index.chosen(token, group, all_rows(token, group)); };
        for (int64_t item = begin; item < end; ++item) step.attention.run(item, step.held->type, rows);
    });
    run.joining.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) join_head(step, at / layer.heads, at % layer.heads);
    });
    run.spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            step.attended_x.set(step.kernels, token, &step.attended[token * layer.heads * dim]);
    });
    run.output.run([&](int64_t begin, int64_t end) { output_blocks(step, begin, end); });
    run.after.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t at = token * layer.hidden;
            add_normed(step.hidden + at, &step.joined[at], layer.after_norm, layer.epsilon, layer.hidden, step.out + at,
                       layer.norm_offset);
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_attention_step(SwitchyardPool *pool, const SwitchyardAttention *attention,
                                                 const SwitchyardPages *held, const SwitchyardPiece *pieces,
                                                 int32_t count, const float *hidden, const float *cos,
                                                 const float *sin, int32_t angle_step, int64_t token_step,
                                                 float *out) try {
    const Stamp stamp(attention);
    static thread_local AttentionStep step;
    const int64_t dim = attention->head_dim, heads = attention->heads, kv_heads = attention->kv_heads;
    step.layer = attention;
    step.kernels = kernels_in_use();
    step.held = held;
    step.attention.resize(*held, pieces, count, heads, kv_heads, attention->scale, step.rows_of(*pieces, 0), attention->sinks,
                          attention->index ? Few{attention->index->most, attention->index->block_tokens} : Few{});
    const int32_t tokens = step.tokens = step.attention.tokens();
    step.hidden = hidden;
    step.cos = cos;
    step.sin = sin;
    step.angle_step = angle_step;
    step.token_step = token_step;
    step.out = out;
    step.all.resize(static_cast<size_t>(tokens));
    std::iota(step.all.begin(), step.all.end(), 0);
    step.normed.resize(static_cast<size_t>(tokens * int64_t{attention->hidden}));
    step.index.resize(*attention, *held, step.attention, tokens);
    if (attention->index)
        step.x.resize({&attention->q, &attention->k, &attention->v, &attention->index->q, &attention->index->k}, tokens,
                      attention->hidden);
    else
        step.x.resize({&attention->q, &attention->k, attention->v.rows ? &attention->v : &attention->k}, tokens, attention->hidden);
    step.attended_x.resize({&attention->o}, tokens, heads * dim);
    step.projected.resize(static_cast<size_t>(tokens * step.width()));
    step.attended.resize(static_cast<size_t>(tokens * heads * dim));
    if (attention->after_norm) step.joined.resize(static_cast<size_t>(tokens * int64_t{attention->hidden}));
    AttentionRun run(step, pool->threads());
    int64_t weights = 0;
    for (const SwitchyardMatrix *matrix : {&attention->q, &attention->k, &attention->v, &attention->o})
        weights += bytes_of(*matrix);
    if (attention->index) weights += bytes_of(attention->index->q) + bytes_of(attention->index->k);
    // A step of several tokens takes longer for what it reads: not to be compared with a step of one.
    const int64_t read = 2 * size_of_number(held->type) * kv_heads * dim * step.attention.held();
    pool->run(attention_work, &run, tokens * weights + read);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
