// Attention of one token of each sequence over the latents of multi-head latent attention, which all heads share: a key is a
// latent and its rotated part, a value is the latent.  As attention.cu otherwise; a warp reads a key at a time, for the
// queries of ROWS heads.  The token's own latent is stored before (latent_queries.cu).
#include "pages.h"
#include "splits.h"

constexpr int MOST_RANK = 512, MOST_ROPE = 64;
constexpr int LATENT_HEADS = 4;  // that share a reading

struct LatentAttention {
    const float* queries;  // [sequences, heads, value_dim + rope], those of latents and then those of rotated keys
    float* out;            // [sequences, heads, value_dim] <- a mixture of latents
    const i64* held;       // [sequences] tokens before
    const i64* table;      // [sequences, 2, 1 + pages]: latents, and rotated keys
    float* parts;          // [sequences, heads, splits, 2 + value_dim]: maximum, sum, weighted latents
    u32* arrived;          // [sequences, runs of heads], 0 before and after
    i64 table_step, part_step;
    float scale;
    int heads, value_dim, rope;  // value_dim: of a latent
    int window, splits;          // as in attention.cu
};

__device__ __forceinline__ float fade_by_sink(const LatentAttention&, int, float, float*) { return 1; }

__device__ __forceinline__ void set_answer(const LatentAttention& a, int head, int i, float value) {
    a.out[(static_cast<i64>(blockIdx.z) * a.heads + head) * a.value_dim + i] = value;
}

// Grid: parts of the keys; runs of heads; sequences.
template <class Kv>
__device__ __forceinline__ void attend_to_latents(const LatentAttention& a) {
    constexpr int ROWS = LATENT_HEADS, RUNS = MOST_RANK / (LANES * PIECE), TURNED = MOST_ROPE / LANES;
    constexpr int DEPTH = Kv::BYTES > 2 ? 1 : 2, ROUND = WARPS * DEPTH;  // keys that are on their way together
    __shared__ float added[ROWS][MOST_RANK];
    __shared__ float largest_of[WARPS][ROWS], total_of[WARPS][ROWS];
    const int first_head = static_cast<int>(blockIdx.y) * ROWS, count = min(ROWS, a.heads - first_head);
    const int sequence = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.x), lane = lane_number();
    const KeysOfBlock keys = keys_of(a.held[sequence], a.window, 0, a.splits, split, ROUND);
    if (split >= keys.used) return;
    const i64* entries = a.table + sequence * a.table_step;

    float queries[ROWS][RUNS * PIECE], turned[ROWS][TURNED], sums[ROWS][RUNS * PIECE], largest[ROWS], total[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        largest[row] = LEAST_SCORE;
        total[row] = 0;
        const i64 of_head = static_cast<i64>(sequence) * a.heads + first_head + min(row, count - 1);
        const float* from = a.queries + of_head * (a.value_dim + a.rope);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const int begin = (run * LANES + lane) * PIECE;
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                queries[row][run * PIECE + i] = begin < a.value_dim ? from[begin + i] * a.scale : 0;
                sums[row][run * PIECE + i] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < TURNED; i++) {
            const int at = i * LANES + lane;
            turned[row][i] = at < a.rope ? from[a.value_dim + at] * a.scale : 0;
        }
    }
    for (int round = keys.begin + warp_number() * DEPTH; round < keys.end; round += ROUND) {
        typename Kv::Piece latents[DEPTH][RUNS];
        float rotated[DEPTH][TURNED];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int token = keys.row_of(min(round + i, keys.end - 1));  // beyond the end: read again, and not counted
            const u8* latent = row_in_pages(entries, 0, token, a.value_dim * Kv::BYTES);
            const u8* key = row_in_pages(entries + a.part_step, 0, token, a.rope * Kv::BYTES);
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                const int begin = (run * LANES + lane) * PIECE;
                latents[i][run] = typename Kv::Piece{};
                if (begin < a.value_dim) latents[i][run] = *reinterpret_cast<const typename Kv::Piece*>(latent + begin * Kv::BYTES);
            }
#pragma unroll
            for (int part = 0; part < TURNED; part++) {
                const int at = part * LANES + lane;
                rotated[i][part] = at < a.rope ? Kv::element(key, at) : 0;
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float scores[DEPTH], most = largest[row];
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                float score = 0;
#pragma unroll
                for (int part = 0; part < TURNED; part++) score += turned[row][part] * rotated[i][part];
#pragma unroll
                for (int run = 0; run < RUNS; run++) {
#pragma unroll
                    for (int at = 0; at < PIECE; at++) score += queries[row][run * PIECE + at] * Kv::value(latents[i][run], at);
                }
                score = sum_over_lanes<1, LANES / 2>(score);
                scores[i] = round + i < keys.end ? score * LOG2_E : LEAST_SCORE;
                most = fmaxf(most, scores[i]);
            }
            const float fade = exp2f(largest[row] - most);
            largest[row] = most;
            total[row] *= fade;
#pragma unroll
            for (int at = 0; at < RUNS * PIECE; at++) sums[row][at] *= fade;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (round + i >= keys.end) continue;
                const float share = exp2f(scores[i] - most);
                total[row] += share;
#pragma unroll
                for (int run = 0; run < RUNS; run++) {
#pragma unroll
                    for (int at = 0; at < PIECE; at++) sums[row][run * PIECE + at] += share * Kv::value(latents[i][run], at);
                }
            }
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            largest_of[warp_number()][row] = largest[row];
            total_of[warp_number()][row] = total[row];
        }
    }
    __syncthreads();
    for (int turn = 0; turn < WARPS; turn++) {  // one after the other: a sum for each warp would not fit everywhere
        if (turn == warp_number()) {
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float most = LEAST_SCORE;
#pragma unroll
                for (int warp = 0; warp < WARPS; warp++) most = fmaxf(most, largest_of[warp][row]);
                const float fade = exp2f(largest[row] - most);
#pragma unroll
                for (int i = 0; i < RUNS * PIECE; i++) {
                    float* to = &added[row][(i / PIECE * LANES + lane) * PIECE + i % PIECE];
                    *to = sums[row][i] * fade + (turn == 0 ? 0 : *to);
                }
            }
        }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < count * a.value_dim; at += THREADS) {
        const int row = at / a.value_dim, i = at % a.value_dim, head = first_head + row;
        float most = LEAST_SCORE, sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) most = fmaxf(most, largest_of[warp][row]);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += total_of[warp][row] * exp2f(largest_of[warp][row] - most);
        if (keys.used == 1) {
            set_answer(a, head, i, sum == 0 ? 0 : added[row][i] / sum);
        } else {
            float* part = part_of(a, head, split);
            if (i == 0) {
                part[0] = most;
                part[1] = sum;
            }
            part[2 + i] = added[row][i];
        }
    }
    if (keys.used == 1) return;
    if (!is_last_block(a.arrived + sequence * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y), static_cast<u32>(keys.used))) return;
    finish_parts<ROWS>(a, first_head, count, keys.used);
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, 2) latent_attention_kernel(const LatentAttention arguments) {
    attend_to_latents<SWITCHYARD_KV>(arguments);
}
#endif
