// A few tokens of some sequences through a gated delta net, Mamba 2 or a short convolution, and prompts as far as no matrix is: norm, projections, convolutions, the rule, output and residual.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "attend.h"
#include "dispatch.h"
#include "matrix.h"
#include "rows.h"
#include "stamps.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kPieceTokens = 256;  // of a prompt: what they are convolved to stays in a cache
constexpr int64_t kDecayTokens = 64;   // of which a head's decays are

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// What a matrix has given, [tokens], each `step` floats after the one before.
struct Projected {
    const float *x = nullptr;
    int64_t step = 0;
};

// What projections have given of some tokens, and what becomes of it: short convolutions, the delta rule, norm and gate.
struct DeltaTokens {
    const SwitchyardDelta *layer;
    Kernels kernels;
    int64_t tokens;
    Projected mixed, k, v, z, b, a;
    const float *recent_before, *states_before;
    float *recent, *states;
    float *convolved;  // [tokens, channels]
    float *answers;    // [tokens, value_heads * value_dim]

    int64_t per_key() const { return layer->value_heads / layer->key_heads; }
    int64_t keys() const { return int64_t{layer->key_heads} * layer->key_dim; }
    int64_t values() const { return int64_t{layer->value_heads} * layer->value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }

    // The states of a sequence: what they are, and where what becomes of them goes.
    void take(const SwitchyardPages &held, int64_t before, int64_t after) {
        const int64_t recents = channels() * layer->kernel, all = values() * layer->key_dim;
        recent_before = static_cast<const float *>(held.keys) + before * recents;
        states_before = static_cast<const float *>(held.values) + before * all;
        recent = static_cast<float *>(held.keys) + after * recents;
        states = static_cast<float *>(held.values) + after * all;
    }

    // Where a key head's queries (0), keys (1) and values (2) begin among the channels.
    int64_t channel_of(int64_t key_head, int which) const {
        const int64_t dim = layer->key_dim, many = per_key() * layer->value_dim;
        if (layer->rule == SWITCHYARD_STATE_SPACE)
            return which == 2 ? key_head * many : values() + (which ? 0 : keys()) + key_head * dim;
        return which == 2 ? 2 * keys() + key_head * many : which * keys() + key_head * dim;
    }
    // A key head's queries (0), keys (1), values (2) and z (3); of a convolution the gates before (0) and after it (1).
    Projected of(int64_t key_head, int which) const {
        const int64_t dim = layer->key_dim, many = per_key() * layer->value_dim;
        if (layer->rule == SWITCHYARD_CONVOLUTION) return {mixed.x + which * values() + key_head * many, mixed.step};
        if (layer->rule == SWITCHYARD_STATE_SPACE)
            return {mixed.x + (which == 3 ? key_head * many : values() + channel_of(key_head, which)), mixed.step};
        if (layer->z.rows == 0) {
            const int64_t begins[] = {0, dim, 2 * dim, 2 * dim + many};
            return {mixed.x + key_head * (2 * dim + 2 * many) + begins[which], mixed.step};
        }
        if (which == 3) return {z.x + key_head * many, z.step};
        if (which && layer->k.rows) return which == 1 ? Projected{k.x + key_head * dim, k.step} : Projected{v.x + key_head * many, v.step};
        return {mixed.x + channel_of(key_head, which), mixed.step};
    }
    // The b (0) and a (1) of a value head.
    float rate(int64_t token, int64_t head, int which) const {
        const int64_t many = per_key();
        if (layer->rule == SWITCHYARD_STATE_SPACE) return mixed.x[token * mixed.step + values() + channels() + head];
        if (layer->a.rows == 0) return b.x[token * b.step + head / many * 2 * many + which * many + head % many];
        return which ? a.x[token * a.step + head] : b.x[token * b.step + head];
    }
};

