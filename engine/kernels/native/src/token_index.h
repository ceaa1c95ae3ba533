// Which tokens attention sees where a sequence has more than it may: those that an index with keys of its own scores highest
// (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2).
#pragma once
#include <cstdint>
#include <vector>

#include "attend.h"
#include "cached_attention.h"
#include "kernel_set.h"
#include "matrix.h"

// The `most` highest of scores [count], lower positions first where they are alike; their positions, in order.
void take_highest(const float *scores, int64_t count, int64_t most, int32_t *out);

// The index of one layer, and what it finds for the tokens of a step.  A layer without one of its own takes what the last
// one before it has chosen.
class TokenIndex {
  public:
    // index: null if tokens see all that come before them.  latent, x: what its queries and its keys are made of.
    void resize(const SwitchyardIndex *index, const SwitchyardPages &held, const PieceAttention &attention, int32_t tokens);
    bool is_there() const { return index_ != nullptr; }
    bool is_own() const { return index_ && index_->k.rows > 0; }

    // Its matrices of hidden states, block by block: after them, `keep`.
    int64_t blocks() const { return is_own() ? blocks_of(index_->k) + blocks_of(index_->weights) : 0; }
    void project(const Kernels &kernels, int64_t block, const Vectors &x, const int32_t *all);
    // Writes a token's key to its row.  turn(x): rotates the first dimensions of a key or a query by the token's angles.
    template <class Turn> void keep(int64_t token, Turn turn) {
        float *key = &keys_[static_cast<size_t>(token * index_->dim)];
        norm(key);
        turn(key);
        write_key(token, key);
    }
    // Its queries, block by block: after them, `ask`.
    int64_t query_blocks() const { return is_own() && choosing_ ? blocks_of(index_->q) : 0; }
    void project_queries(const Kernels &kernels, int64_t block, const Vectors &latent, const int32_t *all);
    int64_t asking() const { return is_own() && choosing_ ? int64_t{tokens_} * index_->heads : 0; }
    template <class Turn> void ask(int64_t at, Turn turn) {
        float *query = &queries_[static_cast<size_t>(at * index_->dim)];
        turn(query);
        for (int64_t i = 0; i < index_->dim; ++i) query[i] = round_bf16(query[i]);
    }
    // After the keys and the queries of all tokens.
    int64_t scoring() const { return is_own() ? begins_.back() : 0; }
    void score(const Kernels &kernels, int64_t item);
    // By a thread for each token.
    int64_t choosing() const { return is_own() && choosing_ ? tokens_ : 0; }
    void choose(int64_t token);
    // What a token has chosen, in the order of positions; null if it sees all.
    const int32_t *chosen(int64_t token) const { return chooses(token) ? index_->chosen + token * index_->most : nullptr; }

  private:
    bool chooses(int64_t token) const { return index_ && attention_->position_of(token) >= index_->most; }
    void norm(float *key) const;
    void write_key(int64_t token, const float *key) const;

    const SwitchyardIndex *index_ = nullptr;
    const SwitchyardPages *held_ = nullptr;
    const PieceAttention *attention_ = nullptr;
    int32_t tokens_ = 0;
    bool choosing_ = false;          // whether any token has to
    std::vector<int64_t> begins_;    // where the scoring of each token begins among all
    std::vector<int64_t> places_;    // and where its scores do
    std::vector<float> keys_;        // [tokens, dim]
    std::vector<float> weights_;     // [tokens, heads]
    std::vector<float> queries_;     // [tokens, heads, dim]
    std::vector<float> scores_;
};
