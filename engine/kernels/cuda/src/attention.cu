// Attention of one token of each sequence over keys and values in pages: each block of threads goes through a part of the
// keys for a few heads of queries that share them, keeping a running maximum and sum (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax"; Dao et al. 2023, "Flash-Decoding").  The block that ends last adds the parts up.
//
// How many tokens are held and where their pages lie is read on the card: a graph need not be captured again when a
// context grows, nor when its pages move.  The token's own keys and values are stored on the way, unless they have been.
#include "card.h"
#include "pages.h"
#include "splits.h"

struct AttentionArguments {
    const u8* queries;  // [sequences, heads, key_dim], of `states`
    const u8* keys;     // [sequences, kv_heads, key_dim], the token's own, or null: they are in the pages
    const u8* values;   // [sequences, kv_heads, value_dim]
    u8* out;            // [sequences, heads, value_dim]
    const i64* held;    // [sequences] tokens before
    const i64* table;   // [sequences, parts, 1 + pages]
    const float* sinks;  // [heads] logits of attending to nothing, or null
    float* parts;       // [sequences, heads, splits, 2 + value_dim]: maximum, sum, weighted values
    u32* arrived;       // [sequences, kv_heads x runs of heads], 0 before and after
    i64 table_step, part_step;  // entries of a sequence, and of one of its parts
    float scale, softcap;       // softcap 0: none
    int heads, kv_heads, key_dim, value_dim;
    int window;  // tokens seen, itself included; 0: all
    int kept;    // and so many first ones
    int splits;
    int states;  // type of queries, keys, values and out: see `state_at`
};

// What a lane holds of ROWS heads: queries, and what it has added up.
template <int ROWS>
struct Heads {
    float queries[ROWS][PIECE], sums[ROWS][PIECE];
    float largest[ROWS], total[ROWS];
};

// Joins what other lanes have seen, those whose numbers differ in the bits from LOW on.
template <int ROWS, int LOW>
__device__ __forceinline__ void join_lanes(Heads<ROWS>& mine) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int bit = LOW; bit < LANES; bit *= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, mine.largest[row], bit);
            const float largest = fmaxf(mine.largest[row], other);
            const float fade = exp2f(mine.largest[row] - largest);
            mine.largest[row] = largest;
            mine.total[row] *= fade;
            mine.total[row] += __shfl_xor_sync(ALL_LANES, mine.total[row], bit);
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                mine.sums[row][i] *= fade;
                mine.sums[row][i] += __shfl_xor_sync(ALL_LANES, mine.sums[row][i], bit);
            }
        }
    }
}

// Lets attending to nothing have its share of a head's total, of scores less `largest`; returns what others keep.
__device__ __forceinline__ float fade_by_sink(const AttentionArguments& a, int head, float largest, float* total) {
    if (a.sinks == nullptr) return 1;
    const float sink = a.sinks[head] * LOG2_E, most = fmaxf(largest, sink), fade = exp2f(largest - most);
    *total = *total * fade + exp2f(sink - most);
    return fade;
}

__device__ __forceinline__ void set_answer(const AttentionArguments& a, int head, int i, float value) {
    set_state(a.out, a.states, (static_cast<i64>(blockIdx.z) * a.heads + head) * a.value_dim + i, value);
}

