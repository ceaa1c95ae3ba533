// Attention of the many tokens of a prompt, one sequence's, over keys and values in rows.
#pragma once
#include "switchyard_kernels.h"

// All bf16.  A head of a token begins at token * ..._token + head * ..._head numbers; a head's keys lie one after the
// other, `key_dim` apart.
typedef struct {
    const uint16_t *queries, *keys, *values;
    int64_t query_token, query_head, key_head, value_token, value_head;
    // uint8 [tokens, held], `sees_token` apart: which keys each token sees, a single range; null: the last tokens of `held`
    // see those before them and themselves.
    const uint8_t *sees;
    int64_t sees_token;
    int64_t tokens, held;
    int32_t heads, kv_heads, key_dim, value_dim;
    float scale;  // positive
} SwitchyardPrompt;

// out: bf16 [tokens, heads, value_dim].  2 if what a token sees is nothing, or no single range: nothing is written.
SWITCHYARD_API int32_t switchyard_prompt_attention(SwitchyardPool *pool, const SwitchyardPrompt *prompt, uint16_t *out);
