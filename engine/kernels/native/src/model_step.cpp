// A few tokens of one sequence, or of several, through a whole model: its layers, one after the other, the last norm and the head.
#include <cstddef>
#include <new>
#include <vector>

#include "rows.h"
#include "switchyard_kernels.h"

SWITCHYARD_API int32_t switchyard_model_step(SwitchyardPool *pool, const SwitchyardModel *model, int32_t count,
                                             int32_t tokens, const float *hidden, const SwitchyardAngles *angles,
                                             void *logits) try {
    static thread_local std::vector<float> states[2];
    static thread_local std::vector<uint16_t> normed;
    const int64_t width = model->head.columns;
    for (auto &state : states) state.resize(static_cast<size_t>(tokens * width));
    normed.resize(static_cast<size_t>(tokens * width));
    size_t at = 0;
    for (int32_t i = 0; i < model->count; ++i) {
        const SwitchyardLayer &layer = model->layers[i];
        const SwitchyardAngles &its = angles[layer.angles];
        if (layer.attention || layer.latent || layer.delta) {
            float *next = states[at ^= 1].data();
            const int32_t failed =
                layer.attention
                    ? switchyard_attention_step(pool, layer.attention, &layer.held, layer.pieces, count, hidden, its.cos, its.sin,
                                                its.angle_step, its.token_step, next)
                : layer.latent
                    ? switchyard_latent_step(pool, layer.latent, &layer.held, layer.pieces, count, hidden, its.cos, its.sin,
                                             its.angle_step, its.token_step, next)
                    : switchyard_delta_step(pool, layer.delta, &layer.held, layer.pieces, count, hidden, next);
            if (failed) return 1;
            hidden = next;
        }
        if (layer.block) {
            float *next = states[at ^= 1].data();
            if (switchyard_sparse_step(pool, layer.block, tokens, hidden, layer.chosen, layer.shares, next)) return 1;
            hidden = next;
        }
    }
    for (int32_t token = 0; token < tokens; ++token)
        rms_norm(hidden + token * width, model->norm, model->epsilon, width, &normed[token * width], model->norm_offset);
    // A logit near 20 in bf16 would be rounded to an eighth: only the library's own head is.
    const int32_t floats = model->head.format != SWITCHYARD_BF16;
    return switchyard_linear(pool, &model->head, tokens, normed.data(), model->bias, floats, logits);
} catch (const std::bad_alloc &) {
    return 1;
}
