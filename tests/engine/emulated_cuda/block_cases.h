// Random products with matrices in rows of blocks, whose last row ends in the last word of its memory.
#pragma once
#include "cases.h"
#include "row_kernels.h"  // of the native kernels, which tests compare with what ggml says

struct BlockShape {
    const char* type;  // as kernels are compiled to unpack
    std::string format;  // and for products, if they are here
    int columns, bytes;
    RowType native;
};
inline std::vector<BlockShape> block_shapes() {
    std::vector<BlockShape> shapes{
#define OF_BLOCKS(Type, number) BlockShape{#Type, "", Type::COLUMNS, Type::BYTES, *kPortableRows.of(number)},
        BLOCK_TYPES(OF_BLOCKS)
#undef OF_BLOCKS
    };
    for (BlockShape& shape : shapes) {
#define OF_BLOCKS(Type) if (std::strcmp(shape.type, #Type) == 0) shape.format = "Blocks<" #Type ">";
        MULTIPLIED(OF_BLOCKS)
#undef OF_BLOCKS
    }
    return shapes;
}
inline const std::vector<BlockShape> BLOCK_SHAPES = block_shapes();

struct BlockRows {
    Exact memory;
    std::vector<float> meant;
    BlockRows(const BlockShape& shape, int rows, int columns)
        : memory(static_cast<std::size_t>((rows * columns / shape.columns * shape.bytes + 3) / 4 * 4)), meant(static_cast<std::size_t>(rows * columns)) {
        for (int block = 0; block < rows * columns / shape.columns; block++) {
            u8* at = memory.data + block * shape.bytes;
            float* values = meant.data() + block * shape.columns;
            float most = 0;
            while (!(most > 1e-4f && most < 64.0f)) {  // any bytes whose scales are of use
                for (int i = 0; i < shape.bytes; i++) at[i] = static_cast<u8>(between(0, 255));
                shape.native.unpack(at, shape.columns, values);
                most = 0;
                for (int i = 0; i < shape.columns; i++) most = std::fabs(values[i]) <= most ? most : std::fabs(values[i]);
            }
        }
    }
};

