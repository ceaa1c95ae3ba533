// Plain C interface of the native CPU kernels.  Everything is caller-owned memory; no call allocates for the caller,
// throws, or keeps a pointer after it returns (a pool excepted).
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define SWITCHYARD_API extern "C" __declspec(dllexport)
#else
#define SWITCHYARD_API extern "C" __attribute__((visibility("default")))
#endif

typedef struct SwitchyardPool SwitchyardPool;

// Experts of one layer: `count` records of `stride` bytes from `records`, bf16 matrices inside at byte offsets.
// gate_up is [2 * inner, hidden] (gate rows first), down is [hidden, inner]; an expert is
// down(silu(gate(x)) * up(x)), rounded to bf16 where the torch reference rounds.
typedef struct {
    const uint8_t *records;
    int64_t stride;
    int64_t gate_up_offset;
    int64_t down_offset;
    int32_t count;
    int32_t hidden;
    int32_t inner;
} SwitchyardExperts;

// A sparse block of the Mixtral kind: hidden + experts(norm(hidden)), routed by softmax over all experts, then top k.
typedef struct {
    const uint16_t *norm;    // bf16 [hidden]
    const uint16_t *router;  // bf16 [experts, hidden]
    SwitchyardExperts experts;
    float epsilon;
    int32_t top_k;
    int32_t normalise;    // whether the chosen weights are made to sum to 1
    int32_t bf16_shares;  // whether they are then rounded
} SwitchyardSparseBlock;

// Grouped-query attention of the Llama kind: hidden + o(attention(rope(q, k), v)) of norm(hidden), all bf16.
typedef struct {
    const uint16_t *norm;           // [hidden]
    const uint16_t *q, *k, *v, *o;  // [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice, [hidden, ...]
    const uint16_t *q_norm, *k_norm;  // RMS norms of each head, [head_dim], or null
    float epsilon;
    float scale;
    int32_t hidden, heads, kv_heads, head_dim;
} SwitchyardAttention;

// Raised whenever a signature or a struct above changes: a library of another number is not used.
SWITCHYARD_API int32_t switchyard_abi(void);

// Instruction sets, best last: 0 portable, 1 AVX2 + FMA, 2 AVX-512 (F, BW, VL).
SWITCHYARD_API int32_t switchyard_advertised_isa(void);
// Runs every kernel of that instruction set on a small problem: 0 if right.  May die of an illegal instruction where
// a virtual machine advertises what it traps on: call it in a child process.
SWITCHYARD_API int32_t switchyard_self_test(int32_t isa);
// Chooses the kernels for all later calls.
SWITCHYARD_API void switchyard_use_isa(int32_t isa);

// `threads` in all, the caller among them.  Workers spin for a short while after each call and then sleep.
SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads);
SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool);

// out[t] = sum over j of weights[t, j] * expert[index[t, j]](x[t]); ids outside [0, count) contribute nothing.
// x, out: bf16 [tokens, hidden]; index: int64 [tokens, k]; weights: float [tokens, k].  Returns 0, or 1 if out of memory.
SWITCHYARD_API int32_t switchyard_experts_bf16(SwitchyardPool *pool, const SwitchyardExperts *experts, int32_t tokens,
                                               int32_t k, const uint16_t *x, const int64_t *index, const float *weights,
                                               uint16_t *out);

// out = weight x + bias: weight bf16 [rows, columns], x bf16 [columns], bias bf16 [rows] or null, out bf16 [rows].
SWITCHYARD_API int32_t switchyard_linear_bf16(SwitchyardPool *pool, const uint16_t *weight, int64_t rows,
                                              int64_t columns, const uint16_t *x, const uint16_t *bias, uint16_t *out);

// One token through a sparse block.  hidden, out: bf16 [hidden], not the same.  chosen: int64 [k] and shares:
// float [k] receive the routing.
SWITCHYARD_API int32_t switchyard_sparse_step_bf16(SwitchyardPool *pool, const SwitchyardSparseBlock *block,
                                                   const uint16_t *hidden, int64_t *chosen, float *shares,
                                                   uint16_t *out);

// One token through attention.  keys, values: bf16 [kv_heads, capacity, head_dim] that hold `length` tokens; those of
// this token are written at row `length` < capacity.  cos, sin: bf16 [head_dim], as the library's rotary embedding
// makes them.  hidden, out: bf16 [hidden], not the same.
SWITCHYARD_API int32_t switchyard_attention_step_bf16(SwitchyardPool *pool, const SwitchyardAttention *attention,
                                                      const uint16_t *hidden, const uint16_t *cos, const uint16_t *sin,
                                                      uint16_t *keys, uint16_t *values, int64_t capacity,
                                                      int64_t length, uint16_t *out);
