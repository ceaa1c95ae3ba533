// Plain C interface of the native CPU kernels.  All memory is the caller's; no call allocates for the caller,
// throws, or keeps a pointer after it returns (except a pool).  Functions that return int32_t return 0, or 1 if there
// was no memory for their buffers.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define SWITCHYARD_API extern "C" __declspec(dllexport)
#else
#define SWITCHYARD_API extern "C" __attribute__((visibility("default")))
#endif

typedef struct SwitchyardPool SwitchyardPool;

// Weight formats: 0 bf16, row by row; 4 blocks of one of ggml's types, row by row, as GGUF files have them; 1 int8, 2 int4 and 3 lut4 in tiles of 32 rows x 32 columns, padded with zeros,
// block of rows after block of rows, and within it from left to right:
//   weights  a tile's upper and then its lower half (16 rows each), as vectors of 64 bytes: 4 bytes for each row.
//            int8: 8 vectors, the j-th has columns 4j to 4j + 3.
//            int4: 4 vectors, the j-th has columns 4j to 4j + 3 in its low nibbles, columns 16 + 4j to 16 + 4j + 3 in
//            its high ones.  lut4: as int4.
//   scales   [32] for a tile, one for each row's 32 columns: fp16 for int8, bf16 for the others
//   zeros    uint8 [32] for a tile, int4 only: in sixteenths
//   table    int8 [16] for the matrix, lut4 only: from -127 to 127
// A weight is scale * q for int8, scale * (q - zero / 16) for int4 and scale * table[q] for lut4.
enum { SWITCHYARD_BF16 = 0, SWITCHYARD_INT8 = 1, SWITCHYARD_INT4 = 2, SWITCHYARD_LUT4 = 3, SWITCHYARD_BLOCKS = 4 };

// What a block of rows holds: 0 plain, rows 32b to 32b + 31; 1 and 2 for matrices of gate and up rows, 16 of each:
// 1 if all gate rows come before all up rows, 2 if they alternate.
enum { SWITCHYARD_PLAIN = 0, SWITCHYARD_HALVES = 1, SWITCHYARD_ALTERNATING = 2 };

// Types of keys and values; int8 has a scale for each row.
enum { SWITCHYARD_KV_BF16 = 0, SWITCHYARD_KV_FP16 = 1, SWITCHYARD_KV_INT8 = 2, SWITCHYARD_KV_FP32 = 3 };

// A matrix [rows, columns].  scales, zeros and table are null where the format has none.  Of blocks:
//   second       where the second half of the rows begins, or null: after the first one
//   order        the stored row that each row is, or null: in their order
//   type         ggml's number of the blocks' type, and of those from `second` on
typedef struct {
    const void *weights;
    const uint16_t *scales;
    const uint8_t *zeros;
    const int8_t *table;
    int64_t rows, columns;
    int32_t format;
    int32_t pairing;
    const void *second;
    const int64_t *order;
    int32_t type, second_type;
} SwitchyardMatrix;

// A matrix of an expert: byte offsets of its parts in the record, of scales, zeros and table -1 where the format has none, and
// bytes from one expert's part to the next one's; where records are scattered, instead how many starts further on in the
// table those are that its offsets are from.  bias: bf16 [rows].
typedef struct {
    int64_t weights, second, scales, zeros, table, bias;
    int64_t step, second_step, bias_step;
    int32_t format, type, second_type;  // second_type: -1 where there is no second half apart
    int32_t has_bias;
} SwitchyardRecordPart;

// Experts of one layer: `count` records, whose parts lie at offsets from `records`, or from where `scattered` says.
// An expert is down(activation(first(x))), rounded to bf16 where the torch reference rounds after a matrix in bf16.
// first is [inner, hidden], or [2 * inner, hidden] with gate and up rows as `pairing` says; down is [hidden, inner].
typedef struct {
    const uint8_t *records;
    SwitchyardRecordPart first, down;
    int32_t count, hidden, inner;
    int32_t pairing;
    // 0 silu, 1 gelu, 2 gelu by tanh, 3 relu, 4 relu squared, each times up where there is a gate;
    // 5 (up + 1) * gate * sigmoid(alpha * gate).
    int32_t activation;
    float limit;  // gate is clamped to at most this, up to +-this, first of all; infinity: not clamped
    float alpha;
    const uint8_t *const *scattered;  // starts of records, [count] and perhaps more for some parts, or null: see `step`
} SwitchyardExperts;

