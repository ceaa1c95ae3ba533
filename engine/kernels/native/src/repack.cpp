// Blocks of GGUF files, and codes of quantised safetensors, straight to tiles; blocks also to numbers.
#include <algorithm>

#include "block_kernels.h"
#include "dispatch.h"
#include "matrix.h"
#include "thread_pool.h"

namespace {

// Null where blocks go by way of numbers.
const BlockType *type_of(const Kernels &kernels, const SwitchyardBlocks &blocks) {
    for (const BlockType &type : kernels.blocks->types)
        if (type.number == blocks.type) return &type;
    return nullptr;
}

bool is_readable(const Kernels &kernels, const SwitchyardBlocks &blocks, int64_t columns) {
    const RowType *type = kernels.types->of(blocks.type);
    return type && columns % type->elements == 0;
}

bool is_keepable(const SwitchyardCodes &codes, const SwitchyardMatrix &target) {
    const bool known = codes.bits == 8 ? target.format == SWITCHYARD_INT8 && codes.arrangement != SWITCHYARD_AWQ
                                       : target.format == SWITCHYARD_INT4 && (codes.zeros || codes.added);
    return known && codes.group > 0 && codes.group % kGroup == 0 && target.columns % codes.group == 0;
}

bool can_repack(const Kernels &kernels, const SwitchyardBlocks &source, const SwitchyardMatrix &target) {
    return source.codes ? is_keepable(*source.codes, target) : is_readable(kernels, source, target.columns);
}

bool is_there(const SwitchyardBlocks &source) { return source.blocks || source.codes; }

// The `index`-th row of a matrix of `columns`.
const uint8_t *row_of(const SwitchyardBlocks &blocks, const RowType &type, int64_t columns, int64_t index) {
    return blocks.blocks + (blocks.order ? blocks.order[index] : index) * (columns / type.elements * type.bytes);
}

struct RepackCall {
    Kernels kernels;
    const SwitchyardRepack *matrices;
    int64_t most_blocks;  // of one of them
    int rounds;
    Phase pieces;
};

void repack_half(const RepackCall &call, const SwitchyardRepack &matrix, int64_t block, int64_t at) {
    const SwitchyardMatrix &target = matrix.target;
    const bool apart = is_there(matrix.second);
    const SwitchyardBlocks &source = apart && at == 1 ? matrix.second : matrix.first;
    const RowType *type = source.codes ? nullptr : call.kernels.types->of(source.type);
    const auto fit = call.kernels.tiles[target.format]->formats[target.format].fit;
    BlockHalf half = {tile_row(target, block), target.columns, at, target.format, fit, call.rounds, {}};
    int64_t from[kHalfRows];
    for (int64_t i = 0; i < kHalfRows; ++i) {
        int64_t row = source_row(target, block, at, i);
        if (apart && row >= 0) row = block * kHalfRows + i;
        from[i] = row;
        half.rows[i] = row < 0 ? nullptr : type ? row_of(source, *type, target.columns, row) : source.codes->words;
    }
    if (!type) return call.kernels.blocks->keep_codes(half, *source.codes, from);
    const BlockType *own = type_of(call.kernels, source);
    if (!own) return call.kernels.blocks->fit_rows(half, *type);
    (own->keeps == target.format && own->keep ? own->keep : own->fit)(half);
}

void repack_work(void *argument) {
    auto &call = *static_cast<RepackCall *>(argument);
    call.pieces.run([&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
            const SwitchyardRepack &matrix = call.matrices[piece / call.most_blocks];
            const int64_t block = piece % call.most_blocks;
            for (int64_t half = 0; half < 2 && block < blocks_of(matrix.target); ++half) repack_half(call, matrix, block, half);
        }
    });
}

struct UnpackCall {
    const SwitchyardBlocks &source;
    const BlockKernels &kernels;
    const RowType &type;
    const BlockType *own;
    int64_t columns;
    void *out;
    bool floats;
    Phase rows;
};

void unpack_work(void *argument) {
    auto &call = *static_cast<UnpackCall *>(argument);
    const int64_t bytes = call.columns * (call.floats ? 4 : 2);
    call.rows.run([&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const uint8_t *blocks = row_of(call.source, call.type, call.columns, row);
            auto *out = static_cast<uint8_t *>(call.out) + row * bytes;
            if (call.own)
                call.own->unpack(blocks, call.columns, call.floats, out);
            else
                call.kernels.unpack_rows(blocks, call.columns, call.type, call.floats, out);
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_repack(SwitchyardPool *pool, const SwitchyardRepack *matrices, int64_t count,
                                         int32_t rounds) {
    const Kernels kernels = kernels_in_use();
    int64_t most_blocks = 1, weights = 0;
    for (int64_t i = 0; i < count; ++i) {
        const SwitchyardRepack &matrix = matrices[i];
        const bool apart = is_there(matrix.second);
        if (!can_repack(kernels, matrix.first, matrix.target)) return 2;
        if (apart && (matrix.target.pairing == SWITCHYARD_PLAIN || !can_repack(kernels, matrix.second, matrix.target))) return 2;
        most_blocks = std::max(most_blocks, blocks_of(matrix.target));
        weights += matrix.target.rows * matrix.target.columns;
    }
    RepackCall call = {kernels, matrices, most_blocks, rounds, Phase(count * most_blocks, pool->threads(), 1)};
    pool->run_long(repack_work, &call, weights);
    return 0;
}

SWITCHYARD_API int32_t switchyard_unpack(SwitchyardPool *pool, const SwitchyardBlocks *source, int64_t rows,
                                         int64_t columns, int32_t floats, void *out) {
    const Kernels kernels = kernels_in_use();
    if (source->codes || !is_readable(kernels, *source, columns)) return 2;
    UnpackCall call = {*source, *kernels.blocks, *kernels.types->of(source->type), type_of(kernels, *source), columns, out,
                       floats != 0, Phase(rows, pool->threads(), 1)};
    pool->run_long(unpack_work, &call, rows * columns);
    return 0;
}
