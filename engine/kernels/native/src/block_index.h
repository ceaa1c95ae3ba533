// Which blocks of tokens grouped attention sees where a sequence has more than it may: for each of its key-value heads those
// that hold the keys of an index which its query meets best (MiniMax-M3).
#pragma once
#include <cstdint>
#include <vector>

#include "attend.h"
#include "cached_attention.h"
#include "kernel_set.h"
#include "matrix.h"

// The index of one layer, and what it finds for the tokens of a step.
class BlockIndex {
  public:
    // layer: without an index all is seen.
    void resize(const SwitchyardAttention &layer, const SwitchyardPages &held, const PieceAttention &attention, int32_t tokens);

    // Its matrices of hidden states, block by block: after them, `prepare`.
    int64_t blocks() const { return index_ ? blocks_of(index_->q) + blocks_of(index_->k) : 0; }
    void project(const Kernels &kernels, int64_t block, const Vectors &x, const int32_t *all);
    // A token's queries and key, with their norms; turn(x): rotates one by the token's angles.
    int64_t heads() const { return index_ ? layer_->kv_heads + 1 : 0; }
    template <class Turn> void prepare(int64_t token, int64_t head, Turn turn) {
        const bool is_query = head < layer_->kv_heads;
        float *x = is_query ? &queries_[static_cast<size_t>((token * layer_->kv_heads + head) * index_->dim)]
                            : &keys_[static_cast<size_t>(token * index_->dim)];
        norm(is_query ? index_->q_norm : index_->k_norm, x);
        turn(x);
        if (is_query)
            for (int64_t i = 0; i < index_->dim; ++i) x[i] = round_bf16(x[i]);
        else
            write_key(token, x);
    }
    // After the keys and the queries of all tokens.
    int64_t scoring() const { return index_ ? begins_.back() : 0; }
    void score(const Kernels &kernels, int64_t item);
    // For each token and key-value head.
    int64_t choosing() const { return index_ && begins_.back() > 0 ? int64_t{tokens_} * layer_->kv_heads : 0; }
    void choose(int64_t item, const HeldRows &rows);
    // Rows of a head as a token sees them: all of them, or the blocks that it has chosen.
    HeldRows chosen(int64_t token, int64_t kv_head, HeldRows rows) const;

  private:
    bool chooses(int64_t token) const { return attention_->position_of(token) / index_->block_tokens >= index_->most; }
    int64_t units() const { return int64_t{index_->most} * index_->block_tokens / kPageTokens; }
    void norm(const uint16_t *weight, float *x) const;
    void write_key(int64_t token, const float *key) const;

    const SwitchyardAttention *layer_ = nullptr;
    const SwitchyardBlockIndex *index_ = nullptr;
    const SwitchyardPages *held_ = nullptr;
    const PieceAttention *attention_ = nullptr;
    int32_t tokens_ = 0;
    std::vector<int64_t> begins_;  // where the scoring of each token begins among all: an item for each of its blocks
    std::vector<float> keys_;      // [tokens, dim]
    std::vector<float> queries_;   // [tokens, kv_heads, dim]
    std::vector<float> scores_;    // of each item [kv_heads]
    std::vector<int32_t> tables_;  // [tokens, kv_heads, units]: which kPageTokens rows each of the chosen lie in
};
