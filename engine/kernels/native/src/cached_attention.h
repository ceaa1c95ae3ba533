// Attention of one token over keys and values that lie in rows or in pages of them: what decoding does.
//
// A long cache is cut into chunks that threads share, their results joined by their softmax's totals (Flash-Decoding).
// Where a cache is cut depends on what the token sees alone, so that a result is the same for any number of threads, and
// wherever pages are.
#pragma once
#include <cstdint>
#include <vector>

#include "attend.h"

// Which tokens one sees: those of [from, to), and the first `kept`.
struct Seen {
    int64_t from, to, kept;

    // Of the one at `position`, itself included.
    static Seen by(const SwitchyardPages &held, int64_t position) {
        const int64_t from = held.window > 0 && held.window <= position ? position + 1 - held.window : 0;
        return {from, position + 1, from ? held.kept : 0};
    }
};

// Logits of attending to nothing, [heads], in bf16 or as floats; or none.
struct Sinks {
    const uint16_t *narrow = nullptr;
    const float *wide = nullptr;

    bool are_there() const { return narrow || wide; }
    float of(int64_t head) const { return wide ? wide[head] : from_bf16(narrow[head]); }
};

// How many blocks of tokens one sees at most, its own among them, which then lie in rows of their own; 0: any number.
struct Few {
    int64_t most = 0, block_tokens = 1;

    Seen of(const Seen &seen) const {
        const int64_t own = (seen.to - 1) / block_tokens;
        return most == 0 || own < most ? seen : Seen{0, (most - 1) * block_tokens + (seen.to - 1) % block_tokens + 1, 0};
    }
};

// The attention of one token: `heads` queries, of which `heads / groups` in a row share a group's rows.
class CachedAttention {
  public:
    // rows: of any group; their sizes count.
    void resize(int64_t heads, int64_t groups, const Seen &seen, float scale, const HeldRows &rows, const Sinks &sinks);
    // Before any item runs: where query `head` goes, [query_dim].
    float *query(int64_t head) { return &queries_[static_cast<size_t>(head * query_dim_)]; }
    // What threads share; `rows` are those of the item's group.
    int64_t items() const { return groups_ * sets_ * chunks_; }
    int64_t group_of(int64_t item) const { return item / (sets_ * chunks_); }
    void run(int64_t item, int32_t type, const HeldRows &rows);
    // After all items: writes the attention of a head, [value_dim].
    void finish(int64_t head, float *out);

  private:
    int64_t heads_ = 0, groups_ = 0, query_dim_ = 0, value_dim_ = 0;
    Seen seen_ = {};
    int64_t begin_ = 0;   // of the first chunk: a multiple of kPageTokens
    int64_t sets_ = 0;    // of at most kMostTogether queries, in each group
    int64_t chunks_ = 0, chunk_tokens_ = 0;
    float scale_ = 0;
    Sinks sinks_;
    std::vector<float> queries_;                // [heads, query_dim]
    std::vector<float> tops_, totals_, mixed_;  // [chunks, heads], the last also [value_dim]
};

// That of the tokens of some pieces: what each of them computes alone, it computes here.
class PieceAttention {
  public:
    void resize(const SwitchyardPages &held, const SwitchyardPiece *pieces, int32_t count, int64_t heads, int64_t groups,
                float scale, const HeldRows &rows, const uint16_t *sinks, const Few &few = {});
    int32_t tokens() const { return static_cast<int32_t>(piece_of_.size()); }
    CachedAttention &operator[](int64_t token) { return of_token_[static_cast<size_t>(token)]; }
    const SwitchyardPiece &piece_of(int64_t token) const { return *piece_of_[static_cast<size_t>(token)]; }
    int64_t position_of(int64_t token) const { return piece_of(token).held + token - piece_of(token).first; }
    // The tokens that all new ones follow, each counted for every one that does.
    int64_t held() const { return held_; }
    // What threads share.
    int64_t items() const { return begins_.back(); }
    // rows(token, group): those that an item goes over.
    template <class Rows> void run(int64_t item, int32_t type, Rows rows) {
        size_t at = 0;
        while (item >= begins_[at + 1]) ++at;
        // A piece's tokens next to each other: they go over the same rows, which are still in the cache.
        const SwitchyardPiece &piece = pieces_[at];
        const int64_t local = item - begins_[at], its = local / piece.tokens;
        const int64_t token = piece.first + local % piece.tokens;
        CachedAttention &own = (*this)[token];
        if (its < own.items()) own.run(its, type, rows(token, own.group_of(its)));
    }

  private:
    const SwitchyardPiece *pieces_ = nullptr;
    int64_t held_ = 0;
    std::vector<const SwitchyardPiece *> piece_of_;  // of each token
    std::vector<CachedAttention> of_token_;
    std::vector<int64_t> begins_;                    // where each piece's items begin, and the end of all
};
