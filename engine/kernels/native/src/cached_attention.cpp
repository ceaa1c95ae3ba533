// The attention of one token over what is held: how its work is cut, and its results joined.
#include "cached_attention.h"

#include <algorithm>
#include <cmath>

#include "dispatch.h"

namespace {

constexpr int64_t kFewestTokens = 256, kMostChunks = 16;  // fewer tokens are not worth another result to join

}  // namespace

void CachedAttention::resize(int64_t heads, int64_t groups, const Seen &seen, float scale, const HeldRows &rows,
                             const Sinks &sinks) {
    heads_ = heads;
    groups_ = groups;
    seen_ = seen;
    begin_ = seen.kept > 0 ? 0 : seen.from / kPageTokens * kPageTokens;
    scale_ = scale;
    query_dim_ = rows.query_dim();
    value_dim_ = rows.value_dim;
    sinks_ = sinks;
    sets_ = (heads / groups + kMostTogether - 1) / kMostTogether;
    const int64_t tokens = seen.to - begin_, even = (tokens + kMostChunks - 1) / kMostChunks;
    chunk_tokens_ = std::max(kFewestTokens, (even + kPageTokens - 1) / kPageTokens * kPageTokens);
    chunks_ = (tokens + chunk_tokens_ - 1) / chunk_tokens_;
    queries_.resize(static_cast<size_t>(heads * query_dim_));
    tops_.resize(static_cast<size_t>(chunks_ * heads));
    totals_.resize(tops_.size());
    mixed_.resize(tops_.size() * static_cast<size_t>(value_dim_));
}

void CachedAttention::run(int64_t item, int32_t type, const HeldRows &rows) {
    // Queries over the same rows follow each other: the rows are still in the cache.
    const int64_t together = heads_ / groups_, set = item % sets_, chunk = item / sets_ % chunks_;
    const int64_t first = group_of(item) * together + set * kMostTogether, at = chunk * heads_ + first;
    Queries queries;
    queries.count = static_cast<int>(std::min<int64_t>(kMostTogether, (group_of(item) + 1) * together - first));
    queries.q = query(first);
    queries.scale = scale_;
    std::fill_n(queries.from, queries.count, seen_.from);
    std::fill_n(queries.to, queries.count, seen_.to);
    queries.kept = seen_.kept;
    queries.tops = &tops_[at];
    queries.totals = &totals_[at];
    queries.mixed = &mixed_[at * value_dim_];
    std::fill_n(queries.tops, queries.count, kLow);
    std::fill_n(queries.totals, queries.count, 0.0f);
    std::fill_n(queries.mixed, queries.count * value_dim_, 0.0f);
    const int64_t begin = begin_ + chunk * chunk_tokens_;
    kernels_in_use().attention->of_type[type](rows, begin, std::min(begin + chunk_tokens_, seen_.to), queries);
}

void CachedAttention::finish(int64_t head, float *out) {
    float top = tops_[head], total = 0;
    for (int64_t chunk = 1; chunk < chunks_; ++chunk) top = std::max(top, tops_[chunk * heads_ + head]);
    if (sinks_.are_there()) {
        const float sink = sinks_.of(head);
        top = std::max(top, sink);
        total = std::exp(sink - top);
    }
    std::fill_n(out, value_dim_, 0.0f);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const int64_t at = chunk * heads_ + head;
        const float weight = std::exp(tops_[at] - top), *mixed = &mixed_[at * value_dim_];
        total += weight * totals_[at];
        for (int64_t i = 0; i < value_dim_; ++i) out[i] += weight * mixed[i];
    }
    for (int64_t i = 0; i < value_dim_; ++i) out[i] /= total;
}

void PieceAttention::resize(const SwitchyardPages &held, const SwitchyardPiece *pieces, int32_t count, int64_t heads,
                            int64_t groups, float scale, const HeldRows &rows, const uint16_t *sinks, const Few &few) {
    pieces_ = pieces;
    held_ = 0;
    piece_of_.clear();
    begins_.assign(1, 0);
    for (int32_t i = 0; i < count; ++i) {
        const SwitchyardPiece &piece = pieces[i];
        piece_of_.insert(piece_of_.end(), static_cast<size_t>(piece.tokens), &piece);
        held_ += piece.tokens * piece.held;
        if (of_token_.size() < piece_of_.size()) of_token_.resize(piece_of_.size());
        int64_t most = 0;  // items of a token: the last one's, but for a window
        for (int64_t token = piece.first; token < tokens(); ++token) {
            CachedAttention &own = (*this)[token];
            own.resize(heads, groups, few.of(Seen::by(held, position_of(token))), scale, rows, {sinks});
            most = std::max(most, own.items());
        }
        begins_.push_back(begins_.back() + piece.tokens * most);
    }
}
