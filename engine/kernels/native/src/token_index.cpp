#include "token_index.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "dispatch.h"
#include "held_rows.h"

namespace {

constexpr int64_t kScored = 512;  // tokens that a thread scores at once

// One block of weight x for all tokens, times `scale`: out [tokens, weight.rows].
void product_block(const Kernels &kernels, const SwitchyardMatrix &weight, int64_t block, const Vectors &x, const int32_t *all,
                   int64_t tokens, float scale, float *out) {
    float dots[8 * kTileRows];
    block_dot(kernels, weight, block, x, all, tokens, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t i = 0; i < rows; ++i) out[token * weight.rows + row + i] = dots[token * kTileRows + i] * scale;
}

}  // namespace

void take_highest(const float *scores, int64_t count, int64_t most, int32_t *out) {
    static thread_local std::vector<float> sorted;
    sorted.assign(scores, scores + count);
    std::nth_element(sorted.begin(), sorted.begin() + (most - 1), sorted.end(), std::greater<float>());
    const float least = sorted[static_cast<size_t>(most - 1)];
    int64_t alike = most;
    for (int64_t i = 0; i < count; ++i) alike -= scores[i] > least;
    for (int64_t i = 0; i < count; ++i) {
        if (scores[i] > least)
            *out++ = static_cast<int32_t>(i);
        else if (scores[i] == least && alike-- > 0)
            *out++ = static_cast<int32_t>(i);
    }
}

void TokenIndex::resize(const SwitchyardIndex *index, const SwitchyardPages &held, const PieceAttention &attention,
                        int32_t tokens) {
    index_ = index;
    held_ = &held;
    attention_ = &attention;
    tokens_ = tokens;
    if (!index) return;
    choosing_ = false;
    begins_.assign(1, 0);
    places_.assign(1, 0);
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t seen = chooses(token) ? attention.position_of(token) + 1 : 0;
        choosing_ |= seen > 0;
        begins_.push_back(begins_.back() + (seen + kScored - 1) / kScored);
        places_.push_back(places_.back() + (seen + kPageTokens - 1) / kPageTokens * kPageTokens);
    }
    if (!is_own()) return;
    keys_.resize(static_cast<size_t>(tokens * int64_t{index->dim}));
    weights_.resize(static_cast<size_t>(tokens * int64_t{index->heads}));
    if (!choosing_) return;
    queries_.resize(static_cast<size_t>(tokens * index->q.rows));
    scores_.resize(static_cast<size_t>(places_.back()));
}

void TokenIndex::project(const Kernels &kernels, int64_t block, const Vectors &x, const int32_t *all) {
    const int64_t of_keys = blocks_of(index_->k);
    if (block < of_keys)
        product_block(kernels, index_->k, block, x, all, tokens_, 1.0f, keys_.data());
    else
        product_block(kernels, index_->weights, block - of_keys, x, all, tokens_, index_->scale, weights_.data());
}

void TokenIndex::project_queries(const Kernels &kernels, int64_t block, const Vectors &latent, const int32_t *all) {
    product_block(kernels, index_->q, block, latent, all, tokens_, 1.0f, queries_.data());
}

// A layer norm.
void TokenIndex::norm(float *key) const {
    const int64_t dim = index_->dim;
    float mean = 0, squares = 0;
    for (int64_t i = 0; i < dim; ++i) mean += key[i];
    mean /= static_cast<float>(dim);
    for (int64_t i = 0; i < dim; ++i) squares += (key[i] - mean) * (key[i] - mean);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + index_->epsilon);
    for (int64_t i = 0; i < dim; ++i)
        key[i] = (key[i] - mean) * scale * from_bf16(index_->k_norm[i]) + from_bf16(index_->k_bias[i]);
}

void TokenIndex::write_key(int64_t token, const float *key) const {
    const HeldHead head = {*held_, 1, 0};
    const int64_t row = head.row_of(attention_->piece_of(token).pages, attention_->position_of(token));
    write_row(SWITCHYARD_KV_BF16, key, index_->dim, row, held_->index_keys, nullptr);
}

void TokenIndex::score(const Kernels &kernels, int64_t item) {
    int64_t token = 0;
    while (item >= begins_[static_cast<size_t>(token + 1)]) ++token;
    const int64_t begin = (item - begins_[static_cast<size_t>(token)]) * kScored, seen = attention_->position_of(token) + 1;
    HeldRows rows = {held_->index_keys, nullptr, index_->dim, 0};
    rows.pages = attention_->piece_of(token).pages;
    rows.page_tokens = rows.page_rows = held_->page_tokens;
    const IndexQueries queries = {index_->heads, &queries_[static_cast<size_t>(token * index_->q.rows)],
                                  &weights_[static_cast<size_t>(token * index_->heads)]};
    kernels.attention->index(rows, begin, std::min(begin + kScored, seen), queries,
                             &scores_[static_cast<size_t>(places_[static_cast<size_t>(token)] + begin)]);
}

void TokenIndex::choose(int64_t token) {
    if (!chooses(token)) return;
    float *scores = &scores_[static_cast<size_t>(places_[static_cast<size_t>(token)])];
    const int64_t seen = attention_->position_of(token) + 1;
    for (int64_t i = 0; i < seen; ++i) scores[i] = scores[i] == scores[i] ? scores[i] : -HUGE_VALF;
    take_highest(scores, seen, index_->most, index_->chosen + token * index_->most);
}