// Grid: parts of the keys; heads of keys, each as often as runs of ROWS queries share it; sequences.
template <class Kv, int WIDTH, int ROWS>
__device__ __forceinline__ void attend(const AttentionArguments& a) {
    constexpr int LANES_OF_KEY = WIDTH / PIECE, AT_ONCE = LANES / LANES_OF_KEY;  // keys that a warp reads at once
    constexpr int DEPTH = ROWS > 4 ? 2 : 4;                                      // times that, on their way together
    constexpr int ROUND = WARPS * AT_ONCE * DEPTH;
    __shared__ float of_warps[WARPS][ROWS][WIDTH];
    __shared__ float largest_of[WARPS][ROWS], total_of[WARPS][ROWS];
    const int group = a.heads / a.kv_heads, runs = (group + ROWS - 1) / ROWS;
    const int kv_head = static_cast<int>(blockIdx.y) / runs, in_group = static_cast<int>(blockIdx.y) % runs * ROWS;
    const int first_head = kv_head * group + in_group, count = min(ROWS, group - in_group);
    const int sequence = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.x);

    const KeysOfBlock keys_of_block = keys_of(a.held[sequence], a.window, a.kept, a.splits, split, ROUND);
    const int used = keys_of_block.used, begin = keys_of_block.begin, end = keys_of_block.end;
    if (split >= used) return;
    const Pages<Kv> pages{a.table + sequence * a.table_step, a.part_step, kv_head, a.key_dim, a.value_dim};

    if (a.keys != nullptr && keys_of_block.has_token()) {  // blocks of the same keys write the same
        const int row_of_token = keys_of_block.row_of_token;
        const i64 from = static_cast<i64>(sequence) * a.kv_heads + kv_head;
        if (warp_number() == 0) pages.store(0, row_of_token, a.keys, a.states, from * a.key_dim);
        if (warp_number() == 1) pages.store(1, row_of_token, a.values, a.states, from * a.value_dim);
    }
    __syncthreads();

    const int piece = lane_number() % LANES_OF_KEY * PIECE, which = lane_number() / LANES_OF_KEY;
    const bool has_key = piece < a.key_dim, has_value = piece < a.value_dim;
    Heads<ROWS> mine;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        mine.largest[row] = LEAST_SCORE;
        mine.total[row] = 0;
        const i64 from = (static_cast<i64>(sequence) * a.heads + first_head + min(row, count - 1)) * a.key_dim + piece;
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            mine.queries[row][i] = has_key ? state_at(a.queries, a.states, from + i) * a.scale : 0;
            mine.sums[row][i] = 0;
        }
    }
    for (int round = begin + warp_number() * AT_ONCE * DEPTH; round < end; round += ROUND) {
        typename Kv::Piece keys[DEPTH], values[DEPTH];
        float key_scales[DEPTH], value_scales[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            // Beyond the end: read again, and not counted.
            const int key = keys_of_block.row_of(min(round + i * AT_ONCE + which, end - 1));
            keys[i] = values[i] = typename Kv::Piece{};
            if (has_key) keys[i] = pages.piece(0, key, piece);
            if (has_value) values[i] = pages.piece(1, key, piece);
            key_scales[i] = pages.scale(0, key);
            value_scales[i] = pages.scale(1, key);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float scores[DEPTH], largest = mine.largest[row];
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                float score = 0;
#pragma unroll
                for (int at = 0; at < PIECE; at++) score += mine.queries[row][at] * Kv::value(keys[i], at);
                score = sum_over_lanes<1, LANES_OF_KEY / 2>(score) * key_scales[i];
                if (a.softcap != 0) score = a.softcap * tanhf(score / a.softcap);
                scores[i] = round + i * AT_ONCE + which < end ? score * LOG2_E : LEAST_SCORE;
                largest = fmaxf(largest, scores[i]);
            }
            const float fade = exp2f(mine.largest[row] - largest);
            mine.largest[row] = largest;
            mine.total[row] *= fade;
#pragma unroll
            for (int at = 0; at < PIECE; at++) mine.sums[row][at] *= fade;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (round + i * AT_ONCE + which >= end) continue;
                const float share_of_key = exp2f(scores[i] - largest);
                mine.total[row] += share_of_key;
#pragma unroll
                for (int at = 0; at < PIECE; at++) {
                    mine.sums[row][at] += share_of_key * value_scales[i] * Kv::value(values[i], at);
                }
            }
        }
    }
    join_lanes<ROWS, LANES_OF_KEY>(mine);
    if (which == 0) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (piece == 0) {
                largest_of[warp_number()][row] = mine.largest[row];
                total_of[warp_number()][row] = mine.total[row];
            }
#pragma unroll
            for (int i = 0; i < PIECE; i++) of_warps[warp_number()][row][piece + i] = mine.sums[row][i];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count * a.value_dim; at += THREADS) {
        const int row = at / a.value_dim, i = at % a.value_dim, head = first_head + row;
        float largest = LEAST_SCORE, total = 0, sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) largest = fmaxf(largest, largest_of[warp][row]);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float fade = exp2f(largest_of[warp][row] - largest);
            total += total_of[warp][row] * fade;
            sum += of_warps[warp][row][i] * fade;
        }
        if (used == 1) {
            const float kept = fade_by_sink(a, head, largest, &total);
            set_answer(a, head, i, total == 0 ? 0 : sum * kept / total);
        } else {
            float* part = part_of(a, head, split);
            if (i == 0) {
                part[0] = largest;
                part[1] = total;
            }
            part[2 + i] = sum;
        }
    }
    if (used == 1) return;
    if (!is_last_block(a.arrived + sequence * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y), static_cast<u32>(used))) return;
    finish_parts<ROWS>(a, first_head, count, used);
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, SWITCHYARD_ROWS > 4 ? 2 : 3) attention_kernel(const AttentionArguments arguments) {
    attend<SWITCHYARD_KV, SWITCHYARD_WIDTH, SWITCHYARD_ROWS>(arguments);
}
#endif
