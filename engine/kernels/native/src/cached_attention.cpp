// The attention of one token over a cache in rows: how its work is cut, and its results joined.
#include "cached_attention.h"

#include <cmath>

#include "dispatch.h"

namespace {

constexpr int64_t kFewestTokens = 256, kMostChunks = 16;  // fewer tokens are not worth another result to join

}  // namespace

AttendRows attend_rows_of(const KernelSet &kernels) {
#if defined(__x86_64__) || defined(_M_X64)
    if (&kernels == &kAvx512Kernels) return kAvx512Attend;
    if (&kernels == &kAvx2Kernels) return kAvx2Attend;
#elif defined(__aarch64__) || defined(_M_ARM64)
    if (&kernels == &kNeonKernels) return kNeonAttend;
#endif
    return kPortableAttend;
}

void CachedAttention::resize(int64_t heads, int64_t groups, int64_t tokens, const CachedRows &rows,
                             const uint16_t *sinks) {
    heads_ = heads;
    groups_ = groups;
    tokens_ = tokens;
    query_dim_ = rows.key_dim + rows.further_dim;
    value_dim_ = rows.value_dim;
    sinks_ = sinks;
    sets_ = (heads / groups + kMostTogether - 1) / kMostTogether;
    chunk_tokens_ = std::max(kFewestTokens, (tokens + kMostChunks - 1) / kMostChunks);
    chunks_ = (tokens + chunk_tokens_ - 1) / chunk_tokens_;
    queries_.resize(static_cast<size_t>(heads * query_dim_));
    tops_.resize(static_cast<size_t>(chunks_ * heads));
    totals_.resize(tops_.size());
    mixed_.resize(tops_.size() * static_cast<size_t>(value_dim_));
}

void CachedAttention::run(int64_t item, const CachedRows &rows) {
    // Queries over the same rows follow each other: the rows are still in the cache.
    const int64_t together = heads_ / groups_, set = item % sets_, chunk = item / sets_ % chunks_;
    const int64_t first = group_of(item) * together + set * kMostTogether;
    const int64_t count = std::min<int64_t>(kMostTogether, (group_of(item) + 1) * together - first);
    float *queries = query(first);
    const int64_t at = chunk * heads_ + first, begin = chunk * chunk_tokens_;
    const ChunkResult result = {&tops_[at], &totals_[at], &mixed_[at * value_dim_]};
    attend_rows_of(*kernels_in_use().attention)(rows, begin, std::min(begin + chunk_tokens_, tokens_), queries, static_cast<int>(count), result);
}

void CachedAttention::finish(int64_t head, float *out) {
    float top = tops_[head], total = 0;
    for (int64_t chunk = 1; chunk < chunks_; ++chunk) top = std::max(top, tops_[chunk * heads_ + head]);
    if (sinks_) {
        const float sink = from_bf16(sinks_[head]);
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