// How a router's logits become scores; the last one is the square root of softplus.
enum { SWITCHYARD_SOFTMAX = 0, SWITCHYARD_SIGMOID = 1, SWITCHYARD_SQRT_SOFTPLUS = 2 };

// How a layer chooses its experts: scores of all of them from logits, the k best by score + correction among the
// groups that are kept, and their scores as shares.
typedef struct {
    const void *weight;       // bf16, or fp32 where `is_exact`, [experts, hidden]
    const uint16_t *bias;     // bf16 [experts], or null
    const float *correction;  // [experts]: added for the choice only, or null
    int32_t top_k;
    int32_t scoring;
    int32_t groups, kept_groups;  // of neighbours; a group is as good as its best expert, its two best for sigmoid
    int32_t bf16_logits;          // whether logits are rounded
    int32_t normalise;            // whether the chosen shares are made to sum to 1
    int32_t bf16_shares;          // whether they are rounded at the end
    float scale;                  // applied to the shares last
    int32_t is_exact;
    float least;                  // of what the chosen shares are divided by if they are made to sum to 1
    const float *norm;            // [hidden] of an RMS norm of hidden states, which logits are of; null: of the block's norm
    const float *multiples;       // [experts]: of the shares, last of all; or null
    // Or null: the experts of each token of the vocabulary, [vocabulary, top_k], which are not chosen then, and the step's tokens.
    const int32_t *table;
    const int64_t *ids;
} SwitchyardRouter;

// Of a layer whose experts are on an emulated card as far as they have slots there; see switchyard_exchange.h.
typedef struct {
    struct SwitchyardExchange *exchange;
    const uint8_t *const *slots;  // where each slot's record begins
    int32_t layer;                // of the exchange
} SwitchyardCardExperts;

// A sparse block: hidden + experts(norm(hidden)) + shared(norm(hidden)).  A dense one has no experts but their `hidden`, and
// its whole MLP is the shared one.  With `after_norm`, what is added to hidden goes through that norm first.
typedef struct {
    const uint16_t *norm;  // bf16 [hidden]
    SwitchyardRouter router;
    SwitchyardExperts experts;
    // down(activation(gate(x)) * up(x)), plain, times the sigmoid of shared_gate x; without rows if there is none.  A gate without
    // rows: down(activation(up(x))).
    SwitchyardMatrix shared_gate_proj, shared_up_proj, shared_down_proj;
    const uint16_t *shared_gate;  // bf16 [hidden], or null
    const SwitchyardCardExperts *card;  // or null; single tokens, between switchyard_exchange_start and _end
    const uint16_t *after_norm;  // bf16 [hidden], or null
    float epsilon;
    float norm_offset;           // added to the weights of its norms
    int32_t shared_activation;   // as of SwitchyardExperts, and its limit and alpha
    float shared_limit, shared_alpha;
    float multiple;              // of what is added to hidden, where it has no norm; 0: as it is
    float whole_multiple;        // of the whole result, where what is added has a norm; 0: as it is
    // bf16 [hidden], or null: the experts' own norm of hidden states, and those of what they and the shared one give, which are
    // there where `after_norm` is (Gemma 4).
    const uint16_t *experts_norm, *experts_after, *shared_after;
    const float *wide_norm;      // [hidden], in place of `norm`; or null
} SwitchyardSparseBlock;

// Chooses the blocks of tokens that each key-value head of grouped attention sees, where a sequence has more of them: the last
// ones, and those with the highest product of the head's query with one of the index's keys.
typedef struct {
    SwitchyardMatrix q;               // [kv_heads * dim, hidden]
    SwitchyardMatrix k;               // [dim, hidden]
    const uint16_t *q_norm, *k_norm;  // bf16 [dim], as the layer's norms
    int32_t dim, block_tokens;        // a multiple of 32 tokens
    int32_t most, local;              // blocks, and how many of them are the last ones: 1 or more
} SwitchyardBlockIndex;

