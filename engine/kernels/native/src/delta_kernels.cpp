// A few tokens of one sequence through a gated delta net: norm, projections, short convolutions, the delta rule, output and residual.
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

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct DeltaStep {
    const SwitchyardDelta *layer;
    Kernels kernels;
    int32_t tokens;
    const float *hidden;
    float *recent, *states, *out;
    std::vector<int32_t> all;      // 0, 1, ..., tokens - 1
    std::vector<float> normed;     // [tokens, hidden]
    Vectors wide, narrow;          // the same, for mixed and z, and for b and a
    std::vector<float> projected;  // [tokens, width]: of mixed, z, b and a, one after the other
    std::vector<float> convolved;  // [tokens, channels]
    std::vector<float> answers;    // [tokens, value_heads * value_dim]
    Vectors answers_x;             // the same, for the output

    int64_t per_key() const { return layer->value_heads / layer->key_heads; }
    int64_t keys() const { return int64_t{layer->key_heads} * layer->key_dim; }
    int64_t values() const { return int64_t{layer->value_heads} * layer->value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }
    int64_t width() const { return channels() + values() + 2 * layer->value_heads; }

    // Where what was projected begins: a key head's queries (0), keys (1), values (2) and z (3).
    int64_t place(int64_t key_head, int which) const {
        const int64_t dim = layer->key_dim, many = per_key() * layer->value_dim;
        if (layer->z.rows == 0) {
            const int64_t begins[] = {0, dim, 2 * dim, 2 * dim + many};
            return key_head * (2 * dim + 2 * many) + begins[which];
        }
        const int64_t begins[] = {0, keys(), 2 * keys(), channels()};
        return begins[which] + key_head * (which < 2 ? dim : many);
    }
    // The b (0) and a (1) of a value head.
    float rate(int64_t token, int64_t head, int which) const {
        const int64_t many = per_key(), begin = token * width() + channels() + values();
        const int64_t at = layer->a.rows == 0 ? head / many * 2 * many + which * many + head % many : which * layer->value_heads + head;
        return projected[static_cast<size_t>(begin + at)];
    }
};

struct DeltaRun {
    DeltaStep &step;
    Phase norm, projections, convolutions, heads, spreading, output;