// To the length `length`, as far as what is nearly 0 can have one.
void scale_to_length(float *x, int64_t n, float length) {
    const float scale = length / std::sqrt(squares_of(x, n) + 1e-6f);
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// A key head's values times the gates before a convolution.
Projected gated_values(const DeltaTokens &now, int64_t head) {
    static thread_local std::vector<float> gated;
    const int64_t many = now.per_key() * now.layer->value_dim;
    const Projected gates = now.of(head, 0), values = now.of(head, 2);
    gated.resize(static_cast<size_t>(now.tokens * many));
    for (int64_t token = 0; token < now.tokens; ++token)
        for (int64_t i = 0; i < many; ++i)
            gated[token * many + i] = gates.x[token * gates.step + i] * values.x[token * values.step + i];
    return {gated.data(), many};
}

void convolve_key_head(DeltaTokens &now, int64_t head) {
    const auto &layer = *now.layer;
    const int64_t dim = layer.key_dim, many = now.per_key() * layer.value_dim, channels = now.channels();
    const bool is_linear = layer.rule == SWITCHYARD_CONVOLUTION;
    for (int which = is_linear ? 2 : 0; which < 3; ++which) {
        const int64_t at = now.channel_of(head, which);
        const Projected from = is_linear ? gated_values(now, head) : now.of(head, which);
        now.kernels.attention->convolve({now.recent_before + at * layer.kernel, now.recent + at * layer.kernel, layer.taps + at,
                                         which < 2 ? dim : many, layer.kernel, channels, now.tokens, from.x, from.step, &now.convolved[at], channels,
                                         layer.tap_bias ? layer.tap_bias + at : nullptr, is_linear});
    }
    if (layer.rule != SWITCHYARD_DELTA_RULE) return;
    for (int64_t token = 0; token < now.tokens; ++token) {
        float *of = &now.convolved[token * channels];
        scale_to_length(of + now.channel_of(head, 0), dim, 1.0f / std::sqrt(static_cast<float>(dim)));
        scale_to_length(of + now.channel_of(head, 1), dim, 1.0f);
    }
}

// A convolution's values times the gates after it.
void gate_convolved(DeltaTokens &now, int64_t head) {
    const int64_t dim = now.layer->value_dim;
    const Projected gates = now.of(head, 1);
    for (int64_t token = 0; token < now.tokens; ++token) {
        const float *of = &now.convolved[token * now.channels() + head * dim], *gate = gates.x + token * gates.step;
        float *out = now.answers + token * now.values() + head * dim;
        for (int64_t i = 0; i < dim; ++i) out[i] = of[i] * gate[i];
    }
}

void answer_of_space(DeltaTokens &now, int64_t head) {
    const auto &layer = *now.layer;
    const int64_t dim = layer.key_dim, value_dim = layer.value_dim, key_head = head / now.per_key(), channels = now.channels();
    float decays[kDecayTokens], betas[kDecayTokens];
    for (int64_t begin = 0; begin < now.tokens; begin += kDecayTokens) {
        const int64_t tokens = std::min(kDecayTokens, now.tokens - begin);
        for (int64_t i = 0; i < tokens; ++i) {
            betas[i] = softplus(now.rate(begin + i, head, 1) + layer.rate_bias[head]);
            decays[i] = std::exp(layer.rate[head] * betas[i]);
        }
        const float *of = &now.convolved[begin * channels], *values = of + head * value_dim;
        float *out = now.answers + begin * now.values() + head * value_dim;
        const int64_t state = head * dim * value_dim;
        now.kernels.attention->space({(begin ? now.states : now.states_before) + state, now.states + state, tokens, dim, value_dim,
                                      of + now.channel_of(key_head, 1), of + now.channel_of(key_head, 0), values, channels,
                                      decays, betas, out, now.values()});
        for (int64_t i = 0; i < tokens; ++i)
            for (int64_t at = 0; at < value_dim; ++at)
                out[i * now.values() + at] += layer.skip[head] * values[i * channels + at];
    }
}

// The gates and norms of a token's answers that are of several heads together.
void finish_token(DeltaTokens &now, int64_t token) {
    const auto &layer = *now.layer;
    if (layer.rule != SWITCHYARD_STATE_SPACE) return;
    const int64_t many = now.per_key() * layer.value_dim;
    for (int64_t head = 0; head < layer.key_heads; ++head) {
        float *out = now.answers + token * now.values() + head * many;
        const Projected z = now.of(head, 3);
        now.kernels.attention->gate(out, z.x + token * z.step, many, true, out);
        rms_norm(out, layer.out_norm + head * many, layer.out_epsilon, many, out);
    }
}

void answer_value_head(DeltaTokens &now, int64_t head) {
    const auto &layer = *now.layer;
    if (layer.rule == SWITCHYARD_CONVOLUTION) return gate_convolved(now, head);
    if (layer.rule == SWITCHYARD_STATE_SPACE) return answer_of_space(now, head);
    const AttendKernels &kernels = *now.kernels.attention;
    const int64_t dim = layer.key_dim, value_dim = layer.value_dim, key_head = head / now.per_key(), channels = now.channels();
    static thread_local std::vector<float> decays;
    float betas[kDecayTokens];
    for (int64_t begin = 0; begin < now.tokens; begin += kDecayTokens) {
        const int64_t tokens = std::min(kDecayTokens, now.tokens - begin);
        decays.resize(static_cast<size_t>(tokens * dim));
        for (int64_t i = 0; i < tokens; ++i) {
            if (layer.decays_keys) {
                kernels.decay(now.a.x + (begin + i) * now.a.step + head * dim, layer.rate_bias + head * dim, layer.rate[head],
                              dim, &decays[i * dim]);
            } else {
                const float rate = layer.rate[head] * softplus(now.rate(begin + i, head, 1) + layer.rate_bias[head]);
                std::fill_n(&decays[i * dim], dim, std::exp(rate));
            }
            betas[i] = sigmoid(now.rate(begin + i, head, 0));
        }
        const float *of = &now.convolved[begin * channels];
        float *out = now.answers + begin * now.values() + (layer.o_heads ? layer.o_heads[head] : head) * value_dim;
        const int64_t state = head * dim * value_dim;
        kernels.delta({(begin ? now.states : now.states_before) + state, now.states + state, tokens, dim, value_dim, of + now.keys() + key_head * dim,
                       of + key_head * dim, of + 2 * now.keys() + head * value_dim, channels, decays.data(), betas, out,
                       now.values()});
        const Projected z = now.of(key_head, 3);
        for (int64_t i = 0; i < tokens; ++i, out += now.values()) {
            rms_norm(out, layer.out_norm, layer.out_epsilon, value_dim, out);
            kernels.gate(out, z.x + (begin + i) * z.step + head % now.per_key() * value_dim, value_dim, !layer.gates_once, out);
        }
    }
}

// A matrix, what it is multiplied with, and where that goes among what was projected.
struct Product {
    const SwitchyardMatrix *weight;
    const Vectors *x;
    int64_t place;
};

struct DeltaStep : DeltaTokens {
    const float *hidden;
    float *out;
    std::vector<DeltaTokens> sequences;  // the same of each
    std::vector<int32_t> all;      // 0, 1, ..., tokens - 1
    std::vector<float> normed;     // [tokens, hidden]
    Vectors wide, narrow;          // the same, for queries, keys, values and z, and for the others
    Vectors z_x, a_x;              // what z and a are of, where that is something else
    std::vector<Product> first, second;  // those of hidden states, and those of what these give
    int64_t width;                 // of what all of them give
    std::vector<float> projected;  // [tokens, width]
    std::vector<float> convolved_all, answered;  // what `convolved` and `answers` point to
    Vectors answers_x;             // the same, for the output

    // Lays out what is projected.
    void arrange() {
        first.clear(), second.clear();
        width = 0;
        for (Projected *part : {&mixed, &k, &v, &z, &b, &a}) *part = {};
        const auto add = [&](std::vector<Product> &to, const SwitchyardMatrix &weight, const Vectors &x, Projected *part) {
            if (weight.rows == 0) return;
            to.push_back({&weight, &x, width});
            if (part) part->x = nullptr, part->step = width;
            width += weight.rows;
        };
        const bool z_later = layer->z_first.rows > 0, a_later = layer->a_first.rows > 0;
        add(first, layer->mixed, wide, &mixed), add(first, layer->k, wide, &k), add(first, layer->v, wide, &v);
        add(first, z_later ? layer->z_first : layer->z, wide, z_later ? nullptr : &z);
        add(first, layer->b, narrow, &b);
        add(first, a_later ? layer->a_first : layer->a, narrow, a_later ? nullptr : &a);
        if (z_later) add(second, layer->z, z_x, &z);
        if (a_later) add(second, layer->a, a_x, &a);
        projected.resize(static_cast<size_t>(tokens * width));
        for (Projected *part : {&mixed, &k, &v, &z, &b, &a}) *part = {projected.data() + part->step, width};
    }
};

int64_t blocks_of(const std::vector<Product> &products) {
    int64_t blocks = 0;
    for (const Product &product : products) blocks += blocks_of(*product.weight);
    return blocks;
}

struct DeltaRun {
    DeltaStep &step;
    Phase norm, projections, between, later, convolutions, heads, spreading, output;

    DeltaRun(DeltaStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          projections(blocks_of(step.first), threads, 1),
          between(step.second.empty() ? 0 : step.tokens, threads, 1),
          later(blocks_of(step.second), threads, 1),
          convolutions(step.layer->key_heads * static_cast<int64_t>(step.sequences.size()), threads, 1),
          heads(step.layer->value_heads * static_cast<int64_t>(step.sequences.size()), threads, 1),
          spreading(step.tokens, threads, 1),
          output(blocks_of(step.layer->o), threads, 1) {}
};

// Blocks of these products, one after the other.
void project(DeltaStep &step, const std::vector<Product> &products, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
        int64_t block = item;
        const Product *product = products.data();
        for (; block >= blocks_of(*product->weight); ++product) block -= blocks_of(*product->weight);
        const SwitchyardMatrix &weight = *product->weight;
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, weight, block, *product->x, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
        for (int64_t token = 0; token < step.tokens; ++token)
            std::copy_n(dots + token * kTileRows, rows, &step.projected[token * step.width + product->place + row]);
    }
}

// What z and a are of, where that is not the hidden state.
void prepare_later(DeltaStep &step, int64_t token) {
    const float *from = &step.projected[token * step.width];
    for (const Product &product : step.first) {
        if (product.weight == &step.layer->z_first) step.z_x.set(step.kernels, token, from + product.place);
        if (product.weight == &step.layer->a_first) step.a_x.set(step.kernels, token, from + product.place);
    }
}

void put_out(DeltaStep &step, int64_t begin, int64_t end) {
    const auto &weight = step.layer->o;
    const float multiple = step.layer->multiple != 0 ? step.layer->multiple : 1.0f;
    for (int64_t block = begin; block < end; ++block) {
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, weight, block, step.answers_x, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
        for (int64_t token = 0; token < step.tokens; ++token)
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t at = token * weight.rows + row + i;
                step.out[at] = step.hidden[at] + multiple * dots[token * kTileRows + i];
            }
    }
}