// Grouped-query attention of the Llama kind: hidden + o(attention(rope(q, k), v)) of norm(hidden).  With `after_norm`, what is
// added to hidden goes through that norm first.
typedef struct {
    const uint16_t *norm;                               // bf16 [hidden]
    const uint16_t *q_norm, *k_norm;                    // bf16 RMS norms of each head, [head_dim], or null
    const uint16_t *q_bias, *k_bias, *v_bias, *o_bias;  // bf16, or null
    const uint16_t *sinks;                              // bf16 [heads]: logits of attending to nothing, or null
    const uint16_t *after_norm;                         // bf16 [hidden], or null
    SwitchyardMatrix q, k, v, o;                        // plain; where it is gated, q has each head's queries and then its gates;
                                                        // v without rows: values are what k gives
    float epsilon;
    float scale;
    int32_t hidden, heads, kv_heads, head_dim;
    int32_t norms_span_heads;  // whether q_norm and k_norm are of all heads together, [heads * head_dim]
    int32_t norms_come_last;   // whether those of each head come after the rotation
    int32_t rotated;           // dimensions of each head that are, the first ones
    int32_t rotation;          // 0 or 2, as of SwitchyardLatentAttention
    float norm_offset;         // added to the weights of its norms
    int32_t is_gated;          // whether what a head gives is multiplied by the sigmoid of its gates
    const SwitchyardBlockIndex *index;  // or null
    float multiple;            // of what is added to hidden, where it has no norm; 0: as it is
    int32_t norms_values;      // whether each head's values go through an RMS norm without weights
} SwitchyardAttention;

// Chooses the tokens that latent attention sees, where a sequence has more of them: those with the highest scores.  A key's score
// is the sum over heads of what its product with the head's query is above 0, each times its weight and `scale`.
typedef struct {
    SwitchyardMatrix q;               // [heads * dim, q_a rows]
    SwitchyardMatrix k;               // [dim, hidden], or no rows: it sees what the last layer before it that has some chose
    SwitchyardMatrix weights;         // [heads, hidden]
    const uint16_t *k_norm, *k_bias;  // bf16 [dim], of a layer norm
    int32_t *chosen;                  // [8, most]: positions that each token of a step has chosen, the same for such layers
    float epsilon, scale;
    int32_t heads, dim, most;
    int32_t rotation;                 // of the first `rope` dimensions, as of SwitchyardLatentAttention
} SwitchyardIndex;

// Multi-head latent attention of the DeepSeek kind, of norm(hidden), with the residual.  All matrices are plain, all norms
// RMS norms; q_a, kv_a and q (if there is no q_a) are all in tiles, or none is.
typedef struct {
    const uint16_t *norm, *q_a_norm, *kv_norm;            // bf16 [hidden], [q_a rows] or null, [rank]
    const uint16_t *q_a_bias, *kv_a_bias, *o_bias;        // bf16, or null
    SwitchyardMatrix q_a;                                 // [any, hidden], or no rows
    SwitchyardMatrix q;                                   // [heads * (nope + rope), q_a rows or hidden]
    SwitchyardMatrix kv_a;                                // [rank + rope, hidden]
    SwitchyardMatrix kv_b;                                // [heads * (nope + value_dim), rank], or no rows: then
    SwitchyardMatrix k_b, v_b;                            // [heads * rank, nope] and [heads * value_dim, rank]
    SwitchyardMatrix o;                                   // [hidden, heads * value_dim]
    float epsilon, q_a_epsilon, kv_epsilon, scale;
    int32_t hidden, heads, nope, rope, rank, value_dim;
    // Pairs of dimensions that are rotated together: 0 i and rope / 2 + i; 1 2i and 2i + 1, which come out as i and
    // rope / 2 + i; 2 2i and 2i + 1, which stay there.  3: none are.
    int32_t rotation;
    const SwitchyardIndex *index;  // or null; needs q_a
} SwitchyardLatentAttention;

// What becomes of short convolutions of hidden states: see SwitchyardDelta.
enum { SWITCHYARD_DELTA_RULE = 0, SWITCHYARD_STATE_SPACE = 1, SWITCHYARD_CONVOLUTION = 2 };

