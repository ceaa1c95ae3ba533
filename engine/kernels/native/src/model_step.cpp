// A few tokens of one sequence, or of several, through a whole model: its layers, one after the other, the last norm and the head.
#include <cstddef>
#include <new>
#include <vector>

#include "rows.h"
#include "streams.h"
#include "switchyard_kernels.h"

SWITCHYARD_API int32_t switchyard_model_step(SwitchyardPool *pool, const SwitchyardModel *model, int32_t count,
                                             int32_t tokens, const float *hidden, const SwitchyardAngles *angles,
                                             void *logits) try {
    static thread_local std::vector<float> states[2];
    static thread_local std::vector<uint16_t> normed;
    const int64_t width = model->head.columns;
    static thread_local Streams streams;
    for (auto &state : states) state.resize(static_cast<size_t>(tokens * width));
    normed.resize(static_cast<size_t>(tokens * width));
    if (model->streams) streams.begin(hidden, model->streams->streams, tokens, width);
    size_t at = 0;
    // Hidden states through a part of a layer; whether it had memory for that.
    const auto through = [&](const SwitchyardStreams *around, auto part) {
        float *next = states[at ^= 1].data();
        if (part(around ? streams.collapse(pool, *around) : hidden, next)) return false;
        if (around) streams.spread(pool, next);
        hidden = next;
        return true;
    };
    for (int32_t i = 0; i < model->count; ++i) {
        const SwitchyardLayer &layer = model->layers[i];
        const SwitchyardAngles &its = angles[layer.angles];
        const auto attends = [&](const float *x, float *out) {
            if (layer.delta) return switchyard_delta_step(pool, layer.delta, &layer.held, layer.pieces, count, x, out);
            const auto step = [&](auto call, const auto *attention) {
                return call(pool, attention, &layer.held, layer.pieces, count, x, its.cos, its.sin, its.angle_step, its.token_step, out);
            };
            return layer.attention ? step(switchyard_attention_step, layer.attention)
                   : layer.latent  ? step(switchyard_latent_step, layer.latent)
                                   : step(switchyard_compressed_step, layer.compressed);
        };
        const auto computes = [&](const float *x, float *out) {
            return switchyard_sparse_step(pool, layer.block, tokens, x, layer.chosen, layer.shares, out);
        };
        const bool has_attention = layer.attention || layer.latent || layer.delta || layer.compressed;
        if (has_attention && !through(layer.streams[0], attends)) return 1;
        if (layer.block && !through(layer.streams[1], computes)) return 1;
    }
    if (model->streams) hidden = streams.collapse(pool, *model->streams);
    for (int32_t token = 0; token < tokens; ++token)
        if (model->wide_norm)
            rms_norm(hidden + token * width, model->wide_norm, model->epsilon, width, &normed[token * width]);
        else
            rms_norm(hidden + token * width, model->norm, model->epsilon, width, &normed[token * width], model->norm_offset);
    // A logit near 20 in bf16 would be rounded to an eighth: only the library's own head is.
    const int32_t floats = model->head.format != SWITCHYARD_BF16;
    return switchyard_linear(pool, &model->head, tokens, normed.data(), model->bias, floats, logits);
} catch (const std::bad_alloc &) {
    return 1;
}
