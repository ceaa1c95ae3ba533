// Attention of one token over keys and values that lie in rows, one after the other: what decoding does.
//
// A long cache is cut into chunks that threads share, their results joined by their softmax's totals (Flash-Decoding).
// Where a cache is cut depends on its length alone, so that a result is the same for any number of threads.
#pragma once
#include <cstdint>
#include <vector>

#include "attend.h"

// The attention of one token: `heads` queries, of which `heads / groups` in a row share a group's rows.
class CachedAttention {
  public:
    // sinks: bf16 [heads], logits of attending to nothing, or null.
    void resize(int64_t heads, int64_t groups, int64_t tokens, float scale, const HeldRows &rows, const uint16_t *sinks);
    // Before any item runs: where query `head` goes, [query_dim].
    float *query(int64_t head) { return &queries_[static_cast<size_t>(head * query_dim_)]; }
    // What threads share; `rows` are those of the item's group.
    int64_t items() const { return groups_ * sets_ * chunks_; }
    int64_t group_of(int64_t item) const { return item / (sets_ * chunks_); }
    void run(int64_t item, int32_t type, const HeldRows &rows);
    // After all items: writes the attention of a head, [value_dim].
    void finish(int64_t head, float *out);

  private:
    int64_t heads_ = 0, groups_ = 0, tokens_ = 0, query_dim_ = 0, value_dim_ = 0;
    int64_t sets_ = 0;    // of at most kMostTogether queries, in each group
    int64_t chunks_ = 0, chunk_tokens_ = 0;
    float scale_ = 0;
    const uint16_t *sinks_ = nullptr;
    std::vector<float> queries_;                // [heads, query_dim]
    std::vector<float> tops_, totals_, mixed_;  // [chunks, heads], the last also [value_dim]
};
