// Tiles of a matrix in any format as numbers, shared by the lanes of a warp: for products of few rows in full precision.
#pragma once
#include "formats.h"

// How a warp reads 32 rows x 32 columns of a matrix: a lane has ROWS rows, and in each HALVES runs of 4 columns.  Lanes whose
// numbers differ in COLUMN_BITS alone have the same rows, the others the same columns.
template <class Format>
struct SharedTile {
    static constexpr int ROWS = Format::TOTALS, HALVES = Format::HALVES, COLUMN_BITS = Format::LAST_LANE_BIT * 2 - 4;
    typename Format::Decoded tile;

    __device__ __forceinline__ SharedTile(const TileRows& matrix, int block, int group, int, int columns) {
        const i64 number = static_cast<i64>(block) * ((columns + GROUP - 1) / GROUP) + group;
        tile = Format::decode(Format::load(matrix, number, lane_number()), Format::table(matrix));
    }
    static __device__ __forceinline__ int row(int i) { return Format::row(lane_number(), i); }
    static __device__ __forceinline__ int column(int half) {
        return 4 * (half ? Format::high_word(lane_number()) : Format::low_word(lane_number()));
    }
    __device__ __forceinline__ float weight(int i, int half, int at) const { return Format::weight(tile, i, half, at); }
};

template <class T>
struct SharedTile<Plain<T>> {
    static constexpr int VECTOR = Plain<T>::VECTOR, OF_ROW = GROUP / VECTOR;  // lanes
    static constexpr int ROWS = TILE_ROWS / VECTOR, HALVES = VECTOR / 4, COLUMN_BITS = OF_ROW - 1;
    uint4 read[ROWS];

    // Rows end where a vector does.
    __device__ __forceinline__ SharedTile(const TileRows& matrix, int block, int group, int rows, int columns) {
        const int begin = group * GROUP + column(0);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int at = block * TILE_ROWS + row(i);
            const T* from = reinterpret_cast<const T*>(matrix.weights) + static_cast<i64>(at) * columns + begin;
            read[i] = at < rows && begin < columns ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
        }
    }
    static __device__ __forceinline__ int row(int i) { return lane_number() / OF_ROW + i * VECTOR; }
    static __device__ __forceinline__ int column(int half) { return lane_number() % OF_ROW * VECTOR + 4 * half; }
    __device__ __forceinline__ float weight(int i, int half, int at) const { return element_of<T>(read[i], 4 * half + at).value(); }
};

// Sums over the lanes whose numbers differ in these bits alone.
template <int BITS>
__device__ __forceinline__ float sum_over(float value) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) {
        if (BITS & bit) value += __shfl_xor_sync(ALL_LANES, value, bit);
    }
    return value;
}
