// Attention over keys and values in pages, for many sequences of different lengths in one call.
//
// Every page holds kPageTokens tokens.
#pragma once
#include "attend.h"
#include "switchyard_kernels.h"

// One layer's pages.
typedef struct {
    SwitchyardPages held;
    const float *sinks;  // [heads]: logits of attending to nothing, or null
    float scale;         // of scores
    float softcap;       // scores become softcap * tanh(score / softcap); 0: they do not
    int32_t heads, kv_heads, key_dim, value_dim;
} SwitchyardPagedLayer;

// Where queries, keys or values of all new tokens lie: bf16 or fp32, steps in elements, heads' elements side by side.
typedef struct {
    const void *data;
    int64_t token_step, head_step;
    int32_t is_fp32;
} SwitchyardStates;

// Puts the new tokens' keys and values into their pages, then attends: out[token, head] of [tokens, heads, value_dim],
// of the queries' type.  Each result is the same whatever else is in the call, and whether a sequence's tokens come in
// one call or several.
SWITCHYARD_API int32_t switchyard_paged_attention(SwitchyardPool *pool, const SwitchyardPagedLayer *layer,
                                                  const SwitchyardPiece *pieces, int32_t count,
                                                  const SwitchyardStates *queries, const SwitchyardStates *keys,
                                                  const SwitchyardStates *values, void *out);