void delta_work(void *argument) {
    auto &run = *static_cast<DeltaRun *>(argument);
    auto &step = run.step;
    const auto &layer = *step.layer;
    run.norm.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            float *normed = &step.normed[token * layer.hidden];
            rms_norm(step.hidden + token * layer.hidden, layer.norm, layer.epsilon, layer.hidden, normed, layer.norm_offset);
            step.wide.set(step.kernels, token, normed);
            step.narrow.set(step.kernels, token, normed);
        }
    });
    run.projections.run([&](int64_t begin, int64_t end) { project(step, step.first, begin, end); });
    run.between.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) prepare_later(step, token);
    });
    run.later.run([&](int64_t begin, int64_t end) { project(step, step.second, begin, end); });
    run.convolutions.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
            convolve_key_head(step.sequences[item / layer.key_heads], item % layer.key_heads);
    });
    run.heads.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
            answer_value_head(step.sequences[item / layer.value_heads], item % layer.value_heads);
    });
    run.spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            finish_token(step, token);
            step.answers_x.set(step.kernels, token, &step.answers[token * step.values()]);
        }
    });
    run.output.run([&](int64_t begin, int64_t end) { put_out(step, begin, end); });
}

struct PieceRun {
    DeltaTokens &now;
    Phase convolutions, heads, finishing;
};

