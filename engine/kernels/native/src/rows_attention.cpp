// The attention of one layer for the new tokens of many sequences, their keys and values in pages.
#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "paged_call.h"
#include "row_products.h"
#include "rows.h"
#include "rows_kernels.h"

namespace {

struct Buffers {
    std::vector<uint16_t> normed;     // [tokens, hidden]
    RowProducts x;                    // the same, for the projections
    std::vector<float> projected;     // q, k and v: [tokens, (heads + 2 kv_heads) * head_dim]
    std::vector<uint16_t> attended;   // [tokens, heads * head_dim]
    RowProducts attended_x;           // the same, for the output
    std::vector<float> joined;        // [tokens, hidden]: what a norm after it takes
};

struct AttentionRows {
    const SwitchyardAttention &layer;
    const PagedCall &call;
    Buffers &own;
    const float *hidden;
    const float *cos, *sin;
    int64_t token_step;
    float *out;
    int64_t dim, queries, keys, width;
    Phase norms, projections, heads, attention, spreading, output, after;

    AttentionRows(const SwitchyardAttention &layer, const PagedCall &call, Buffers &own, const float *hidden,
                  const float *cos, const float *sin, int64_t token_step, float *out, int threads)
        : layer(layer), call(call), own(own), hidden(hidden), cos(cos), sin(sin), token_step(token_step), out(out),
          dim(layer.head_dim), queries(layer.heads * dim), keys(layer.kv_heads * dim), width(queries + 2 * keys),
          norms(own.x.tiles(), threads, 1),
          projections(blocks_of(layer.q) + blocks_of(layer.k) + blocks_of(layer.v), threads, 1),
          heads(call.tokens, threads, 1),
          attention(call.items(), threads, 1),
          spreading(own.attended_x.tiles(), threads, 1),
          output(blocks_of(layer.o), threads, 1),
          after(layer.after_norm ? call.tokens : 0, threads, 1) {}

    void norm_tile(int64_t tile) {
        const int64_t first = tile * own.x.lanes(), last = std::min(first + own.x.lanes(), call.tokens);
        for (int64_t token = first; token < last; ++token)
            rms_norm(hidden + token * layer.hidden, layer.norm, layer.epsilon, layer.hidden,
                     &own.normed[token * layer.hidden], layer.norm_offset);
        own.x.set(tile, own.normed.data());
    }

    // Blocks of q, k and v, one after the other.
    void project(int64_t item) {
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
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight->rows - row);
        own.x.block(*weight, block, [&](int64_t first, int64_t some, const float *dots) {
            for (int64_t v = 0; v < some; ++v) {
                float *to = &own.projected[(first + v) * width + place + row];
                for (int64_t i = 0; i < rows; ++i)
                    to[i] = dots[v * kTileRows + i] + (bias ? from_bf16(bias[row + i]) : 0.0f);
            }
        });
    }

    // Norms and rotations of a token's heads; keys and values go to their pages.
    void prepare(int64_t token) {
        float *x = &own.projected[token * width];
        if (layer.norms_span_heads) {
            rms_norm(x, layer.q_norm, layer.epsilon, queries, x, layer.norm_offset);
            rms_norm(x + queries, layer.k_norm, layer.epsilon, keys, x + queries, layer.norm_offset);
        }
        for (int64_t head = 0; head < layer.heads + layer.kv_heads; ++head) {
            float *mine = x + head * dim;
            const uint16_t *norm = head < layer.heads ? layer.q_norm : layer.k_norm;
            const bool has_norm = norm && !layer.norms_span_heads;
            if (has_norm && !layer.norms_come_last) rms_norm(mine, norm, layer.epsilon, dim, mine, layer.norm_offset);
            rotate_head(mine, layer.rotated, layer.rotation, cos + token * token_step, sin + token * token_step, 1);
            if (has_norm && layer.norms_come_last) rms_norm(mine, norm, layer.epsilon, dim, mine, layer.norm_offset);
        }
        call.write(token, call.piece_of(token), x + queries, x + queries + keys);
    }

    void put_out(int64_t block) {
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, layer.o.rows - row);
        const uint16_t *bias = layer.o_bias;
        const float multiple = layer.multiple != 0 ? layer.multiple : 1.0f;
        own.attended_x.block(layer.o, block, [&](int64_t first, int64_t some, const float *dots) {
            for (int64_t v = 0; v < some; ++v) {
                const int64_t at = (first + v) * layer.hidden + row;
                for (int64_t i = 0; i < rows; ++i) {
                    const float value = dots[v * kTileRows + i] + (bias ? from_bf16(bias[row + i]) : 0.0f);
                    if (layer.after_norm)
                        own.joined[at + i] = value;
                    else
                        out[at + i] = hidden[at + i] + multiple * value;
                }
            }
        });
    }

    void work() {
        static thread_local std::vector<float> room;
        const auto each = [](Phase &phase, auto body) {
            phase.run([&](int64_t begin, int64_t end) {
                for (int64_t item = begin; item < end; ++item) body(item);
            });
        };
        each(norms, [&](int64_t tile) { norm_tile(tile); });
        each(projections, [&](int64_t item) { project(item); });
        each(heads, [&](int64_t token) { prepare(token); });
        const auto query = [&](int64_t token, int64_t head, float *q) {
            std::copy_n(&own.projected[token * width + head * dim], dim, q);
        };
        const auto result = [&](int64_t token, int64_t head, const float *x) {
            uint16_t *to = &own.attended[token * queries + head * dim];
            for (int64_t i = 0; i < dim; ++i) to[i] = to_bf16(x[i]);
        };
        each(attention, [&](int64_t item) { call.attend(item, room, query, result); });
        each(spreading, [&](int64_t tile) { own.attended_x.set(tile, own.attended.data()); });
        each(output, [&](int64_t block) { put_out(block); });
        each(after, [&](int64_t token) {
            const int64_t at = token * layer.hidden;
            add_normed(hidden + at, &own.joined[at], layer.after_norm, layer.epsilon, layer.hidden, out + at,
                       layer.norm_offset);
        });
    }
};

void work(void *argument) { static_cast<AttentionRows *>(argument)->work(); }

}  // namespace

SWITCHYARD_API int32_t switchyard_attention_rows(SwitchyardPool *pool, const SwitchyardAttention *layer,
                                                 const SwitchyardPagedLayer *paged, const SwitchyardPiece *pieces,
                                                 int32_t count, const float *hidden, const float *cos,
                                                 const float *sin, int64_t token_step, float *out) try {
    static thread_local Buffers own;
    const PagedCall call(*paged, pieces, count);
    const Kernels kernels = kernels_for_many();
    const int64_t dim = layer->head_dim, queries = layer->heads * dim;
    const auto tokens = static_cast<size_t>(call.tokens);
    own.normed.resize(tokens * static_cast<size_t>(layer->hidden));
    own.x.resize(kernels, {&layer->q, &layer->k, &layer->v}, call.tokens);
    own.projected.resize(tokens * static_cast<size_t>(queries + 2 * layer->kv_heads * dim));
    own.attended.resize(tokens * static_cast<size_t>(queries));
    if (layer->after_norm) own.joined.resize(own.normed.size());
    own.attended_x.resize(kernels, {&layer->o}, call.tokens);
    int64_t weights = 0;
    for (const SwitchyardMatrix *matrix : {&layer->q, &layer->k, &layer->v, &layer->o}) weights += bytes_of(*matrix);
    AttentionRows rows(*layer, call, own, hidden, cos, sin, token_step, out, pool->threads());
    pool->run_long(work, &rows, weights * call.tokens + call.bytes);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