// A gated delta net of the Qwen3-Next kind: hidden + o(norm(delta rule of short convolutions) * gate(z)) of norm(hidden).  All
// matrices are plain; those of hidden states read alike, and so do z and a where they are of something else.  A key head serves
// `value_heads / key_heads` value heads in a row.
typedef struct {
    const uint16_t *norm;      // bf16 [hidden]
    const float *taps;         // [kernel, channels], the newest last: channels are all queries, all keys and all values
    const float *rate;         // [value_heads], below 0: a state decays by exp(rate * softplus(a + rate_bias))
    const float *rate_bias;    // as a's rows
    const uint16_t *out_norm;  // bf16 [value_dim]
    SwitchyardMatrix mixed;    // rows as the channels; or, if z has no rows: of each key head queries, keys, values and z
    SwitchyardMatrix k, v;     // or no rows: where they have some, mixed has queries alone
    SwitchyardMatrix z;        // [value_heads * value_dim, hidden], or no rows
    SwitchyardMatrix b;        // [value_heads, hidden]; or, if a has no rows: of each key head b and a of its value heads
    SwitchyardMatrix a;        // [value_heads, hidden], or no rows
    SwitchyardMatrix o;        // [hidden, value_heads * value_dim]
    const int32_t *o_heads;    // [value_heads]: the place of each among what o takes, or null: in their order
    SwitchyardMatrix z_first, a_first;  // [any, hidden]: what z and a are of instead of hidden states; or no rows
    float epsilon, out_epsilon;
    float norm_offset;         // added to the weights of `norm`
    int32_t hidden, key_heads, value_heads, key_dim, value_dim;
    int32_t kernel;            // at most 8
    int32_t decays_keys;       // whether each of a state's rows decays by itself: a has [key_heads * key_dim], and as many heads
                               // are of values (Kimi Team 2025, "Kimi Linear", section 3)
    int32_t gates_once;        // whether gate(z) is sigmoid(z), and not z * sigmoid(z)
    // SWITCHYARD_STATE_SPACE: Mamba 2 (Dao and Gu 2024, "Transformers are SSMs", section 7).  mixed, the only matrix beside o, has
    // z, values, keys, queries and a; channels are values, keys and queries.  A state of [value_dim, key_dim] takes in
    // softplus(a + rate_bias) of value times key.  out_norm [value_heads * value_dim] is one of each key head's values together,
    // and comes after the gate.
    // SWITCHYARD_CONVOLUTION: LFM2's.  mixed has gates before and after the convolution, and values: those of as many heads are all
    // channels, and no state is held but what the convolution read last.
    int32_t rule;
    float multiple;            // of what is added to hidden; 0: as it is
    const float *tap_bias;     // [channels], or null
    const float *skip;         // of a state space: [value_heads], what is added of each value
} SwitchyardDelta;

// Makes entries of runs of tokens: each number is the sum of what kv gives of a run's tokens, by the softmax of what gate gives of
// them plus `bias`; a norm and a rotation by the run's first position come after that.  Where runs overlap, both have a first half
// for the entry of the next run, and a second half for that of their own.
typedef struct {
    SwitchyardMatrix kv, gate;  // [dim, hidden], or [2 * dim, hidden]
    const float *bias;          // [rate, kv rows]
    const float *norm;          // [dim]
    int32_t dim;
} SwitchyardCompressor;