// Gates in one piece of memory, ups in another; all visits are of one expert.
inline void go_through_blocks(bool is_small) {
    const BlockShape& shape = BLOCK_SHAPES[static_cast<std::size_t>(between(0, static_cast<int>(BLOCK_SHAPES.size()) - 1))];
    const int columns = shape.columns * between(1, is_small || shape.columns > 128 ? 3 : 20), rows = between(1, is_small ? 12 : 70);
    const bool is_mixed = shape.format == "Blocks<Q4_K>" && between(0, 1) == 0;
    const auto second = std::find_if(BLOCK_SHAPES.begin(), BLOCK_SHAPES.end(), [](const BlockShape& each) { return each.format == "Blocks<Q6_K>"; });
    const BlockRows gates(shape, rows, columns), ups(is_mixed ? *second : shape, rows, columns);
    Exact unpacked(static_cast<std::size_t>(rows * columns * 2));
    const unsigned int runs = static_cast<unsigned int>((rows * columns / 32 + THREADS - 1) / THREADS);
    const UnpackArguments unpacking{{gates.memory.data, nullptr, nullptr, nullptr}, unpacked.data, columns, rows, 0};
    require(emulate_unpack(shape.type, {runs, 1, 1}, numbers(), unpacking), "no such kernel");
    for (int i = 0; i < rows * columns; i++) {
        u16 bits;
        std::memcpy(&bits, unpacked.data + 2 * i, 2);
        // The same but for the sign of a zero, which a negative scale gives to some.
        require(Bf16{bits}.value() == Bf16::of(gates.meant[static_cast<std::size_t>(i)]).value(), "a block is unpacked wrongly");
    }
    if (shape.format.empty()) return;
    const char* format = is_mixed ? "Blocks<Q4_K,Q6_K>" : shape.format.c_str();
    const bool is_paired = is_mixed || between(0, 1) == 0;
    const int visits = between(1, is_small ? 10 : 70), groups = columns / 32;
    Exact x(static_cast<std::size_t>(visits * columns * 2));
    std::vector<float> values;
    for (int i = 0; i < visits * columns; i++) {
        const Bf16 value = Bf16::of(real(-2, 2));
        std::memcpy(x.data + 2 * i, &value.bits, 2);
        values.push_back(value.value());
    }
    const auto product = [&](const BlockRows& matrix, int row, int visit, double* error) {
        double sum = 0;
        for (int column = 0; column < columns; column++) {
            const double one = matrix.meant[static_cast<std::size_t>(row * columns + column)] * values[static_cast<std::size_t>(visit * columns + column)];
            sum += one;
            *error += std::fabs(matrix.meant[static_cast<std::size_t>(row * columns + column)]) * 2.0 / 250;
        }
        return sum;
    };
    const i64 up_at = reinterpret_cast<i64>(ups.memory.data) - reinterpret_cast<i64>(gates.memory.data);
    const Activation activation{is_paired ? 3 : -1, 0, 0, 1};
    Exact out(static_cast<std::size_t>(visits * rows * 2));
    const auto check = [&] {
        for (int visit = 0; visit < visits; visit++) {
            for (int row = 0; row < rows; row++) {
                double error = 0, up_error = 0, wanted = product(gates, row, visit, &error);
                if (is_paired) {
                    const double up = product(ups, row, visit, &up_error), gate = std::fmax(wanted, 0);
                    wanted = gate * up;
                    error = gate * up_error + std::fabs(up) * error + error * up_error;
                }
                u16 bits;
                std::memcpy(&bits, out.data + (visit * rows + row) * 2, 2);
                require(std::fabs(Bf16{bits}.value() - wanted) <= error + std::fabs(wanted) / 128 + 1e-6, "a product with blocks is wrong");
            }
        }
    };
    const i64 record = 0;
    ProductArguments a{};
    a.x = x.data, a.out = out.data, a.records = &record, a.base = gates.memory.data;
    a.up_at = up_at, a.bias_at = -1, a.experts = a.slots = a.width = a.together = 1;
    a.visits = visits, a.columns = columns, a.rows = is_paired ? 2 * rows : rows, a.pairing = is_paired, a.activation = activation;
    a.splits = between(1, 3);
    const int blocks = (a.rows + 7) / 8, row_choices[] = {1, 2, 4, 8};
    std::vector<float> parts(static_cast<std::size_t>(visits * a.splits * blocks * 8), NAN);
    std::vector<u32> arrived(static_cast<std::size_t>(visits * blocks), 0);
    a.parts = parts.data(), a.arrived = arrived.data();
    const emulated::Index grid{1, static_cast<unsigned int>(blocks), static_cast<unsigned int>(a.splits)};
    require(emulate_product(format, row_choices[between(0, 3)], grid, numbers(), a), "no such kernel");
    check();
    const int tiles = between(0, 1) ? 2 : 8, block = tiles * NEIGHBOURS;
    std::vector<i64> order, block_expert, block_begin;
    for (int visit = 0; visit < visits; visit++) order.push_back(visit);
    for (int begin = 0; begin < visits; begin += block) block_expert.push_back(0), block_begin.push_back(begin);
    const i64 end = visits;
    const unsigned int count = static_cast<unsigned int>(block_expert.size());
    Exact codes(count * static_cast<std::size_t>(groups * block * 32)), scales(count * static_cast<std::size_t>(groups * block * 8));
    const Groups sorted{order.data(), &end, block_expert.data(), block_begin.data(), 1};
    const RoundedRows rounded{reinterpret_cast<u32*>(codes.data), reinterpret_cast<float*>(scales.data)};
    const RoundArguments rounding{x.data, sorted, rounded, columns, 1, tiles};
    require(emulate_round_rows({count, static_cast<unsigned int>(tiles), 1}, numbers(), rounding), "no such kernel");
    const GroupProductArguments g{out.data, sorted, rounded, &record, gates.memory.data, 0, -1, -1, -1, -1, up_at, columns, a.rows, a.pairing, activation};
    const emulated::Index of_groups{count, static_cast<unsigned int>(((a.rows + 31) / 32 + WARPS - 1) / WARPS), 1};
    require(emulate_group_product(format, tiles, between(0, 1) != 0, of_groups, numbers(), g), "no such kernel");
    check();
}
