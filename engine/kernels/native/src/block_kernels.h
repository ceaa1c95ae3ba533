// Blocks of GGUF files and codes of quantised safetensors to tiles, blocks also to numbers.
#pragma once
#include <cstdint>

#include "kernel_set.h"
#include "switchyard_kernels.h"

// 16 rows of blocks, half of the rows of a `tile_row`.
struct BlockHalf {
    TileRow target;
    int64_t columns, half;
    int32_t format;  // of the target
    void (*fit)(const float *w, const FitTarget &target);
    int rounds;
    const uint8_t *rows[kHalfRows];  // null beyond the matrix

    HalfTile tile(int64_t group) const { return half_tile(target, kFormats[format], group, half); }
    FitTarget fit_target(int64_t group, uint8_t *codes) const {
        const HalfTile at = tile(group);
        return {codes, const_cast<uint16_t *>(at.scales), const_cast<uint8_t *>(at.zeros), at.table, rounds};
    }
};

struct BlockType {
    int32_t number;  // ggml's
    int64_t elements, bytes;
    int32_t keeps;  // the format that keeps its codes, or bf16
    void (*keep)(const BlockHalf &half);  // null where none does
    void (*fit)(const BlockHalf &half);
    // A row of `columns` as floats, or as bf16.
    void (*unpack)(const uint8_t *blocks, int64_t columns, bool floats, void *out);
};

struct RowType;  // row_kernels.h

struct BlockKernels {
    BlockType types[16];  // what formats keep codes of, or what is faster than by way of numbers
    // Codes that lie in words: half.rows[i] is not null where the half has a row, from[i] its number.
    void (*keep_codes)(const BlockHalf &half, const SwitchyardCodes &codes, const int64_t *from);
    // The same as a type's own, by way of what unpacks its rows to numbers.
    void (*fit_rows)(const BlockHalf &half, const RowType &type);
    void (*unpack_rows)(const uint8_t *blocks, int64_t columns, const RowType &type, bool floats, void *out);
};

extern const BlockKernels kPortableBlocks;
#if defined(__x86_64__) || defined(_M_X64)
extern const BlockKernels kAvx2Blocks;
extern const BlockKernels kAvx512Blocks;
#endif
