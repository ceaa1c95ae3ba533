// Attention of some queries over keys and values in rows: one implementation for the cache of a single sequence, for pages
// that many sequences share, and for latents.
//
// Queries that share keys go over them together, so that each key and value is read once, and keep a running softmax
// (Milakov and Gimelshein 2018), so that rows may come in several calls.
#pragma once
#include "kernel_set.h"
#include "switchyard_kernels.h"

constexpr int64_t kPageTokens = 32;  // rows that lie side by side, and the fewest of a page
constexpr int kMostTogether = 8;     // queries that go over the rows together
constexpr float kLow = -1e30f;       // below every score

// Rows of one head: a token's score is the product of a query with its key, followed by its further key if there is one.
struct HeldRows {
    const void *keys, *values;  // [rows, key_dim], [rows, value_dim]
    int64_t key_dim, value_dim;
    const void *further_keys = nullptr;  // [rows, further_dim]
    int64_t further_dim = 0;
    const float *key_scales = nullptr, *value_scales = nullptr, *further_scales = nullptr;  // [rows], whole pages of them: int8 only
    const int32_t *pages = nullptr;     // where each `page_tokens` tokens lie; null: one after the other
    int64_t page_tokens = kPageTokens;  // a multiple of kPageTokens
    int64_t page_rows = kPageTokens;    // rows from a page to the next

    int64_t query_dim() const { return key_dim + further_dim; }
    int64_t row_of(int64_t token) const {  // the first of kPageTokens
        if (!pages) return token;
        const auto at = static_cast<uint32_t>(token), each = static_cast<uint32_t>(page_tokens);
        return pages[at / each] * page_rows + at % each;
    }
};

// Queries of one sequence, and what they have found so far.
struct Queries {
    int count;       // up to kMostTogether
    const float *q;  // [count, query_dim]
    float scale;     // of scores
    // Positions that each sees, besides the first `kept`.
    int64_t from[kMostTogether], to[kMostTogether];
    int64_t kept = 0;
    float softcap = 0;  // scores become softcap * tanh(score / softcap); 0: they do not
    float *tops, *totals;  // [count]: the highest score, kLow at first, and the sum of exp(score - top)
    float *mixed;          // [count, value_dim]: the sum of values, not divided by the total
};

// Tokens [begin, end); begin is a multiple of kPageTokens.
using Attend = void (*)(const HeldRows &rows, int64_t begin, int64_t end, const Queries &queries);

// Some tokens of one head, one after the other, through the gated delta rule: delta_rule.h.  Each token's numbers lie `step`
// floats after those of the one before.
struct DeltaHead {
    const float *before;  // [key_dim, value_dim]: what the keys so far are to give, less what has decayed
    float *state;         // receives it behind these tokens; may be the same
    int64_t tokens, key_dim, value_dim;
    const float *key, *query, *value;  // [key_dim] and [value_dim]
    int64_t step;                      // of these three
    const float *decay;                // [tokens, key_dim]: what is left of each row of the state
    const float *beta;                 // [tokens]: how far the key's value is replaced
    float *out;                        // [value_dim]: what the new state gives for the query
    int64_t out_step;
};

// Some tokens through short causal convolutions of `count` channels, each with weights of its own, and silu.
struct Convolution {
    const float *before;   // [count, kernel]: what went in last, the newest last
    float *recent;         // receives it behind these tokens; may be the same
    const float *taps;     // [kernel], each `taps_step` floats after the one before: the channels' weights, the newest last
    int64_t count, kernel, taps_step, tokens;
    const float *x;        // [tokens, count]
    int64_t x_step;
    float *out;            // [tokens, count]
    int64_t out_step;
    const float *bias;     // [count], or null
    bool is_linear;        // no silu
};

// Queries of an index, which meet the keys alone.
struct IndexQueries {
    int64_t count;
    const float *q;        // [count, key_dim], bf16 numbers
    const float *weights;  // [count]: scores are the weighted sum of what products are above 0; null: the products, [count]
};

struct AttendKernels {
    Attend of_type[4];  // of keys and values, SWITCHYARD_KV_*
    void (*delta)(const DeltaHead &head);
    // The same through Mamba 2's rule: states are [value_dim, key_dim], decays [tokens], and beta how much of a value is taken in.
    void (*space)(const DeltaHead &head);
    void (*convolve)(const Convolution &convolution);
    // out = x * sigmoid(gate), or x * gate * sigmoid(gate) if `twice`; [n].
    void (*gate)(const float *x, const float *gate, int64_t n, bool twice, float *out);
    // out = exp(rate * softplus(x + bias)), [n]: rate is below 0.
    void (*decay)(const float *x, const float *bias, float rate, int64_t n, float *out);
    // Scores of tokens [begin, end), of keys in bf16: [tokens], or [count] of these; each a whole number of kPageTokens, of
    // which those beyond `end` mean nothing.
    void (*index)(const HeldRows &rows, int64_t begin, int64_t end, const IndexQueries &queries, float *scores);
};

extern const AttendKernels kPortableAttend;
#if defined(__x86_64__) || defined(_M_X64)
extern const AttendKernels kAvx2Attend;
extern const AttendKernels kAvx512Attend;
extern const AttendKernels *const kAvx512Bf16Attend;  // null if the compiler does not know the instructions
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const AttendKernels kNeonAttend;
#endif