// Attention that compresses what lies behind a window (DeepSeek-V4, section 2.3), of norm(hidden), with the residual.  A single head
// has keys, which are values, too; what it gives is rotated back, and projected group by group of heads.  Matrices of hidden states
// are read together, and so are q_b and index_q.
typedef struct {
    SwitchyardMatrix q_a;       // [any, hidden]
    SwitchyardMatrix q_b;       // [heads * head_dim, q_a rows]
    SwitchyardMatrix kv;        // [head_dim, hidden]
    SwitchyardMatrix o_a;       // [any, heads * head_dim / groups]: as many rows for each group
    SwitchyardMatrix o_b;       // [hidden, o_a rows]
    SwitchyardMatrix index_q;   // [index_heads * index dim, q_a rows], of an index
    SwitchyardMatrix index_weights;  // [index_heads, hidden]
    const float *norm, *q_a_norm, *kv_norm;  // [hidden], [q_a rows], [head_dim]
    const float *sinks;         // [heads]
    const float *frequencies;   // [rope / 2], by which entries are rotated, and the cosines and sines times `angle_scale`
    const SwitchyardCompressor *compressor;  // of keys; or null: nothing is seen behind the window
    const SwitchyardCompressor *index;       // of what scores them, as of SwitchyardIndex; or null: all of them are seen
    float epsilon, scale, index_scale, angle_scale;
    int32_t hidden, heads, head_dim, rope, groups, rate, index_heads, most;  // rope: the last dimensions; neighbours are rotated together
} SwitchyardCompressedAttention;

// Several streams of hidden states between which a part of a layer is (manifold-constrained hyper-connections, DeepSeek-V4, section
// 2.2): it is given their sum by `pre`; what it adds goes to each by `post`, and they are mixed by a matrix.  All three are of
// products of the streams, as one vector of mean square 1: of `pre`, of `post` and of the matrix, row by row; the last streams of a
// model are only added up.
typedef struct {
    const float *mix;       // [streams * (2 + streams), streams * hidden], or [streams, streams * hidden]
    const float *base;      // [mix rows]
    float scale[3];         // of the three
    float norm_epsilon, epsilon;
    int32_t streams, rounds;  // in which the matrix's rows and columns are made to sum to 1; 0: there is `pre` alone
} SwitchyardStreams;

// Incremented whenever a signature or a struct above changes: a library with another number is not used.
SWITCHYARD_API int32_t switchyard_abi(void);

// From now on a process that reads where the file mapped to these bytes has no data any more (it became shorter, or its
// disk failed) writes the sentence to stderr and exits with the code, instead of a dump.  The sentence is copied.  Returns
// the number to stop with, or -1 where that cannot be: too many files, or Windows.
SWITCHYARD_API int32_t switchyard_watch_file(const void *begin, int64_t bytes, const char *sentence, int32_t code);
SWITCHYARD_API void switchyard_unwatch_file(int32_t number);

// Instruction sets, best last: 0 portable; on x86 1 AVX2 + FMA + F16C, 2 plus AVX-VNNI, 3 AVX-512 (F, BW, VL), 4 plus AVX-512
// VNNI, 5 plus AVX-512 BF16, 6 plus AMX BF16 (which the operating system must permit); on Arm 16 NEON, 17 plus its dot
// products, 18 plus products of matrices of bytes (i8mm).  Returns those that the processor advertises and this library was built for, as a set of bits.
SWITCHYARD_API uint32_t switchyard_advertised_isas(void);
// Runs every kernel of that instruction set on small problems: 0 if right.  May die of an illegal instruction where
// a virtual machine advertises what it traps on: call it in a child process.
SWITCHYARD_API int32_t switchyard_self_test(int32_t isa);
// Chooses the kernels for all later calls.
SWITCHYARD_API void switchyard_use_isa(int32_t isa);

// What an instruction set may be chosen for.
enum { SWITCHYARD_FEW = 0, SWITCHYARD_MANY = 1, SWITCHYARD_ATTENTION = 2 };
// Chooses them for the matrices of a format, with few vectors or with many, or for attention, whatever the format: the
// newest instructions are not the fastest of every processor.
SWITCHYARD_API void switchyard_use_isa_for(int32_t use, int32_t format, int32_t isa);

// `threads` in all, the caller among them.  Workers spin for a short while after each call and then sleep.
SWITCHYARD_API SwitchyardPool *switchyard_pool_create(int32_t threads);
SWITCHYARD_API void switchyard_pool_destroy(SwitchyardPool *pool);

// out[t] = sum over j of weights[t, j] * expert[index[t, j]](x[t]); ids outside [0, count) contribute nothing.
// x, out: bf16 [tokens, hidden]; index: int64 [tokens, k]; weights: float [tokens, k].
SWITCHYARD_API int32_t switchyard_experts(SwitchyardPool *pool, const SwitchyardExperts *experts, int32_t tokens,
                                          int32_t k, const uint16_t *x, const int64_t *index, const float *weights,
                                          uint16_t *out);