void piece_work(void *argument) {
    auto &run = *static_cast<PieceRun *>(argument);
    run.convolutions.run([&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) convolve_key_head(run.now, head);
    });
    run.heads.run([&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) answer_value_head(run.now, head);
    });
    run.finishing.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) finish_token(run.now, token);
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_delta_step(SwitchyardPool *pool, const SwitchyardDelta *delta, const SwitchyardPages *held,
                                             const SwitchyardPiece *pieces, int32_t count, const float *hidden, float *out) try {
    const Stamp stamp(delta);
    static thread_local DeltaStep step;
    step.layer = delta;
    step.kernels = kernels_in_use();
    const int32_t tokens = pieces[count - 1].first + pieces[count - 1].tokens;
    step.tokens = tokens;
    step.hidden = hidden;
    step.out = out;
    step.all.resize(static_cast<size_t>(tokens));
    std::iota(step.all.begin(), step.all.end(), 0);
    step.normed.resize(static_cast<size_t>(tokens * int64_t{delta->hidden}));
    step.wide.resize({&delta->mixed, &delta->k, &delta->v, delta->z_first.rows ? &delta->z_first : &delta->z}, tokens, delta->hidden);
    step.narrow.resize({&delta->b, delta->a_first.rows ? &delta->a_first : &delta->a}, tokens, delta->hidden);
    if (delta->z_first.rows) step.z_x.resize({&delta->z}, tokens, delta->z.columns);
    if (delta->a_first.rows) step.a_x.resize({&delta->a}, tokens, delta->a.columns);
    step.arrange();
    step.convolved_all.resize(static_cast<size_t>(tokens * step.channels()));
    step.convolved = step.convolved_all.data();
    step.answered.resize(static_cast<size_t>(tokens * step.values()));
    step.answers = step.answered.data();
    step.sequences.assign(static_cast<size_t>(count), step);
    for (int32_t i = 0; i < count; ++i) {
        DeltaTokens &own = step.sequences[static_cast<size_t>(i)];
        const int64_t first = pieces[i].first;
        own.tokens = pieces[i].tokens;
        own.take(*held, pieces[i].state, pieces[i].next_state);
        own.convolved += first * step.channels();
        own.answers += first * step.values();
        for (Projected *part : {&own.mixed, &own.k, &own.v, &own.z, &own.b, &own.a}) part->x += first * part->step;
    }
    step.answers_x.resize({&delta->o}, tokens, step.values());
    DeltaRun run(step, pool->threads());
    int64_t bytes = 2 * step.values() * delta->key_dim * int64_t{sizeof(float)};
    for (const auto *products : {&step.first, &step.second})
        for (const Product &product : *products) bytes += bytes_of(*product.weight);
    bytes += bytes_of(delta->o);
    pool->run(delta_work, &run, tokens * bytes);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}

