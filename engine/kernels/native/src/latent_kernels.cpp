// A few tokens of one sequence, or of several, through multi-head latent attention (DeepSeek-V2, section 2.1): what is held
// of each token is a latent vector and a rotary key, shared by all heads.  Keys and values are never expanded: the matrix that turns latents into
// keys is applied to the query instead, the one that turns them into values to the weighted sum of latents.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "cached_attention.h"
#include "dispatch.h"
#include "held_rows.h"
#include "matrix.h"
#include "rows.h"
#include "stamps.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"
#include "token_index.h"

namespace {

constexpr int64_t kGathered = 64;  // rows that a thread copies at once

struct LatentStep {
    const SwitchyardLatentAttention *layer;
    Kernels kernels;
    const SwitchyardPages *held;
    int32_t tokens;
    const float *hidden;
    const float *cos, *sin;
    int64_t angle_step, token_step;
    float *out;
    std::vector<int32_t> all;       // 0, 1, ..., tokens - 1
    std::vector<float> normed;      // [tokens, hidden]
    Vectors x;                      // the same, for the projections
    std::vector<float> q_latent;    // [tokens, q_a rows]
    Vectors q_x;                    // the same, normalised
    std::vector<float> queries;     // [tokens, heads, nope + rope]
    std::vector<float> compressed;  // [tokens, rank + rope]
    PieceAttention attention;
    TokenIndex index;
    std::vector<uint16_t> gathered;  // of each token that has chosen some: latents [room, rank] and then rotary keys [room, rope]
    Vectors absorbed_x;             // [tokens, heads], [nope]
    Vectors mixed;                  // [tokens, heads], [rank]
    std::vector<float> attended;    // [tokens, heads * value_dim]
    Vectors attended_x;

    bool has_q_latent() const { return layer->q_a.rows > 0; }
    uint16_t *latents() const { return static_cast<uint16_t *>(held->keys); }
    uint16_t *rotary_keys() const { return static_cast<uint16_t *>(held->values); }
    HeldHead head() const { return {*held, 1, 0}; }
    HeldRows rows_of(const SwitchyardPiece &piece) const {
        HeldRows rows = head().rows_of(piece.pages, layer->rank, layer->rank);
        rows.values = rows.keys;
        rows.further_keys = held->values;
        rows.further_dim = layer->rope;
        return rows;
    }
    // Rows of what a token chooses.
    int64_t room() const { return layer->index ? (layer->index->most + kPageTokens - 1) / kPageTokens * kPageTokens : 0; }
    uint16_t *gathered_of(int64_t token) { return &gathered[token * room() * (layer->rank + layer->rope)]; }
    HeldRows rows_of_token(int64_t token) {
        HeldRows rows = rows_of(attention.piece_of(token));
        if (!index.chosen(token)) return rows;
        rows.keys = rows.values = gathered_of(token);
        rows.further_keys = gathered_of(token) + room() * layer->rank;
        rows.pages = nullptr;
        return rows;
    }
    int64_t gathering() const { return layer->index ? tokens * ((layer->index->most + kGathered - 1) / kGathered) : 0; }
    // The matrix that the hidden state goes through first on its way to queries.
    const SwitchyardMatrix &q_first() const { return has_q_latent() ? layer->q_a : layer->q; }
};

struct LatentRun {
    LatentStep &step;
    Phase norm, first, between, queries, asking, scoring, absorbing, gathering, attention, joining, spreading, output;