// out[t] = weight x[t] + bias: a plain matrix, x bf16 [tokens, columns], bias bf16 [rows] or null, out [tokens, rows]: bf16,
// or float where `floats`.
SWITCHYARD_API int32_t switchyard_linear(SwitchyardPool *pool, const SwitchyardMatrix *weight, int32_t tokens,
                                         const uint16_t *x, const uint16_t *bias, int32_t floats, void *out);

// In the next six, there are 1 to 8 tokens, and each one's result is that of a call of its own, bit by bit, whatever lies
// in other sequences' pages and wherever its own are.  Hidden states are
// floats; what goes into a matrix in bf16 or in blocks is rounded as its format asks, and keys and values to their type.

// A few tokens through a sparse block.  hidden, out: [tokens, hidden], not the same.  chosen: int64 [tokens, k] and
// shares: float [tokens, k] receive the routing.
SWITCHYARD_API int32_t switchyard_sparse_step(SwitchyardPool *pool, const SwitchyardSparseBlock *block, int32_t tokens,
                                              const float *hidden, int64_t *chosen, float *shares, float *out);

// Where a layer's keys and values lie: in pages, each of `page_tokens` tokens of one sequence, head after head.  A cache of
// one sequence is a single page, of as many tokens as there is room for.
typedef struct {
    void *keys;           // [pages, kv_heads, page_tokens, key_dim] of a type of SWITCHYARD_KV_*
    void *values;         // [pages, kv_heads, page_tokens, value_dim]
    float *key_scales;    // of int8: [pages, kv_heads, page_tokens]; else null
    float *value_scales;  // the same
    int64_t page_tokens;  // a multiple of 32; of a single page any number, but for int8
    int32_t type;
    int32_t window;       // how many of the last tokens a token sees, itself included; 0: all
    int32_t kept;         // and of the first, whatever the window (StreamingLLM's attention sinks)
    void *index_keys;     // of a layer with an index: bf16 [pages, page_tokens, dim]; else null
    // Of attention that compresses: keys are bf16 [pages, page_tokens, head_dim] of a window, values bf16 [pages, page_tokens, 2,
    // rows] what kv and gate of its compressor give, index_keys the same of the index's.  An entry lies in the page that has the
    // last token of its run, behind those before it: bf16 [pages, any, head_dim], and of an index [pages, any, dim].
    void *entries, *entry_keys;
    int64_t entry_step, entry_key_step;  // numbers from a page to the next
    int64_t run;          // if not 0 how many pages there are, and a head's lie side by side: [kv_heads, run, page_tokens, ...]
} SwitchyardPages;

// The next tokens of one sequence.
typedef struct {
    const int32_t *pages;  // those of the sequence, in order, with room for the new tokens; null: the first page alone
    int64_t held;          // tokens before the new ones
    int32_t tokens;        // new ones
    int32_t first;         // where they begin among all new tokens of the call: one piece after the other
    int32_t state;         // of a delta net's pages the one that the tokens go on from
    int32_t next_state;    // and the one that receives what becomes of it; may be the same
    const int32_t *entry_pages;  // as `pages`, where these are of a window: those that have entries
} SwitchyardPiece;

// The next tokens of some sequences through attention, whose keys and values go into their pages.  cos, sin: an angle of
// each token for each pair of dimensions that are rotated together, each `angle_step` floats after the one before, and
// each token's `token_step` floats after those of the one before.  hidden, out: [tokens, hidden], not the same.
SWITCHYARD_API int32_t switchyard_attention_step(SwitchyardPool *pool, const SwitchyardAttention *attention,
                                                 const SwitchyardPages *held, const SwitchyardPiece *pieces,
                                                 int32_t count, const float *hidden, const float *cos,
                                                 const float *sin, int32_t angle_step, int64_t token_step, float *out);