SWITCHYARD_API int32_t switchyard_delta_rows(SwitchyardPool *pool, const SwitchyardDelta *delta, const SwitchyardPages *held,
                                             const SwitchyardPiece *piece, const float *const *given, float *out) try {
    static thread_local std::vector<float> convolved;
    DeltaTokens now = {};
    now.layer = delta;
    now.kernels = kernels_in_use();
    const int64_t tokens = piece->tokens;
    const int64_t states_bytes = now.values() * delta->key_dim * int64_t{sizeof(float)};
    for (int64_t begin = 0; begin < tokens; begin += kPieceTokens) {
        now.tokens = std::min(kPieceTokens, tokens - begin);
        now.take(*held, begin ? piece->next_state : piece->state, piece->next_state);
        const SwitchyardMatrix *const of[] = {&delta->mixed, &delta->k, &delta->v, &delta->z, &delta->b, &delta->a};
        Projected *const parts[] = {&now.mixed, &now.k, &now.v, &now.z, &now.b, &now.a};
        for (int i = 0; i < 6; ++i)
            *parts[i] = {given[i] ? given[i] + begin * of[i]->rows : nullptr, of[i]->rows};
        convolved.resize(static_cast<size_t>(now.tokens * now.channels()));
        now.convolved = convolved.data();
        now.answers = out + begin * now.values();
        PieceRun run = {now, Phase(delta->key_heads, pool->threads(), 1), Phase(delta->value_heads, pool->threads(), 1),
                        Phase(delta->rule == SWITCHYARD_STATE_SPACE ? now.tokens : 0, pool->threads(), 4)};
        pool->run_long(piece_work, &run, now.tokens * states_bytes);
    }
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
