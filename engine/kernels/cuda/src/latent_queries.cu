// What multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) needs of one token of each sequence before
// latent_attention.cu: queries of latents, and the token's own latent, which is normed and stored with its rotated key.
//
// The context is never expanded to keys and values: the matrix that would do so, of which each head has the rows of its
// keys and then those of its values, is multiplied with the queries, and by latent_values.cu with what attention makes of
// the latents (section 2.1.2 calls it absorbed).
#include "pages.h"
#include "shared_tile.h"

// Steps are in elements.
struct LatentQueries {
    TileRows matrix;      // [heads x (key_dim + value_dim), rank]; of a plain format `weights` alone
    const u8* queries;    // [sequences, heads, key_dim + rope] of `states`
    const u8* latents;    // [sequences, rank + rope] of `states`: the token's own, and its key before it is rotated
    const u8* norm;       // [rank] of `weight_states`
    const u8* cosines;    // of sequence s from s * angle_row_step on: that of pair p is p * angle_step further
    const u8* sines;
    float* out;           // [sequences, heads, rank + rope] <-
    const i64* held;      // [sequences] tokens before
    const i64* table;     // [sequences, 2, 1 + pages]: latents, and rotated keys
    i64 table_step, part_step, angle_row_step;
    int heads, rank, rope, key_dim, value_dim;
    int angle_step;
    int takes_pairs, makes_pairs;  // pairs are neighbours, before and after; else they are half of `rope` apart
    int rounds_once;               // whether a rotated element is rounded only in the end, not each product, too
    int norm_rounds_once;          // as in norm.cu
    int states, weight_states, angle_states, kept_states;
    float epsilon, offset;  // of the norm
};

// Rotates the elements of a state from `from` on.  By one warp; `set` gets each of them.
template <class Set>
__device__ __forceinline__ void rotate(const LatentQueries& a, int sequence, const u8* states, i64 from, const Set& set) {
    const int half = a.rope / 2;
    const auto rounded = [&](float product) { return a.rounds_once ? product : rounded_to(a.states, product); };
    for (int pair = lane_number(); pair < half; pair += LANES) {
        const int first = a.takes_pairs ? 2 * pair : pair, second = a.takes_pairs ? first + 1 : first + half;
        const int to = a.makes_pairs ? 2 * pair : pair, to_second = a.makes_pairs ? to + 1 : to + half;
        const i64 angle = sequence * a.angle_row_step + static_cast<i64>(pair) * a.angle_step;
        const float cosine = state_at(a.cosines, a.angle_states, angle), sine = state_at(a.sines, a.angle_states, angle);
        const float one = state_at(states, a.states, from + first), other = state_at(states, a.states, from + second);
        set(to, rounded_to(a.states, rounded(one * cosine) - rounded(other * sine)));
        set(to_second, rounded_to(a.states, rounded(other * cosine) + rounded(one * sine)));
    }
}

__device__ __forceinline__ void keep(const LatentQueries& a, u8* row, int at, float value) {
    if (a.kept_states == 1) KvFp16::set(row, at, value, 0);
    else set_state(row, a.kept_states, at, value);
}

// Norms the token's own latent and rotates its key, to where the context lies.  By a block of threads.
__device__ __forceinline__ void keep_latent(const LatentQueries& a, int sequence) {
    const i64 from = static_cast<i64>(sequence) * (a.rank + a.rope);
    const int token = static_cast<int>(a.held[sequence]), bytes = a.kept_states == 2 ? 4 : 2;
    const i64* entries = a.table + sequence * a.table_step;
    float total = 0;
    for (int i = threadIdx.x; i < a.rank; i += THREADS) {
        const float value = state_at(a.latents, a.states, from + i);
        total += value * value;
    }
    const float factor = rsqrtf(sum_over_block(total) / static_cast<float>(a.rank) + a.epsilon);
    u8* latent = row_in_pages(entries, 0, token, a.rank * bytes);
    for (int i = threadIdx.x; i < a.rank; i += THREADS) {
        const float value = state_at(a.latents, a.states, from + i) * factor;
        const float weight = state_at(a.norm, a.weight_states, i) + a.offset;
        const float normed = weight * (a.norm_rounds_once ? value : rounded_to(a.states, value));
        keep(a, latent, i, rounded_to(a.states, normed));
    }
    if (warp_number() != 0) return;
    u8* key = row_in_pages(entries + a.part_step, 0, token, a.rope * bytes);
    rotate(a, sequence, a.latents, from + a.rank, [&](int at, float value) { keep(a, key, at, value); });
}

// Grid: groups of columns of each head, WARPS at a time, and a block for the token's own latent; sequences.
template <class Format>
__device__ __forceinline__ void find_latent_queries(const LatentQueries& a) {
    typedef SharedTile<Format> Tile;
    constexpr int ROW_BITS = (LANES - 1) & ~Tile::COLUMN_BITS;
    const int groups = (a.rank + GROUP - 1) / GROUP, sequence = static_cast<int>(blockIdx.y);
    if (blockIdx.x == gridDim.x - 1) {
        keep_latent(a, sequence);
        return;
    }
    const int number = static_cast<int>(blockIdx.x) * WARPS + warp_number(), head = number / groups, group = number % groups;
    if (head >= a.heads) return;
    const int dim = a.key_dim + a.value_dim, first = head * dim, end = first + a.key_dim;
    const i64 of_head = static_cast<i64>(sequence) * a.heads + head, from = of_head * (a.key_dim + a.rope);
    float* out = a.out + of_head * (a.rank + a.rope);
    float sums[Tile::HALVES][4] = {};
#pragma unroll 2
    for (int block = first / TILE_ROWS; block * TILE_ROWS < end; block++) {
        const Tile tile(a.matrix, block, group, a.heads * dim, a.rank);
#pragma unroll
        for (int i = 0; i < Tile::ROWS; i++) {
            const int row = block * TILE_ROWS + Tile::row(i);
            if (row < first || row >= end) continue;
            const float query = state_at(a.queries, a.states, from + row - first);
#pragma unroll
            for (int half = 0; half < Tile::HALVES; half++) {
#pragma unroll
                for (int at = 0; at < 4; at++) sums[half][at] += query * tile.weight(i, half, at);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < Tile::HALVES; half++) {
#pragma unroll
        for (int at = 0; at < 4; at++) {
            const float sum = sum_over<ROW_BITS>(sums[half][at]);
            const int column = group * GROUP + Tile::column(half) + at;
            if ((lane_number() & ROW_BITS) == 0 && column < a.rank) out[column] = sum;
        }
    }
    if (group != 0) return;
    rotate(a, sequence, a.queries, from + a.key_dim, [&](int at, float value) { out[a.rank + at] = value; });
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, 4) latent_queries_kernel(const LatentQueries arguments) {
    find_latent_queries<SWITCHYARD_FORMAT>(arguments);
}
#endif