// The same of latent attention: its keys are latents, bf16 [pages, page_tokens, rank], its values rotary keys, bf16
// [pages, page_tokens, rope].  cos, sin: rope / 2 angles of each token.
SWITCHYARD_API int32_t switchyard_latent_step(SwitchyardPool *pool, const SwitchyardLatentAttention *attention,
                                              const SwitchyardPages *held, const SwitchyardPiece *pieces,
                                              int32_t count, const float *hidden, const float *cos, const float *sin,
                                              int32_t angle_step, int64_t token_step, float *out);

// The same of attention that compresses.
SWITCHYARD_API int32_t switchyard_compressed_step(SwitchyardPool *pool, const SwitchyardCompressedAttention *attention,
                                                  const SwitchyardPages *held, const SwitchyardPiece *pieces, int32_t count,
                                                  const float *hidden, const float *cos, const float *sin,
                                                  int32_t angle_step, int64_t token_step, float *out);

// The next tokens of some sequences through a gated delta net.  held: pages of a state each, of which keys are float
// [pages, channels, kernel], what the convolutions read last, and values float [pages, value_heads, key_dim, value_dim].  A page
// that receives a state is no other piece's.  hidden, out: [tokens, hidden], not the same.
SWITCHYARD_API int32_t switchyard_delta_step(SwitchyardPool *pool, const SwitchyardDelta *delta, const SwitchyardPages *held,
                                             const SwitchyardPiece *pieces, int32_t count, const float *hidden, float *out);

// Any number of tokens of one sequence, whose projections are done.  given: of mixed, k, v, z, b and a, [tokens, rows] each, null
// for those without rows.  out: [tokens, value_heads * value_dim], what o is to be multiplied with.
SWITCHYARD_API int32_t switchyard_delta_rows(SwitchyardPool *pool, const SwitchyardDelta *delta, const SwitchyardPages *held,
                                             const SwitchyardPiece *piece, const float *const *given, float *out);

// A decoder layer of attention and a sparse block, where its keys and values, or its states, are, and the next tokens as it
// holds them.
typedef struct {
    const SwitchyardAttention *attention;  // at most one of the three and `compressed`, the others null
    const SwitchyardLatentAttention *latent;
    const SwitchyardDelta *delta;
    const SwitchyardSparseBlock *block;  // or null
    SwitchyardPages held;
    const SwitchyardPiece *pieces;  // as many in all layers, each of the same tokens
    int64_t *chosen;
    float *shares;
    int32_t angles;  // which of the step's it rotates by
    const SwitchyardCompressedAttention *compressed;
    const SwitchyardStreams *streams[2];  // round attention and the block; null where hidden states are a single stream
} SwitchyardLayer;

// Angles of a step's tokens, as switchyard_attention_step takes them.
typedef struct {
    const float *cos, *sin;
    int32_t angle_step;
    int64_t token_step;
} SwitchyardAngles;

// A model's layers, one after the other, and its output: head(norm(hidden)) + bias.
typedef struct {
    const SwitchyardLayer *layers;
    const uint16_t *norm;  // bf16 [hidden]
    const uint16_t *bias;  // bf16 [head rows], or null
    SwitchyardMatrix head;  // plain, [vocabulary, hidden]
    float epsilon;
    int32_t count;
    float norm_offset;      // added to the weights of its norm
    const float *wide_norm;  // [hidden], in place of `norm`; or null
    const SwitchyardStreams *streams;  // what adds up the last ones; each begins as the hidden states.  Or null: there is one
} SwitchyardModel;

// A few tokens through all layers of a model, as a step of each in turn would compute them.  count: of the pieces of each
// layer, which together have `tokens` tokens.  angles: those that its layers name.  hidden: [tokens, hidden]; logits:
// [tokens, vocabulary], bf16 if the head is, else float.
SWITCHYARD_API int32_t switchyard_model_step(SwitchyardPool *pool, const SwitchyardModel *model, int32_t count,
                                             int32_t tokens, const float *hidden, const SwitchyardAngles *angles,
                                             void *logits);

// Fills weights, scales and zeros of `target` (which point to memory that may be written) from source: bf16
// [rows, columns].  A table is an input, which weights are fitted to.  int4: half-quadratic optimisation of scales and
// zeros, in at most `rounds` rounds.
SWITCHYARD_API int32_t switchyard_quantise(SwitchyardPool *pool, const SwitchyardMatrix *target,
                                           const uint16_t *source, int32_t rounds);

