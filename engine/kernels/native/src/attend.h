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

// One token of one head through the gated delta rule: delta_rule.h.
struct DeltaHead {
    float *state;              // [key_dim, value_dim]: what the keys so far are to give, less what has decayed
    const float *key, *query;  // [key_dim]
    const float *value;        // [value_dim]
    const float *decay;        // [key_dim]: what is left of each row of the state
    float beta;                // how far the key's value is replaced
    int64_t key_dim, value_dim;
    float *out;  // [value_dim]: what the new state gives for the query
};

struct AttendKernels {
    Attend of_type[4];  // of keys and values, SWITCHYARD_KV_*
    void (*delta)(const DeltaHead &head);
};

extern const AttendKernels kPortableAttend;
#if defined(__x86_64__) || defined(_M_X64)
extern const AttendKernels kAvx2Attend;
extern const AttendKernels kAvx512Attend;
extern const AttendKernels *const kAvx512Bf16Attend;  // null if the compiler does not know the instructions
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const AttendKernels kNeonAttend;
#endif
