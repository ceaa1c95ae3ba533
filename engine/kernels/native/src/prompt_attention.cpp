// The attention of a prompt as products of matrices in blocks: scores of some queries with a chunk of keys, their running
// softmax (Milakov and Gimelshein 2018), and its product with the chunk's values, all in the cache (Dao et al. 2022).
#include "prompt_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "dispatch.h"
#include "many_rows.h"
#include "matrix.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kChunk = 128;   // keys
constexpr int64_t kTogether = 96;  // queries
constexpr size_t kKeptBytes = 64 << 20;

struct Range {
    int64_t from, to;
};

int64_t padded(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// What each token sees; false if that is no single range.
bool find_ranges(const SwitchyardPrompt &prompt, std::vector<Range> &ranges) {
    ranges.resize(static_cast<size_t>(prompt.tokens));
    for (int64_t token = 0; token < prompt.tokens; ++token) {
        Range &range = ranges[token];
        range = {0, prompt.held - prompt.tokens + token + 1};
        if (!prompt.sees) continue;
        const uint8_t *row = prompt.sees + token * prompt.sees_token, *end = row + prompt.held;
        const auto *first = static_cast<const uint8_t *>(std::memchr(row, 1, static_cast<size_t>(prompt.held)));
        if (!first) return false;
        const auto *last = static_cast<const uint8_t *>(std::memchr(first, 0, static_cast<size_t>(end - first)));
        if (!last) last = end;
        if (last < end && std::memchr(last, 1, static_cast<size_t>(end - last))) return false;
        range = {first - row, last - row};
    }
    return true;
}

// What one thread needs.
struct Room {
    AlignedMemory queries, panel, scores, shares, packed, sums;
};

class PromptAttention {
  public:
    PromptAttention(const SwitchyardPrompt &prompt, const ManyKernels &many, const std::vector<Range> &ranges,
                    uint16_t *turned, uint16_t *out, int threads)
        : prompt_(prompt), many_(many), ranges_(ranges), turned_(turned), out_(out),
          chunks_((prompt.held + kChunk - 1) / kChunk), group_(prompt.heads / prompt.kv_heads),
          blocks_((prompt.tokens * group_ + kTogether - 1) / kTogether), turning_(prompt.kv_heads * chunks_, threads, 1),
          attending_(prompt.kv_heads * blocks_, threads, 1) {}

    void work() {
        turning_.run([&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) turn(item / chunks_, item % chunks_);
        });
        attending_.run([&](int64_t begin, int64_t end) {
            // The last tokens see most: they come first, so that no thread is left with a long one at the end.
            for (int64_t item = begin; item < end; ++item)
                attend(item % prompt_.kv_heads, blocks_ - 1 - item / prompt_.kv_heads);
        });
    }

  private:
    uint16_t *turned(int64_t head, int64_t chunk) const {
        return turned_ + (head * chunks_ + chunk) * prompt_.value_dim * kChunk;
    }

    // A chunk's values, [value_dim, kChunk]: rows as a matrix has them.
    void turn(int64_t head, int64_t chunk) const {
        const int64_t first = chunk * kChunk, keys = std::min(kChunk, prompt_.held - first);
        const uint16_t *values = prompt_.values + head * prompt_.value_head + first * prompt_.value_token;
        uint16_t *out = turned(head, chunk);
        if (keys < kChunk) std::memset(out, 0, static_cast<size_t>(prompt_.value_dim * kChunk) * 2);
        constexpr int64_t kSide = 32;
        for (int64_t key = 0; key < keys; key += kSide)
            for (int64_t i = 0; i < prompt_.value_dim; i += kSide)
                for (int64_t row = i; row < std::min<int64_t>(i + kSide, prompt_.value_dim); ++row)
                    for (int64_t at = key; at < std::min(key + kSide, keys); ++at)
                        out[row * kChunk + at] = values[at * prompt_.value_token + row];
    }

    // Some queries that share the keys of a head, with all that they see.
    void attend(int64_t kv_head, int64_t block) const {
        static thread_local Room room;
        const int64_t first = block * kTogether, count = std::min(kTogether, prompt_.tokens * group_ - first);
        const int64_t tiles = (count + many_.lanes - 1) / many_.lanes, width = padded(prompt_.value_dim);
        const int64_t query_bytes = many_.packed_bytes(SWITCHYARD_BF16, prompt_.key_dim);
        const int64_t share_bytes = many_.packed_bytes(SWITCHYARD_BF16, kChunk);
        uint8_t *queries = room.queries.room(tiles * query_bytes), *packed = room.packed.room(tiles * share_bytes);
        uint8_t *panel = room.panel.room(std::max(many_.panel_bytes(SWITCHYARD_BF16, prompt_.key_dim),
                                                  many_.panel_bytes(SWITCHYARD_BF16, kChunk)));
        const int64_t step = tiles * many_.lanes * kTileRows;  // scores of 32 keys
        auto *scores = reinterpret_cast<float *>(room.scores.room(kChunk / kTileRows * step * 4));
        auto *shares = reinterpret_cast<uint16_t *>(room.shares.room(count * kChunk * 2));
        auto *sums = reinterpret_cast<float *>(room.sums.room(count * width * 4));
        float tops[kTogether], totals[kTogether] = {}, before[kTogether];
        std::fill_n(tops, count, -std::numeric_limits<float>::infinity());
        std::fill_n(sums, count * width, 0.0f);

        each_tile(count, [&](int64_t tile, int64_t begin, int64_t some) {
            const uint16_t *rows[64];
            for (int64_t v = 0; v < some; ++v) {
                const int64_t at = first + begin + v;
                rows[v] = prompt_.queries + at / group_ * prompt_.query_token +
                          (kv_head * group_ + at % group_) * prompt_.query_head;
            }
            many_.pack(SWITCHYARD_BF16, rows, some, prompt_.key_dim, queries + tile * query_bytes);
        });
        const Range seen = seen_by(first, count);
        const SwitchyardMatrix keys = {prompt_.keys + kv_head * prompt_.key_head, nullptr,         nullptr, nullptr,
                                       prompt_.held,                               prompt_.key_dim, SWITCHYARD_BF16,
                                       SWITCHYARD_PLAIN};
        for (int64_t chunk = seen.from / kChunk; chunk * kChunk < seen.to; ++chunk) {
            const int64_t start = chunk * kChunk, end = std::min(start + kChunk, seen.to);
            for (int64_t at = start; at < end; at += kTileRows)
                many_.multiply(SWITCHYARD_BF16, prompt_.key_dim, many_.prepare(keys, at / kTileRows, count, panel), queries, count,
                               scores + (at - start) / kTileRows * step);
            for (int64_t v = 0; v < count; ++v) {
                const Range &range = ranges_[(first + v) / group_];
                before[v] = many_.soften(scores + v * kTileRows, step, kChunk, range.from - start, range.to - start,
                                         prompt_.scale, &tops[v], &totals[v], shares + v * kChunk);
            }
            each_tile(count, [&](int64_t tile, int64_t begin, int64_t some) {
                const uint16_t *rows[64];
                for (int64_t v = 0; v < some; ++v) rows[v] = shares + (begin + v) * kChunk;
                many_.pack(SWITCHYARD_BF16, rows, some, kChunk, packed + tile * share_bytes);
            });
            const SwitchyardMatrix values = {turned(kv_head, chunk), nullptr, nullptr,         nullptr,
                                             prompt_.value_dim,      kChunk,  SWITCHYARD_BF16, SWITCHYARD_PLAIN};
            for (int64_t row = 0; row < prompt_.value_dim; row += kTileRows) {
                many_.multiply(SWITCHYARD_BF16, kChunk, many_.prepare(values, row / kTileRows, count, panel), packed, count,
                               scores);
                for (int64_t v = 0; v < count; ++v)
                    many_.carry(before[v], scores + v * kTileRows, kTileRows, sums + v * width + row);
            }
        }
        for (int64_t v = 0; v < count; ++v) {
            const int64_t at = first + v, head = kv_head * group_ + at % group_;
            float *sum = sums + v * width;
            const float inverse = 1.0f / totals[v];
            for (int64_t i = 0; i < prompt_.value_dim; ++i) sum[i] *= inverse;
            many_.narrow(sum, prompt_.value_dim, out_ + (at / group_ * prompt_.heads + head) * prompt_.value_dim);
        }
    }

    template <class Do> void each_tile(int64_t count, Do act) const {
        for (int64_t begin = 0; begin < count; begin += many_.lanes)
            act(begin / many_.lanes, begin, std::min(many_.lanes, count - begin));
    }

    Range seen_by(int64_t first, int64_t count) const {
        Range all = ranges_[first / group_];
        for (int64_t token = first / group_; token <= (first + count - 1) / group_; ++token) {
            all.from = std::min(all.from, ranges_[token].from);
            all.to = std::max(all.to, ranges_[token].to);
        }
        return all;
    }

    const SwitchyardPrompt &prompt_;
    const ManyKernels &many_;
    const std::vector<Range> &ranges_;
    uint16_t *turned_, *out_;
    const int64_t chunks_, group_, blocks_;
    Phase turning_, attending_;
};

void work(void *argument) { static_cast<PromptAttention *>(argument)->work(); }

}  // namespace

SWITCHYARD_API int32_t switchyard_prompt_attention(SwitchyardPool *pool, const SwitchyardPrompt *prompt,
                                                   uint16_t *out) try {
    static thread_local std::vector<Range> ranges;
    static thread_local AlignedMemory turned;
    if (!find_ranges(*prompt, ranges)) return 2;
    const int64_t chunks = (prompt->held + kChunk - 1) / kChunk;
    auto *values = reinterpret_cast<uint16_t *>(turned.room(prompt->kv_heads * chunks * prompt->value_dim * kChunk * 2));
    PromptAttention attention(*prompt, *kernels_for_many().many[SWITCHYARD_BF16], ranges, values, out, pool->threads());
    pool->run_long(work, &attention, prompt->tokens * prompt->held * prompt->heads * prompt->key_dim / kTogether);
    turned.shrink(kKeptBytes);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
