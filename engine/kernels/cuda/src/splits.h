// Attention in parts of the keys: which of them a block of threads reads, and the block that ends last adds all up.
//
// A kernel's arguments have `heads`, `splits`, `value_dim` and `parts`; `fade_by_sink` and `set_answer` are the kernel's own.
#pragma once
#include "card.h"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int MOST_SPLITS = 64;
constexpr float LEAST_SCORE = -3.0e38f;  // of heads that have seen no key

// Keys [begin, end) of those that a token sees are those of part `split`, as long as that is one of the parts that are used.
struct KeysOfBlock {
    int row_of_token, begin, end, used;
    int kept, hidden;  // the first rows are seen whatever the window, the next ones are not

    __device__ __forceinline__ int row_of(int key) const { return key < kept ? key : key + hidden; }
    __device__ __forceinline__ bool has_token() const { return row_of_token - hidden >= begin && row_of_token - hidden < end; }
};

// Of a sequence that holds so many tokens before its own, which sees `window` of them, itself included (0: all), and the
// first `kept`.  A part is a multiple of `round` keys.
__device__ __forceinline__ KeysOfBlock keys_of(i64 held, int window, int kept, int splits, int split, int round) {
    const int row_of_token = static_cast<int>(held), rows = row_of_token + 1;
    const int oldest = window ? max(0, rows - window) : 0;
    const int first = min(kept, oldest), hidden = oldest - first, seen = rows - hidden;
    const int share = ((seen + splits - 1) / splits + round - 1) / round * round;
    const int begin = split * share;
    return KeysOfBlock{row_of_token, begin, min(seen, begin + share), (seen + share - 1) / share, first, hidden};
}

template <class Arguments>
__device__ __forceinline__ float* part_of(const Arguments& a, int head, int split) {
    const i64 at = static_cast<i64>(blockIdx.z) * a.heads + head;
    return a.parts + (at * a.splits + split) * (2 + a.value_dim);
}

// Adds the parts up, by the block that ends last: a warp finds the shares of a head's parts, then all threads add.
template <int ROWS, class Arguments>
__device__ __forceinline__ void finish_parts(const Arguments& a, int first_head, int count, int used) {
    __shared__ float shares[ROWS][MOST_SPLITS];
    for (int row = warp_number(); row < count; row += WARPS) {
        const int head = first_head + row;
        float largest = LEAST_SCORE, total = 0;
        for (int split = lane_number(); split < used; split += LANES) largest = fmaxf(largest, __ldcg(part_of(a, head, split)));
#pragma unroll
        for (int bit = 1; bit < LANES; bit *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, bit));
        for (int split = lane_number(); split < used; split += LANES) {
            const float* part = part_of(a, head, split);
            const float fade = exp2f(__ldcg(part) - largest);
            shares[row][split] = fade;
            total += __ldcg(part + 1) * fade;
        }
        total = sum_over_lanes<1, LANES / 2>(total);
        const float kept = fade_by_sink(a, head, largest, &total), factor = total == 0 ? 0 : kept / total;
        for (int split = lane_number(); split < used; split += LANES) shares[row][split] *= factor;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count * a.value_dim; at += THREADS) {
        const int row = at / a.value_dim, i = at % a.value_dim;
        const float* parts = part_of(a, first_head + row, 0) + 2 + i;
        float sum = 0;
#pragma unroll 8
        for (int split = 0; split < used; split++) sum += __ldcg(parts + static_cast<i64>(split) * (2 + a.value_dim)) * shares[row][split];
        set_answer(a, first_head + row, i, sum);
    }
}
