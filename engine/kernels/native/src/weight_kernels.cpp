// Quantises matrices into tiles, and back.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "dispatch.h"
#include "matrix.h"
#include "thread_pool.h"

namespace {

struct QuantiseCall {
    Kernels kernels;
    const SwitchyardMatrix &target;
    const uint16_t *source;
    int rounds;
    Phase blocks;
};

void quantise_half(const QuantiseCall &call, int64_t block, int64_t half, const TileRow &row) {
    const Format &format = kFormats[call.target.format];
    const auto fit = call.kernels.tiles[call.target.format]->formats[call.target.format].fit;
    const bool nibbles = format.code_bits == 4;
    for (int64_t group = 0; group < row.groups; ++group) {
        float w[kGroup * kHalfRows] = {};
        const int64_t column = group * kGroup, columns = std::min(kGroup, call.target.columns - column);
        for (int64_t i = 0; i < kHalfRows; ++i) {
            const int64_t from = source_row(call.target, block, half, i);
            if (from < 0) continue;
            const uint16_t *values = call.source + from * call.target.columns + column;
            for (int64_t c = 0; c < columns; ++c) w[c * kHalfRows + i] = from_bf16(values[c]);
        }
        uint8_t q[kGroup * kHalfRows];
        const HalfTile tile = half_tile(row, format, group, half);
        auto *weights = const_cast<uint8_t *>(tile.weights);
        fit(w, {q, const_cast<uint16_t *>(tile.scales), const_cast<uint8_t *>(tile.zeros), tile.table, call.rounds});
        put_codes(weights, nibbles, q);
    }
}

void quantise_work(void *argument) {
    auto &call = *static_cast<QuantiseCall *>(argument);
    call.blocks.run([&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block)
            for (int64_t half = 0; half < 2; ++half) quantise_half(call, block, half, tile_row(call.target, block));
    });
}

struct DequantiseCall {
    Kernels kernels;
    const SwitchyardMatrix &matrix;
    const SwitchyardMatrix &piece;  // the rows of the wanted blocks, as a matrix of their own
    int64_t begin;
    uint16_t *out;
    Phase blocks;
};

void dequantise_half(const DequantiseCall &call, int64_t block, int64_t half, const TileRow &row) {
    const Format &format = kFormats[call.matrix.format];
    const auto expand = call.kernels.tiles[call.matrix.format]->formats[call.matrix.format].expand;
    const int64_t columns = call.matrix.columns;
    int64_t rows[kHalfRows];
    for (int64_t i = 0; i < kHalfRows; ++i) rows[i] = source_row(call.piece, block, half, i);
    for (int64_t group = 0; group < row.groups; ++group) {
        const int64_t column = group * kGroup;
        uint16_t values[kHalfRows * kGroup];
        expand(half_tile(row, format, group, half), values);
        const auto bytes = static_cast<size_t>(std::min(kGroup, columns - column)) * sizeof(uint16_t);
        for (int64_t i = 0; i < kHalfRows; ++i)
            if (rows[i] >= 0) std::memcpy(call.out + rows[i] * columns + column, values + i * kGroup, bytes);
    }
}

void dequantise_work(void *argument) {
    auto &call = *static_cast<DequantiseCall *>(argument);
    call.blocks.run([&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block)
            for (int64_t half = 0; half < 2; ++half)
                dequantise_half(call, block, half, tile_row(call.matrix, call.begin + block));
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_quantise(SwitchyardPool *pool, const SwitchyardMatrix *target,
                                           const uint16_t *source, int32_t rounds) {
    QuantiseCall call = {kernels_in_use(), *target, source, rounds, Phase(blocks_of(*target), pool->threads(), 1)};
    pool->run_long(quantise_work, &call, target->rows * target->columns * 2);
    return 0;
}

SWITCHYARD_API int32_t switchyard_dequantise(SwitchyardPool *pool, const SwitchyardMatrix *matrix, int64_t begin,
                                             int64_t end, uint16_t *out) {
    const RowOrder whole(*matrix);
    SwitchyardMatrix piece = *matrix;
    piece.rows = std::min(end * whole.block, whole.first_limit) - begin * whole.block;
    if (matrix->pairing == SWITCHYARD_HALVES) piece.rows *= 2;
    DequantiseCall call = {kernels_in_use(), *matrix, piece, begin, out, Phase(end - begin, pool->threads(), 1)};
    pool->run_long(dequantise_work, &call, piece.rows * piece.columns * 2);
    return 0;
}
