// Attention over keys and values in pages, for many sequences of different lengths in one call.
//
// A page holds kPageTokens tokens of one sequence for one layer, head after head: keys, [tokens, key_dim], and
// values, [tokens, value_dim].
#pragma once
#include "attend.h"
#include "switchyard_kernels.h"

// One layer's pages.
typedef struct {
    void *keys;           // [pages, kv_heads, kPageTokens, key_dim]
    void *values;         // [pages, kv_heads, kPageTokens, value_dim]
    float *key_scales;    // int8: [pages, kv_heads, kPageTokens]; null otherwise
    float *value_scales;  // the same
    const float *sinks;   // [heads]: logits of attending to nothing, or null
    float scale;          // of scores
    float softcap;        // scores become softcap * tanh(score / softcap); 0: they do not
    int32_t type;
    int32_t heads, kv_heads, key_dim, value_dim;
    int32_t window;  // how many of the last tokens a token sees, itself included; 0: all
    int32_t kept;    // and of the first, whatever the window (StreamingLLM's attention sinks)
} SwitchyardPagedLayer;

// The next tokens of one sequence.
typedef struct {
    const int32_t *pages;  // those of the sequence, in order, with room for the new tokens
    int64_t held;          // tokens before the new ones
    int32_t tokens;        // new ones
    int32_t first;         // where they begin among all new tokens of the call
} SwitchyardPiece;

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
