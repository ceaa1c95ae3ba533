// Matrices in blocks, as GGUF files have them: few tokens and many, rows in another order, and experts whose gate, up and down are
// of different types.
#pragma once
#include "own_memory.h"
#include "row_kernels.h"
#include "rows_kernels.h"

namespace {

// Rows of random blocks, in memory of their size.
struct OwnBlocks {
    std::vector<uint8_t> memory;
    int64_t bytes;  // of a row

    OwnBlocks(Random &random, const RowType &type, int64_t rows, int64_t columns)
        : memory(static_cast<size_t>(rows * (columns / type.elements) * type.bytes)), bytes(columns / type.elements * type.bytes) {
        for (size_t i = 0; i < memory.size(); ++i) {
            memory[i] = static_cast<uint8_t>(draw(random, 0, 255));
            if (i % 2) memory[i] = static_cast<uint8_t>((memory[i] & 0x83) | 0x28);  // scales, or numbers, near 0.03
        }
        if (type.number == 39)  // the exponents of MXFP4
            for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(type.bytes)) memory[i] = static_cast<uint8_t>(draw(random, 120, 127));
    }
};

const RowType &draw_type(Random &random) { return kPortableRows.types[draw(random, 0, kPortableRows.count - 1)]; }

std::vector<uint16_t> draw_finite(Random &random, int64_t count) {
    auto row = draw_row(random, count);
    for (auto &value : row)
        if ((value & 0x7f80) == 0x7f80) value = 0;
    return row;
}

void try_blocks(SwitchyardPool *pool, Random &random) {
    const RowType &type = draw_type(random);
    const int64_t most = type.elements == 1 ? 300 : type.elements == 32 ? 12 : 3;
    const int64_t rows = draw(random, 17, 100), columns = type.elements * draw(random, 1, most);
    const OwnBlocks own(random, type, rows, columns);
    std::vector<int64_t> order(static_cast<size_t>(rows));
    for (auto &row : order) row = draw(random, 0, rows - 1);
    SwitchyardMatrix matrix{};
    matrix.weights = own.memory.data(), matrix.rows = rows, matrix.columns = columns;
    matrix.format = SWITCHYARD_BLOCKS, matrix.type = type.number;
    if (coin(random)) matrix.order = order.data();
    const OwnPool alone(1);
    for (const int64_t together : {8, 40}) {
        const auto tokens = static_cast<int32_t>(draw(random, 1, together));
        const auto x = draw_finite(random, tokens * columns);
        std::vector<uint16_t> out(static_cast<size_t>(tokens * rows)), again(out);
        const auto multiply = together == 8 ? switchyard_linear : switchyard_linear_rows;
        require(multiply(pool, &matrix, tokens, x.data(), nullptr, 0, out.data()) == 0, "no product of blocks");
        require(multiply(alone.pool, &matrix, tokens, x.data(), nullptr, 0, again.data()) == 0, "no product of blocks");
        require(out == again, "a product of blocks depends on the number of threads");
        record("blocks", out);
    }
}

void try_block_experts(SwitchyardPool *pool, Random &random) {
    const RowType &gate = draw_type(random), &up = draw_type(random), &down = draw_type(random);
    SwitchyardExperts layer{};
    layer.count = static_cast<int32_t>(draw(random, 1, 4));
    layer.hidden = static_cast<int32_t>(kWide * draw(random, 1, 2)), layer.inner = kWide;
    layer.pairing = SWITCHYARD_HALVES;
    layer.limit = std::numeric_limits<float>::infinity();
    const int64_t inner = layer.inner, hidden = layer.hidden;
    const OwnBlocks gates(random, gate, layer.count * inner, hidden), ups(random, up, layer.count * inner, hidden);
    const OwnBlocks downs(random, down, layer.count * hidden, inner);
    const uint8_t *base = gates.memory.data();  // offsets are from here, into memory of their own
    layer.records = base;
    layer.first.second = ups.memory.data() - base, layer.down.weights = downs.memory.data() - base;
    layer.first.scales = layer.first.zeros = layer.first.table = layer.down.scales = layer.down.zeros = layer.down.table = -1;
    layer.first.step = inner * gates.bytes, layer.first.second_step = inner * ups.bytes, layer.down.step = hidden * downs.bytes;
    layer.first.format = layer.down.format = SWITCHYARD_BLOCKS;
    layer.first.type = gate.number, layer.first.second_type = up.number, layer.down.type = down.number, layer.down.second_type = -1;
    const auto tokens = static_cast<int32_t>(coin(random) ? draw(random, 1, 8) : draw(random, 9, 120));
    const auto x = draw_finite(random, tokens * hidden);
    std::vector<int64_t> index(static_cast<size_t>(tokens) * 2);
    for (auto &id : index) id = draw(random, 0, layer.count - 1);
    const std::vector<float> weights(index.size(), 0.25f);
    std::vector<uint16_t> out(x.size()), again(x.size());
    require(switchyard_experts(pool, &layer, tokens, 2, x.data(), index.data(), weights.data(), out.data()) == 0, "no experts in blocks");
    const OwnPool alone(1);
    require(switchyard_experts(alone.pool, &layer, tokens, 2, x.data(), index.data(), weights.data(), again.data()) == 0, "no experts in blocks");
    require(out == again, "experts in blocks depend on the number of threads");
    record("experts_in_blocks", out);
}

}  // namespace
