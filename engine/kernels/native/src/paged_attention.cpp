// Paged attention, its work items shared among the pool's threads.
#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "held_rows.h"
#include "paged_call.h"

namespace {

constexpr int64_t kMostQueries = 64;      // of an item
constexpr int64_t kChunkTokens = 16 * kPageTokens;  // that stay in the cache while an item's queries go over them

}  // namespace

PagedCall::PagedCall(const SwitchyardPagedLayer &layer, const SwitchyardPiece *pieces, int32_t count)
    : layer(layer), attend_rows(kernels_in_use().attention->of_type[layer.held.type]), pieces(pieces), count(count) {
    const int64_t group = layer.heads / layer.kv_heads;
    together = static_cast<int32_t>(std::max<int64_t>(1, kMostQueries / group));
    begins.resize(static_cast<size_t>(count) + 1);
    for (int32_t i = 0; i < count; ++i) {
        begins[i + 1] = begins[i] + (pieces[i].tokens + together - 1) / together * layer.kv_heads;
        tokens += pieces[i].tokens;
        bytes += (pieces[i].held + pieces[i].tokens) * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2;
    }
}

void PagedCall::write(int64_t token, const SwitchyardPiece &piece, const float *keys, const float *values) const {
    const int64_t position = piece.held + token - piece.first;
    const SwitchyardPages &held = layer.held;
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
        const int64_t row = head_of(head).row_of(piece.pages, position);
        write_row(held.type, keys + head * layer.key_dim, layer.key_dim, row, held.keys, held.key_scales);
        write_row(held.type, values + head * layer.value_dim, layer.value_dim, row, held.values, held.value_scales);
    }
}

const SwitchyardPiece &PagedCall::piece_of(int64_t token) const {
    const auto after = std::upper_bound(pieces, pieces + count, token,
                                        [](int64_t wanted, const SwitchyardPiece &piece) { return wanted < piece.first; });
    return *(after - 1);
}

void PagedCall::attend(int64_t item, std::vector<float> &room, const HeadQuery &query, const HeadResult &result) const {
    const auto at = std::upper_bound(begins.begin(), begins.end(), item) - begins.begin() - 1;
    const SwitchyardPiece &piece = pieces[at];
    const int64_t local = item - begins[at], kv_head = local % layer.kv_heads;
    const int64_t first = local / layer.kv_heads * together, last = std::min<int64_t>(first + together, piece.tokens);
    const int64_t group = layer.heads / layer.kv_heads, key_dim = layer.key_dim, value_dim = layer.value_dim;
    const int64_t count = (last - first) * group;
    room.resize(static_cast<size_t>(count * (key_dim + value_dim + 2)));
    float *q = room.data(), *mixed = q + count * key_dim, *tops = mixed + count * value_dim, *totals = tops + count;
    std::fill_n(mixed, count * value_dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t head = kv_head * group + i % group;
        query(piece.first + first + i / group, head, q + i * key_dim);
        tops[i] = layer.sinks ? layer.sinks[head] : kLow;
        totals[i] = layer.sinks ? 1.0f : 0.0f;
    }
    const HeldRows rows = head_of(kv_head).rows_of(piece.pages, key_dim, value_dim);
    const int64_t end = piece.held + last;
    for (int64_t begin = 0; begin < end; begin += kChunkTokens)
        for (int64_t done = 0; done < count; done += kMostTogether) {
            Queries some;
            some.count = static_cast<int>(std::min<int64_t>(kMostTogether, count - done));
            some.q = q + done * key_dim;
            some.scale = layer.scale;
            some.kept = layer.held.kept;
            some.softcap = layer.softcap;
            for (int i = 0; i < some.count; ++i) {
                some.to[i] = piece.held + first + (done + i) / group + 1;
                some.from[i] = layer.held.window > 0 ? std::max<int64_t>(0, some.to[i] - layer.held.window) : 0;
            }
            some.tops = tops + done;
            some.totals = totals + done;
            some.mixed = mixed + done * value_dim;
            attend_rows(rows, begin, std::min(begin + kChunkTokens, end), some);
        }
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t d = 0; d < value_dim; ++d) mixed[i * value_dim + d] /= totals[i];
        result(piece.first + first + i / group, kv_head * group + i % group, mixed + i * value_dim);
    }
}

namespace {

void read(const SwitchyardStates &states, int64_t token, int64_t head, int64_t n, float *out) {
    const int64_t at = token * states.token_step + head * states.head_step;
    if (states.is_fp32) {
        std::copy_n(static_cast<const float *>(states.data) + at, n, out);
        return;
    }
    const auto *x = static_cast<const uint16_t *>(states.data) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(x[i]);
}

struct PagedRun {
    const PagedCall &call;
    const SwitchyardStates &queries, &keys, &values;
    void *out;
    Phase writing, attention;
};

void paged_work(void *argument) {
    static thread_local std::vector<float> room;
    auto &run = *static_cast<PagedRun *>(argument);
    const PagedCall &call = run.call;
    const auto &layer = call.layer;
    run.writing.run([&](int64_t begin, int64_t end) {
        room.resize(static_cast<size_t>(layer.kv_heads * (layer.key_dim + layer.value_dim)));
        float *keys = room.data(), *values = keys + layer.kv_heads * layer.key_dim;
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < layer.kv_heads; ++head) {
                read(run.keys, token, head, layer.key_dim, keys + head * layer.key_dim);
                read(run.values, token, head, layer.value_dim, values + head * layer.value_dim);
            }
            call.write(token, call.piece_of(token), keys, values);
        }
    });
    const auto query = [&](int64_t token, int64_t head, float *q) { read(run.queries, token, head, layer.key_dim, q); };
    const auto result = [&](int64_t token, int64_t head, const float *x) {
        const int64_t at = (token * layer.heads + head) * layer.value_dim;
        if (run.queries.is_fp32)
            std::copy_n(x, layer.value_dim, static_cast<float *>(run.out) + at);
        else
            for (int64_t i = 0; i < layer.value_dim; ++i) static_cast<uint16_t *>(run.out)[at + i] = to_bf16(x[i]);
    };
    run.attention.run([&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) call.attend(item, room, query, result);
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_paged_attention(SwitchyardPool *pool, const SwitchyardPagedLayer *layer,
                                                  const SwitchyardPiece *pieces, int32_t count,
                                                  const SwitchyardStates *queries, const SwitchyardStates *keys,
                                                  const SwitchyardStates *values, void *out) try {
    const PagedCall call(*layer, pieces, count);
    PagedRun run = {call, *queries, *keys, *values, out, Phase(call.tokens, pool->threads(), 4),
                    Phase(call.items(), pool->threads(), 1)};
    pool->run_long(paged_work, &run, call.bytes);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