    DeltaRun(DeltaStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          projections(blocks_of(step.layer->mixed) + blocks_of(step.layer->z) + blocks_of(step.layer->b) + blocks_of(step.layer->a),
                      threads, 1),
          convolutions(step.layer->key_heads, threads, 1),
          heads(step.layer->value_heads, threads, 1),
          spreading(step.tokens, threads, 1),
          output(blocks_of(step.layer->o), threads, 1) {}
};

// Blocks of mixed, z, b and a, one after the other.
void project(DeltaStep &step, int64_t begin, int64_t end) {
    const auto &layer = *step.layer;
    const SwitchyardMatrix *const weights[] = {&layer.mixed, &layer.z, &layer.b, &layer.a};
    for (int64_t item = begin; item < end; ++item) {
        int64_t block = item, place = 0;
        int which = 0;
        for (; block >= blocks_of(*weights[which]); ++which) {
            block -= blocks_of(*weights[which]);
            place += weights[which]->rows;
        }
        const SwitchyardMatrix &weight = *weights[which];
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, weight, block, which < 2 ? step.wide : step.narrow, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
        for (int64_t token = 0; token < step.tokens; ++token)
            std::copy_n(dots + token * kTileRows, rows, &step.projected[token * step.width() + place + row]);
    }
}

// Channels [at, at + n) of all tokens, whose inputs begin at `from` in what was projected.
void convolve(DeltaStep &step, int64_t at, int64_t n, int64_t from) {
    const int64_t kernel = step.layer->kernel, width = step.width(), channels = step.channels();
    for (int64_t channel = at; channel < at + n; ++channel, ++from) {
        float *recent = step.recent + channel * kernel;
        const float *taps = step.layer->taps + channel * kernel;
        for (int64_t token = 0; token < step.tokens; ++token) {
            std::copy(recent + 1, recent + kernel, recent);
            recent[kernel - 1] = step.projected[token * width + from];
            float sum = 0;
            for (int64_t i = 0; i < kernel; ++i) sum += taps[i] * recent[i];
            step.convolved[token * channels + channel] = sum * sigmoid(sum);
        }
    }
}

// To the length `length`, as far as what is nearly 0 can have one.
void scale_to_length(float *x, int64_t n, float length) {
    float squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
    const float scale = length / std::sqrt(squares + 1e-6f);
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

void convolve_key_head(DeltaStep &step, int64_t head) {
    const auto &layer = *step.layer;
    const int64_t dim = layer.key_dim, many = step.per_key() * layer.value_dim, keys = step.keys();
    convolve(step, head * dim, dim, step.place(head, 0));
    convolve(step, keys + head * dim, dim, step.place(head, 1));
    convolve(step, 2 * keys + head * many, many, step.place(head, 2));
    for (int64_t token = 0; token < step.tokens; ++token) {
        float *of = &step.convolved[token * step.channels()];
        scale_to_length(of + head * dim, dim, 1.0f / std::sqrt(static_cast<float>(dim)));
        scale_to_length(of + keys + head * dim, dim, 1.0f);
    }
}

void answer_value_head(DeltaStep &step, int64_t head) {
    const auto &layer = *step.layer;
    const int64_t keys = step.keys(), value_dim = layer.value_dim, key_head = head / step.per_key();
    static thread_local std::vector<float> decay;
    for (int64_t token = 0; token < step.tokens; ++token) {
        const float *of = &step.convolved[token * step.channels()];
        const float rate = layer.rate[head] * softplus(step.rate(token, head, 1) + layer.rate_bias[head]);
        decay.assign(static_cast<size_t>(layer.key_dim), std::exp(rate));
        float *out = &step.answers[token * step.values() + head * value_dim];
        step.kernels.attention->delta({step.states + head * layer.key_dim * value_dim, of + keys + key_head * layer.key_dim,
                                       of + key_head * layer.key_dim, of + 2 * keys + head * value_dim, decay.data(),
                                       sigmoid(step.rate(token, head, 0)), layer.key_dim, value_dim, out});
        rms_norm(out, layer.out_norm, layer.out_epsilon, value_dim, out);
        const float *z = &step.projected[token * step.width() + step.place(key_head, 3) + head % step.per_key() * value_dim];
        for (int64_t i = 0; i < value_dim; ++i) out[i] *= z[i] * sigmoid(z[i]);
    }
}

void put_out(DeltaStep &step, int64_t begin, int64_t end) {
    const auto &weight = step.layer->o;
    for (int64_t block = begin; block < end; ++block) {
        float dots[kDecodeTokens * kTileRows];
        block_dot(step.kernels, weight, block, step.answers_x, step.all.data(), step.tokens, dots);
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
        for (int64_t token = 0; token < step.tokens; ++token)
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t at = token * weight.rows + row + i;
                step.out[at] = step.hidden[at] + dots[token * kTileRows + i];
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
    run.projections.run([&](int64_t begin, int64_t end) { project(step, begin, end); });
    run.convolutions.run([&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) convolve_key_head(step, head);
    });
    run.heads.run([&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) answer_value_head(step, head);
    });
    run.spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            step.answers_x.set(step.kernels, token, &step.answers[token * step.values()]);
    });
    run.output.run([&](int64_t begin, int64_t end) { put_out(step, begin, end); });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_delta_step(SwitchyardPool *pool, const SwitchyardDelta *delta, int32_t tokens,
                                             const float *hidden, float *recent, float *states, float *out) try {
    const Stamp stamp(delta);
    static thread_local DeltaStep step;
    step.layer = delta;
    step.kernels = kernels_in_use();
    step.tokens = tokens;
    step.hidden = hidden;
    step.recent = recent;
    step.states = states;
    step.out = out;
    step.all.resize(static_cast<size_t>(tokens));
    std::iota(step.all.begin(), step.all.end(), 0);
    step.normed.resize(static_cast<size_t>(tokens * int64_t{delta->hidden}));
    step.wide.resize({&delta->mixed, &delta->z}, tokens, delta->hidden);
    step.narrow.resize({&delta->b, &delta->a}, tokens, delta->hidden);
    step.projected.resize(static_cast<size_t>(tokens * step.width()));
    step.convolved.resize(static_cast<size_t>(tokens * step.channels()));
    step.answers.resize(static_cast<size_t>(tokens * step.values()));
    step.answers_x.resize({&delta->o}, tokens, step.values());
    DeltaRun run(step, pool->threads());
    int64_t bytes = 2 * step.values() * delta->key_dim * int64_t{sizeof(float)};
    for (const SwitchyardMatrix *matrix : {&delta->mixed, &delta->z, &delta->b, &delta->a, &delta->o}) bytes += bytes_of(*matrix);
    pool->run(delta_work, &run, tokens * bytes);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
