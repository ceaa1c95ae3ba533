// What a batch of many rows needs besides experts: attention of whole layers over pages, and linear layers.
#pragma once
#include "paged_attention.h"

// The new tokens of some sequences through a layer's attention: norm, projections, rotary embedding, pages, attention,
// output and residual.  cos, sin: one for each pair of dimensions that are rotated together, those of a token
// `token_step` after those of the one before.  hidden, out: [tokens, hidden], not the same.  What `layer` and
// `paged` say of heads is the same.
SWITCHYARD_API int32_t switchyard_attention_rows(SwitchyardPool *pool, const SwitchyardAttention *layer,
                                                 const SwitchyardPagedLayer *paged, const SwitchyardPiece *pieces,
                                                 int32_t count, const float *hidden, const float *cos,
                                                 const float *sin, int64_t token_step, float *out);

// As switchyard_linear, for many tokens.
SWITCHYARD_API int32_t switchyard_linear_rows(SwitchyardPool *pool, const SwitchyardMatrix *weight, int32_t tokens,
                                              const uint16_t *x, const uint16_t *bias, int32_t floats, void *out);

// The norm and the router before a layer's experts: hidden [tokens, hidden] -> normed, the same in bf16, and the routing,
// chosen int64 [tokens, k] and shares float [tokens, k].
SWITCHYARD_API int32_t switchyard_route_rows(SwitchyardPool *pool, const SwitchyardSparseBlock *block, int32_t tokens,
                                             const float *hidden, uint16_t *normed, int64_t *chosen, float *shares);