    LatentRun(LatentStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          first(blocks_of(step.q_first()) + blocks_of(step.layer->kv_a) + step.index.blocks(), threads, 1),
          between(step.tokens, threads, 1),
          queries((step.has_q_latent() ? blocks_of(step.layer->q) : 0) + step.index.query_blocks(), threads, 1),
          asking(step.index.asking(), threads, 4),
          scoring(step.index.scoring(), threads, 1),
          absorbing(step.index.choosing() + int64_t{step.tokens} * step.layer->heads, threads, 1),
          gathering(step.gathering(), threads, 1),
          attention(step.attention.items(), threads, 1),
          joining(int64_t{step.tokens} * step.layer->heads, threads, 1),
          spreading(step.tokens, threads, 1),
          output(blocks_of(step.layer->o), threads, 1) {}
};

// One block of weight x + bias for all tokens: out [tokens, weight.rows].
void product_block(const LatentStep &step, const SwitchyardMatrix &weight, int64_t block, const Vectors &x,
                   const uint16_t *bias, float *out) {
    float dots[kDecodeTokens * kTileRows];
    block_dot(step.kernels, weight, block, x, step.all.data(), step.tokens, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    for (int64_t token = 0; token < step.tokens; ++token) {
        float *to = out + token * weight.rows + row;
        const float *from = dots + token * kTileRows;
        for (int64_t i = 0; i < rows; ++i) to[i] = from[i] + (bias ? from_bf16(bias[row + i]) : 0.0f);
    }
}

// Rotates [rope] numbers.
void rotate(const LatentStep &step, int64_t token, int32_t kind, float *x) {
    if (kind == 3) return;
    const int64_t half = step.layer->rope / 2, angles = token * step.token_step;
    const float *cos = step.cos + angles, *sin = step.sin + angles;
    if (kind != 1) return rotate_head(x, 2 * half, kind, cos, sin, step.angle_step);
    static thread_local std::vector<float> turned;
    turned.resize(static_cast<size_t>(2 * half));
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos[i * step.angle_step], s = sin[i * step.angle_step];
        turned[i] = a * c - b * s;
        turned[i + half] = b * c + a * s;
    }
    std::copy(turned.begin(), turned.end(), x);
}

// By one thread: normalises a token's latent of the query, and writes its latent and rotary key to their rows.
void between_projections(LatentStep &step, int64_t token) {
    const auto &layer = *step.layer;
    const int64_t row = step.head().row_of(step.attention.piece_of(token).pages, step.attention.position_of(token));
    if (step.has_q_latent()) {
        float *latent = &step.q_latent[token * layer.q_a.rows];
        rms_norm(latent, layer.q_a_norm, layer.q_a_epsilon, layer.q_a.rows, latent);
        step.q_x.set(step.kernels, token, latent);
    }
    float *compressed = &step.compressed[token * layer.kv_a.rows], *key = compressed + layer.rank;
    rms_norm(compressed, layer.kv_norm, layer.kv_epsilon, layer.rank, step.latents() + row * layer.rank);
    rotate(step, token, layer.rotation, key);
    for (int64_t i = 0; i < layer.rope; ++i) step.rotary_keys()[row * layer.rope + i] = to_bf16(key[i]);
    if (step.index.is_own())
        step.index.keep(token, [&](float *x) { rotate(step, token, layer.index->rotation, x); });
}

// The rows of some of the tokens that one has chosen, side by side.
void gather(LatentStep &step, int64_t item) {
    const auto &layer = *step.layer;
    const int64_t token = item % step.tokens, begin = item / step.tokens * kGathered;
    const int32_t *chosen = step.index.chosen(token);
    if (!chosen) return;
    const SwitchyardPiece &piece = step.attention.piece_of(token);
    uint16_t *latents = step.gathered_of(token), *keys = latents + step.room() * layer.rank;
    for (int64_t i = begin; i < std::min<int64_t>(begin + kGathered, layer.index->most); ++i) {
        const int64_t row = step.head().row_of(piece.pages, chosen[i]);
        std::copy_n(step.latents() + row * layer.rank, layer.rank, latents + i * layer.rank);
        std::copy_n(step.rotary_keys() + row * layer.rope, layer.rope, keys + i * layer.rope);
    }
}

// out = sum over i < count of x[i] * row begin + i of the matrix: its transpose times x.
void transposed_product(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t begin, int64_t count,
                        const float *x, float *out) {
    const int64_t columns = matrix.columns;
    if (matrix.format == SWITCHYARD_BF16) {
        kernels.rows->mix_rows(static_cast<const uint16_t *>(matrix.weights) + begin * columns, count, columns, x, out);
        return;
    }
    std::fill_n(out, columns, 0.0f);
    if (matrix.format == SWITCHYARD_BLOCKS) {
        static thread_local std::vector<float> values;
        values.resize(static_cast<size_t>(columns));
        for (int64_t i = 0; i < count; ++i) {
            const StoredRow row = stored_row(*kernels.types, matrix, begin + i);
            row.type->unpack(row.blocks, columns, values.data());
            for (int64_t c = 0; c < columns; ++c) out[c] += x[i] * values[static_cast<size_t>(c)];
        }
        return;
    }
    const auto expand = kernels.tiles[matrix.format]->formats[matrix.format].expand;
    for (int64_t half = begin / kHalfRows; half * kHalfRows < begin + count; ++half) {
        float shares[kHalfRows];
        for (int64_t i = 0; i < kHalfRows; ++i) {
            const int64_t at = half * kHalfRows + i - begin;
            shares[i] = at >= 0 && at < count ? x[at] : 0.0f;
        }
        const TileRow tiles = tile_row(matrix, half / 2);
        const int64_t lower = half % 2;
        for (int64_t group = 0; group < tiles.groups; ++group) {
            uint16_t weights[kHalfRows * kGroup];
            float sums[kGroup];
            expand(half_tile(tiles, kFormats[matrix.format], group, lower), weights);
            kernels.rows->mix_rows(weights, kHalfRows, kGroup, shares, sums);
            const int64_t width = std::min(kGroup, columns - group * kGroup);
            for (int64_t i = 0; i < width; ++i) out[group * kGroup + i] += sums[i];
        }
    }
}

// Rows [begin, begin + count) of the matrix times vector `which`.
void some_rows(const Kernels &kernels, const SwitchyardMatrix &matrix, int64_t begin, int64_t count, const Vectors &x,
               int32_t which, float *out) {
    for (int64_t block = begin / kTileRows; block * kTileRows < begin + count; ++block) {
        float dots[kTileRows];
        block_dot(kernels, matrix, block, x, &which, 1, dots);
        for (int64_t i = 0; i < kTileRows; ++i) {
            const int64_t at = block * kTileRows + i - begin;
            if (at >= 0 && at < count) out[at] = dots[i];
        }
    }
}

// The query of a head as it meets latents and rotary keys.
void absorb(LatentStep &step, int64_t token, int64_t head) {
    const auto &layer = *step.layer;
    const int64_t nope = layer.nope, rope = layer.rope, rank = layer.rank;
    float *query = &step.queries[token * layer.q.rows + head * (nope + rope)];
    float *absorbed = step.attention[token].query(head);
    if (layer.k_b.rows) {
        const int64_t at = token * layer.heads + head;
        step.absorbed_x.set(step.kernels, at, query);
        some_rows(step.kernels, layer.k_b, head * rank, rank, step.absorbed_x, static_cast<int32_t>(at), absorbed);
    } else {
        transposed_product(step.kernels, layer.kv_b, head * (nope + layer.value_dim), nope, query, absorbed);
    }
    rotate(step, token, layer.rotation, query + nope);
    std::copy_n(query + nope, rope, absorbed + rank);
}

void join_head(LatentStep &step, int64_t token, int64_t head) {
    const auto &layer = *step.layer;
    const int64_t at = token * layer.heads + head;
    static thread_local std::vector<float> latent;
    latent.resize(static_cast<size_t>(layer.rank));
    step.attention[token].finish(head, latent.data());
    step.mixed.set(step.kernels, at, latent.data());
    const bool apart = layer.v_b.rows > 0;
    const int64_t first = apart ? head * layer.value_dim : head * (layer.nope + layer.value_dim) + layer.nope;
    some_rows(step.kernels, apart ? layer.v_b : layer.kv_b, first, layer.value_dim, step.mixed, static_cast<int32_t>(at),
              &step.attended[at * layer.value_dim]);
}

void output_block(LatentStep &step, int64_t block) {
    const auto &weight = step.layer->o;
    const uint16_t *bias = step.layer->o_bias;
    float dots[kDecodeTokens * kTileRows];
    block_dot(step.kernels, weight, block, step.attended_x, step.all.data(), step.tokens, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    for (int64_t token = 0; token < step.tokens; ++token) {
        const int64_t at = token * weight.rows + row;
        const float *from = dots + token * kTileRows;
        for (int64_t i = 0; i < rows; ++i)
            step.out[at + i] = step.hidden[at + i] + (from[i] + (bias ? from_bf16(bias[row + i]) : 0.0f));
    }
}

void latent_work(void *argument) {
    auto &run = *static_cast<LatentRun *>(argument);
    auto &step = run.step;
    const auto &layer = *step.layer;
    const int64_t tokens = step.tokens;
    run.norm.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t at = token * layer.hidden;
            rms_norm(step.hidden + at, layer.norm, layer.epsilon, layer.hidden, &step.normed[at]);
            step.x.set(step.kernels, token, &step.normed[at]);
        }
    });
    run.first.run([&](int64_t begin, int64_t end) {
        const int64_t of_queries = blocks_of(step.q_first());
        float *queries = step.has_q_latent() ? step.q_latent.data() : step.queries.data();
        const int64_t of_both = of_queries + blocks_of(layer.kv_a);
        for (int64_t block = begin; block < end; ++block) {
            if (block < of_queries)
                product_block(step, step.q_first(), block, step.x, layer.q_a_bias, queries);
            else if (block < of_both)
                product_block(step, layer.kv_a, block - of_queries, step.x, layer.kv_a_bias, step.compressed.data());
            else
                step.index.project(step.kernels, block - of_both, step.x, step.all.data());
        }
    });
    run.between.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) between_projections(step, token);
    });
    run.queries.run([&](int64_t begin, int64_t end) {
        const int64_t of_queries = step.has_q_latent() ? blocks_of(layer.q) : 0;
        for (int64_t block = begin; block < end; ++block) {
            if (block < of_queries)
                product_block(step, layer.q, block, step.q_x, nullptr, step.queries.data());
            else
                step.index.project_queries(step.kernels, block - of_queries, step.q_x, step.all.data());
        }
    });
    run.asking.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at)
            step.index.ask(at, [&](float *x) { rotate(step, at / layer.index->heads, layer.index->rotation, x); });
    });
    run.scoring.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) step.index.score(step.kernels, item);
    });
    run.absorbing.run([&](int64_t begin, int64_t end) {
        // Tokens next to each other need the same weights, which are still in the cache.  While one thread chooses a token's
        // tokens the others go on.
        const int64_t choosing = step.index.choosing();
        for (int64_t at = begin; at < end; ++at) {
            if (at < choosing)
                step.index.choose(at);
            else
                absorb(step, (at - choosing) % tokens, (at - choosing) / tokens);
        }
    });
    run.gathering.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) gather(step, item);
    });
    run.attention.run([&](int64_t begin, int64_t end) {
        const auto rows = [&](int64_t token, int64_t) { return step.rows_of_token(token); };
        for (int64_t item = begin; item < end; ++item) step.attention.run(item, SWITCHYARD_KV_BF16, rows);
    });
    run.joining.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) join_head(step, at % tokens, at / tokens);
    });
    run.spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            step.attended_x.set(step.kernels, token, &step.attended[token * layer.heads * layer.value_dim]);
    });
    run.output.run([&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) output_block(step, block);
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_latent_step(SwitchyardPool *pool, const SwitchyardLatentAttention *attention,
                                              const SwitchyardPages *held, const SwitchyardPiece *pieces,
                                              int32_t count, const float *hidden, const float *cos, const float *sin,
                                              int32_t angle_step, int64_t token_step, float *out) try {
    const Stamp stamp(attention);
    static thread_local LatentStep step;
    const auto &layer = *attention;
    const int64_t heads = layer.heads;
    step.layer = attention;
    step.kernels = kernels_in_use();
    step.held = held;
    step.attention.resize(*held, pieces, count, heads, 1, layer.scale, step.rows_of(*pieces), nullptr,
                          {layer.index ? layer.index->most : 0, 1});
    const int32_t tokens = step.tokens = step.attention.tokens();
    step.hidden = hidden;
    step.all.resize(static_cast<size_t>(tokens));
    std::iota(step.all.begin(), step.all.end(), 0);
    step.cos = cos;
    step.sin = sin;
    step.angle_step = angle_step;
    step.token_step = token_step;
    step.out = out;
    step.normed.resize(static_cast<size_t>(tokens * int64_t{layer.hidden}));
    const SwitchyardMatrix *const first = layer.q_a.rows ? &layer.q_a : &layer.q;
    step.index.resize(layer.index, *held, step.attention, tokens);
    if (step.index.is_own()) {
        step.x.resize({&layer.kv_a, first, &layer.index->k, &layer.index->weights}, tokens, layer.hidden);
        step.q_x.resize({&layer.q, &layer.index->q}, tokens, layer.q.columns);
    } else {
        step.x.resize({&layer.kv_a, first}, tokens, layer.hidden);
        step.q_x.resize({&layer.q}, tokens, layer.q.columns);
    }
    step.q_latent.resize(static_cast<size_t>(tokens * layer.q_a.rows));
    if (const auto width = static_cast<size_t>(tokens * step.room() * (layer.rank + layer.rope)); step.gathered.size() < width)
        step.gathered.resize(width);
    step.queries.resize(static_cast<size_t>(tokens * layer.q.rows));
    step.compressed.resize(static_cast<size_t>(tokens * layer.kv_a.rows));
    step.mixed.resize({layer.v_b.rows ? &layer.v_b : &layer.kv_b}, tokens * heads, layer.rank);
    if (layer.k_b.rows) step.absorbed_x.resize({&layer.k_b}, tokens * heads, layer.nope);
    step.attended.resize(static_cast<size_t>(tokens * heads * layer.value_dim));
    step.attended_x.resize({&layer.o}, tokens, heads * layer.value_dim);
    LatentRun run(step, pool->threads());
    int64_t weights = 0;
    for (const SwitchyardMatrix *matrix : {&layer.q_a, &layer.q, &layer.kv_a, &layer.kv_b, &layer.k_b, &layer.v_b, &layer.o})
        weights += matrix->rows ? bytes_of(*matrix) : 0;
    if (step.index.is_own()) weights += bytes_of(layer.index->q) + bytes_of(layer.index->k) + bytes_of(layer.index->weights);
    // As in switchyard_attention_step.
    const int64_t read = 2 * heads * (2 * layer.rank + layer.rope) * step.attention.held();
    pool->run(latent_work, &run, tokens * weights + read);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
