#include "block_index.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "held_rows.h"
#include "rows.h"

void BlockIndex::resize(const SwitchyardAttention &layer, const SwitchyardPages &held, const PieceAttention &attention,
                        int32_t tokens) {
    layer_ = &layer;
    index_ = layer.index;
    held_ = &held;
    attention_ = &attention;
    tokens_ = tokens;
    if (!index_) return;
    begins_.assign(1, 0);
    for (int64_t token = 0; token < tokens; ++token)
        begins_.push_back(begins_.back() + (chooses(token) ? attention.position_of(token) / index_->block_tokens + 1 : 0));
    keys_.resize(static_cast<size_t>(tokens * int64_t{index_->dim}));
    queries_.resize(static_cast<size_t>(tokens * index_->q.rows));
    scores_.resize(static_cast<size_t>(begins_.back() * layer.kv_heads));
    if (begins_.back() > 0) tables_.resize(static_cast<size_t>(tokens * layer.kv_heads * units()));
}

void BlockIndex::project(const Kernels &kernels, int64_t block, const Vectors &x, const int32_t *all) {
    const int64_t of_queries = blocks_of(index_->q);
    const bool is_query = block < of_queries;
    const SwitchyardMatrix &weight = is_query ? index_->q : index_->k;
    if (!is_query) block -= of_queries;
    float dots[8 * kTileRows];
    block_dot(kernels, weight, block, x, all, tokens_, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    float *out = is_query ? queries_.data() : keys_.data();
    for (int64_t token = 0; token < tokens_; ++token) std::copy_n(dots + token * kTileRows, rows, out + token * weight.rows + row);
}

void BlockIndex::norm(const uint16_t *weight, float *x) const {
    rms_norm(x, weight, layer_->epsilon, index_->dim, x, layer_->norm_offset);
}

void BlockIndex::write_key(int64_t token, const float *key) const {
    const HeldHead head = {*held_, 1, 0};
    const int64_t row = head.row_of(attention_->piece_of(token).pages, attention_->position_of(token));
    write_row(SWITCHYARD_KV_BF16, key, index_->dim, row, held_->index_keys, nullptr);
}

void BlockIndex::score(const Kernels &kernels, int64_t item) {
    int64_t token = 0;
    while (item >= begins_[static_cast<size_t>(token + 1)]) ++token;
    const int64_t block = item - begins_[static_cast<size_t>(token)], begin = block * index_->block_tokens;
    const int64_t end = std::min(begin + index_->block_tokens, attention_->position_of(token) + 1);
    HeldRows rows = {held_->index_keys, nullptr, index_->dim, 0};
    rows.pages = attention_->piece_of(token).pages;
    rows.page_tokens = rows.page_rows = held_->page_tokens;
    static thread_local std::vector<float> products;
    products.resize(static_cast<size_t>(layer_->kv_heads * int64_t{index_->block_tokens}));
    const IndexQueries queries = {layer_->kv_heads, &queries_[static_cast<size_t>(token * index_->q.rows)], nullptr};
    kernels.attention->index(rows, begin, end, queries, products.data());
    const int64_t room = (end - begin + kPageTokens - 1) / kPageTokens * kPageTokens;
    for (int64_t head = 0; head < layer_->kv_heads; ++head) {
        float most = -HUGE_VALF;
        for (int64_t i = 0; i < end - begin; ++i) {
            const float product = products[static_cast<size_t>(head * room + i)];
            if (product > most) most = product;  // which a NaN is not
        }
        scores_[static_cast<size_t>(item * layer_->kv_heads + head)] = most;
    }
}

void BlockIndex::choose(int64_t item, const HeldRows &rows) {
    const int64_t token = item / layer_->kv_heads, head = item % layer_->kv_heads;
    if (!chooses(token)) return;
    const int64_t first = begins_[static_cast<size_t>(token)], count = begins_[static_cast<size_t>(token + 1)] - first;
    const auto score = [&](int32_t block) { return scores_[static_cast<size_t>((first + block) * layer_->kv_heads + head)]; };
    static thread_local std::vector<int32_t> order;
    order.resize(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    // The last ones in any case, then by their scores, the first of those that are alike.
    std::nth_element(order.begin(), order.begin() + (index_->most - 1), order.end(), [&](int32_t a, int32_t b) {
        const bool is_near[] = {a >= count - index_->local, b >= count - index_->local};
        if (is_near[0] != is_near[1]) return is_near[0];
        return score(a) != score(b) ? score(a) > score(b) : a < b;
    });
    std::sort(order.begin(), order.begin() + index_->most);
    int32_t *table = &tables_[static_cast<size_t>(item * units())];
    for (int64_t i = 0; i < index_->most; ++i)
        for (int64_t at = 0; at < index_->block_tokens; at += kPageTokens) {
            const int64_t place = int64_t{order[static_cast<size_t>(i)]} * index_->block_tokens + at;
            *table++ = place <= attention_->position_of(token) ? static_cast<int32_t>(rows.row_of(place) / kPageTokens) : 0;
        }
}

HeldRows BlockIndex::chosen(int64_t token, int64_t kv_head, HeldRows rows) const {
    if (!index_ || !chooses(token)) return rows;
    rows.pages = &tables_[static_cast<size_t>((token * layer_->kv_heads + kv_head) * units())];
    rows.page_tokens = rows.page_rows = kPageTokens;
    return rows;
}