// Blocks [begin, end) of a quantised matrix as bf16, out: [rows of these blocks, columns], gate and up rows paired in
// `out` as they are in the matrix.
SWITCHYARD_API int32_t switchyard_dequantise(SwitchyardPool *pool, const SwitchyardMatrix *matrix, int64_t begin,
                                             int64_t end, uint16_t *out);

// How codes lie in words of 32 bits, of which `stride` follow each other; the first code is in a word's lowest bits.
enum {
    SWITCHYARD_ROWS = 1,     // words[row * stride + ...], of neighbouring columns
    SWITCHYARD_COLUMNS = 2,  // words[... * stride + row], of neighbouring columns
    SWITCHYARD_AWQ = 3,      // words[column * stride + row / 8], of 4 bits, rows 0, 2, 4, 6, 1, 3, 5, 7 of eight
};

// Codes of 2, 4 or 8 bits with, for each row and each `group` columns, which are neighbours and 32 or several times that
// many, a scale and a zero or what is added: w = scale * (code - zero), or scale * code + added; the other one is null.
// 8 bits: neither; codes are signed, or, if flipped, unsigned with a zero of 128.
typedef struct {
    const uint8_t *words;
    const float *scales, *zeros, *added;  // [rows, columns / group]
    int64_t stride, group;
    int32_t arrangement, bits, flipped;
} SwitchyardCodes;

// Rows as GGUF files have them, in blocks of a type, which has ggml's number: row after row from `blocks`, each of whole
// blocks.  order: which of them are meant, one after the other, or null for all as they are.
// Or, if not null, codes.
typedef struct {
    const uint8_t *blocks;
    const int64_t *order;
    int32_t type;
    const SwitchyardCodes *codes;
} SwitchyardBlocks;

// A matrix to be made of blocks: its weights, scales and zeros point to memory that may be written, its table is read.
// second: the up rows, where gate and up rows are apart; else without blocks.
typedef struct {
    SwitchyardMatrix target;
    SwitchyardBlocks first, second;
} SwitchyardRepack;

// Fills the targets.  Codes are kept where target's format keeps those of the type, other groups are fitted as by
// switchyard_quantise.  2 where a type is not known, its blocks do not divide the columns, or target's format is not that
// of codes: nothing is written.
SWITCHYARD_API int32_t switchyard_repack(SwitchyardPool *pool, const SwitchyardRepack *matrices, int64_t count,
                                         int32_t rounds);

// When a step of few tokens ran, by the clock of Python's time.perf_counter_ns, and how many experts its tokens chose,
// each counted once.  which: the structure that describes the step.
typedef struct {
    const void *which;
    int64_t begun_ns, ended_ns, count;
} SwitchyardStamp;

// Since the library was loaded: stamps, those dropped because they were not taken in time, experts chosen, dropped ones
// included; and the end of the last step.  Written by the thread that runs the steps; `taken`, the stamps that have been
// taken, by the one that takes them.
typedef struct {
    uint64_t written, dropped, chosen;
    int64_t ended_ns;
    uint64_t taken;
} SwitchyardStampCounts;

// From now on every switchyard_sparse_step, _attention_step, _latent_step, _compressed_step and _delta_step is stamped, or none; null: out of memory.
SWITCHYARD_API const SwitchyardStampCounts *switchyard_stamps(int32_t on);

// Moves the oldest stamps into `stamps`, at most `most`, and the experts that they chose into `chosen`, one after the
// other; how many stamps.  On any one thread, while steps run on another.
SWITCHYARD_API int64_t switchyard_take_stamps(int64_t most, SwitchyardStamp *stamps, int64_t most_chosen,
                                              int32_t *chosen);

// Blocks as numbers, out: [rows, columns] of floats, or of bf16.  2 as above.
SWITCHYARD_API int32_t switchyard_unpack(SwitchyardPool *pool, const SwitchyardBlocks *source, int64_t rows,
                                         int64_t columns, int32_t floats, void *out);
