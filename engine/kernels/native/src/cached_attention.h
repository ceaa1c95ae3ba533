// Attention of one token over keys and values that lie in rows, one after the other: what decoding does.
//
// The queries that share keys go over them together, so that each key and value is read once; a long cache is cut into
// chunks that threads share, their results joined by their softmax's totals (Flash-Decoding).  Where a cache is cut
// depends on its length alone, so that a result is the same for any number of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel_set.h"

constexpr int kMostTogether = 8;  // queries that go over the rows together

// Rows of a cache: a token's score is the product of a query with its key, followed by its further key if there is one.
struct CachedRows {
    const uint16_t *keys, *values;        // bf16 [tokens, key_dim], [tokens, value_dim]
    int64_t key_dim, value_dim;
    const uint16_t *further_keys = nullptr;  // [tokens, further_dim]
    int64_t further_dim = 0;
};

// What `queries` found in a chunk: the sum of values is not divided by `totals` yet.
struct ChunkResult {
    float *tops, *totals;  // [queries]: the highest score, and the sum of exp(score - top)
    float *mixed;          // [queries, value_dim]
};

// queries: [count, key_dim + further_dim], scaled; count <= kMostTogether.
using AttendRows = void (*)(const CachedRows &rows, int64_t begin, int64_t end, const float *queries, int count,
                            const ChunkResult &result);

extern const AttendRows kPortableAttend;
#if defined(__x86_64__) || defined(_M_X64)
extern const AttendRows kAvx2Attend;
extern const AttendRows kAvx512Attend;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const AttendRows kNeonAttend;
#endif
AttendRows attend_rows_of(const KernelSet &kernels);

// The attention of one token: `heads` queries, of which `heads / groups` in a row share a group's rows.
class CachedAttention {
  public:
    // sinks: bf16 [heads], logits of attending to nothing, or null.
    void resize(int64_t heads, int64_t groups, int64_t tokens, const CachedRows &rows, const uint16_t *sinks);
    // Before any item runs: where query `head` goes, scaled, [key_dim + further_dim].
    float *query(int64_t head) { return &queries_[static_cast<size_t>(head * query_dim_)]; }
    // What threads share; `rows` are those of the item's group.
    int64_t items() const { return groups_ * sets_ * chunks_; }
    int64_t group_of(int64_t item) const { return item / (sets_ * chunks_); }
    void run(int64_t item, const CachedRows &rows);
    // After all items: writes the attention of a head, [value_dim].
    void finish(int64_t head, float *out);

  private:
    int64_t heads_ = 0, groups_ = 0, tokens_ = 0, query_dim_ = 0, value_dim_ = 0;
    int64_t sets_ = 0;    // of at most kMostTogether queries, in each group
    int64_t chunks_ = 0, chunk_tokens_ = 0;
    const uint16_t *sinks_ = nullptr;
    std::vector<float> queries_;                // [heads, query_dim]
    std::vector<float> tops_, totals_, mixed_;  // [chunks, heads], the last also [value_dim]
};
