// Values of what latent_attention.cu made of the latents: see latent_queries.cu.
#include "shared_tile.h"
#include "states.h"

struct LatentValues {
    TileRows matrix;
    const float* mixed;  // [sequences, heads, rank] latents, as attention mixed them
    u8* out;             // [sequences, heads, value_dim] of `states` <-
    int heads, rank, key_dim, value_dim, states;
};

// Grid: blocks of rows with values of each head; sequences.
template <class Format>
__device__ __forceinline__ void find_latent_values(const LatentValues& a) {
    typedef SharedTile<Format> Tile;
    __shared__ float of_warps[WARPS][TILE_ROWS];
    const int of_head = static_cast<int>(gridDim.x) / a.heads, head = static_cast<int>(blockIdx.x) / of_head;
    const int dim = a.key_dim + a.value_dim, first = head * dim + a.key_dim, end = first + a.value_dim;
    const int block = first / TILE_ROWS + static_cast<int>(blockIdx.x) % of_head;
    if (block * TILE_ROWS >= end) return;
    const i64 row_of_out = static_cast<i64>(blockIdx.y) * a.heads + head;
    const float* mixed = a.mixed + row_of_out * a.rank;
    float sums[Tile::ROWS] = {};
#pragma unroll 2
    for (int group = warp_number(); group * GROUP < a.rank; group += WARPS) {
        const Tile tile(a.matrix, block, group, a.heads * dim, a.rank);
#pragma unroll
        for (int half = 0; half < Tile::HALVES; half++) {
#pragma unroll
            for (int at = 0; at < 4; at++) {
                const int column = group * GROUP + Tile::column(half) + at;
                const float latent = column < a.rank ? mixed[column] : 0;
#pragma unroll
                for (int i = 0; i < Tile::ROWS; i++) sums[i] += latent * tile.weight(i, half, at);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Tile::ROWS; i++) {
        const float sum = sum_over<Tile::COLUMN_BITS>(sums[i]);
        if ((lane_number() & Tile::COLUMN_BITS) == 0) of_warps[warp_number()][Tile::row(i)] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS; i += THREADS) {
        const int row = block * TILE_ROWS + i;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += of_warps[warp][i];
        if (row >= first && row < end) set_state(a.out, a.states, row_of_out * a.value_dim + row - first, sum);
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) latent_values_kernel(const LatentValues arguments) {
    find_latent_values<SWITCHYARD_FORMAT>(arguments);
}
#endif
