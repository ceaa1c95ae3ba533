// One call of paged attention: the tokens to write, and the work items that attend.
#pragma once
#include <functional>
#include <vector>

#include "dispatch.h"
#include "held_rows.h"
#include "paged_attention.h"
#include "thread_pool.h"

struct PagedCall {
    const SwitchyardPagedLayer &layer;
    const Attend attend_rows;
    const SwitchyardPiece *pieces;
    int32_t count;
    int32_t together;             // tokens of a sequence whose queries go through its pages together: an item
    int64_t tokens = 0, bytes = 0;
    std::vector<int64_t> begins;  // [count + 1]: where each piece's items begin

    // Writes one head of a token's query to `q`.
    using HeadQuery = std::function<void(int64_t token, int64_t head, float *q)>;
    // Receives the result for one head of a token, [value_dim].
    using HeadResult = std::function<void(int64_t token, int64_t head, const float *x)>;

    PagedCall(const SwitchyardPagedLayer &layer, const SwitchyardPiece *pieces, int32_t count);
    int64_t items() const { return begins.back(); }
    // keys: [kv_heads, key_dim], values: [kv_heads, value_dim] of a token of `piece`.
    void write(int64_t token, const SwitchyardPiece &piece, const float *keys, const float *values) const;
    HeldHead head_of(int64_t kv_head) const { return {layer.held, layer.kv_heads, kv_head}; }
    const SwitchyardPiece &piece_of(int64_t token) const;
    // `room` is the calling thread's.
    void attend(int64_t item, std::vector<float> &room, const HeadQuery &query, const HeadResult &result) const;
};
