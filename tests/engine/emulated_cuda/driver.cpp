// Random products with buffers of exactly their sizes against plain loops: for sanitizers to watch.
//
// Usage: driver SEED CASES
#include <algorithm>

#include "angle_cases.h"
#include "attention_cases.h"
#include "block_cases.h"
#include "cases.h"
#include "latent_cases.h"
#include "norm_cases.h"
#include "rotary_cases.h"
#include "router_cases.h"

namespace {
struct Shape {
    const char* name;
    bool is_tiled, has_nibbles, has_zeros, has_table, has_half_scales;
    int bytes;  // of an element, if plain
};
const Shape SHAPES[] = {
    {"Int8", true, false, false, false, true, 0},       {"Int4", true, true, true, false, false, 0},
    {"Lut4", true, true, false, true, false, 0},        {"PlainBf16", false, false, false, false, false, 2},
    {"PlainFp16", false, false, false, false, false, 2}, {"PlainFp32", false, false, false, false, false, 4},
};

int aligned(int bytes) { return (bytes + 63) / 64 * 64; }

float element(const Shape& shape, const u8* at) {
    if (shape.bytes == 4) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    u16 bits;
    std::memcpy(&bits, at, 2);
    return std::strcmp(shape.name, "PlainFp16") == 0 ? Fp16{bits}.value() : Bf16{bits}.value();
}

void set_element(const Shape& shape, u8* at, float value) {
    if (shape.bytes == 4) {
        std::memcpy(at, &value, 4);
        return;
    }
    const u16 bits = std::strcmp(shape.name, "PlainFp16") == 0 ? Fp16::of(value).bits : Bf16::of(value).bits;
    std::memcpy(at, &bits, 2);
}

// Row `row` of the matrix as it was meant, by the definition of the layout.
double weight(const Shape& shape, const ProductArguments& a, const u8* record, int row, int column) {
    if (!shape.is_tiled) return element(shape, record + a.weights_at + (static_cast<i64>(row) * a.columns + column) * shape.bytes);
    const int pairs = a.rows / 2;
    int block = row / 32, in_block = row % 32;
    if (a.pairing != 0) {
        const int pair = a.pairing == 1 ? row % pairs : row / 2, is_up = a.pairing == 1 ? row / pairs : row % 2;
        block = pair / 16, in_block = pair % 16 + 16 * is_up;
    }
    const int groups = (a.columns + 31) / 32, group = column / 32, c = column % 32, half = in_block / 16, r = in_block % 16;
    const i64 tile = static_cast<i64>(block) * groups + group;
    u16 bits;
    std::memcpy(&bits, record + a.scales_at + (tile * 32 + in_block) * 2, 2);
    const double scale = shape.has_half_scales ? Fp16{bits}.value() : Bf16{bits}.value();
    if (!shape.has_nibbles) return scale * static_cast<i8>(record[a.weights_at + tile * 1024 + half * 512 + c / 4 * 64 + r * 4 + c % 4]);
    const u8 byte = record[a.weights_at + tile * 512 + half * 256 + c % 16 / 4 * 64 + r * 4 + c % 4];
    const int code = c < 16 ? byte & 15 : byte >> 4;
    if (shape.has_table) return scale * static_cast<i8>(record[a.table_at + code]);
    return scale * (code - record[a.zeros_at + tile * 32 + in_block] / 16.0);
}

// A number and how far from it a result may be.
struct Bounded {
    double value = 0, error = 0;
};

Bounded product_of(const Shape& shape, const ProductArguments& a, const u8* record, int row, const u8* x) {
    const int element_bytes = shape.is_tiled ? 2 : shape.bytes;
    const Shape& as = shape.is_tiled ? SHAPES[3] : shape;
    Bounded result;
    for (int begin = 0; begin < a.columns; begin += 32) {
        double largest = 0, weights = 0;
        for (int column = begin; column < a.columns && column < begin + 32; column++) {
            const double value = element(as, x + column * element_bytes), w = weight(shape, a, record, row, column);
            result.value += w * value;
            largest = std::fmax(largest, std::fabs(value));
            weights += std::fabs(w);
        }
        // The rounding of x to 8 bits of its largest in 32 columns, and that of sums in 32 bits.
        result.error += weights * largest * ((shape.is_tiled ? 1.0 / 250 : 0) + 1e-5);
    }
    if (a.bias_at >= 0) result.value += element(as, record + a.bias_at + row * element_bytes);
    return result;
}

Bounded rounded(const Shape& shape, Bounded of) {
    const double step = shape.bytes == 4 ? 1e-6 : shape.is_tiled || std::strcmp(shape.name, "PlainBf16") == 0 ? 1.0 / 256 : 1.0 / 2048;
    of.error += (std::fabs(of.value) + of.error) * step + 1e-6;
    return of;
}

Bounded output_of(const Shape& shape, const ProductArguments& a, const u8* record, int output, const u8* x) {
    if (a.pairing == 0) return rounded(shape, product_of(shape, a, record, output, x));
    const int pairs = a.rows / 2;
    Bounded gate = product_of(shape, a, record, a.pairing == 1 ? output : 2 * output, x);
    const Bounded up = product_of(shape, a, record, a.pairing == 1 ? pairs + output : 2 * output + 1, x);
    gate.value = std::fmax(gate.value, 0);  // the activation of these cases
    return rounded(shape, Bounded{gate.value * up.value, std::fabs(gate.value) * up.error + std::fabs(up.value) * gate.error + gate.error * up.error});
}

// The whole matrix of a record as rows of bf16.
void check_unpacked(const Shape& shape, const ProductArguments& a, const u8* record, int blocks, int groups) {
    std::vector<u16> out(static_cast<std::size_t>(a.rows * a.columns), 0xffff);
    const TileRows matrix{record + a.weights_at, record + a.scales_at, record + a.zeros_at, record + a.table_at};
    const UnpackArguments arguments{matrix, reinterpret_cast<u8*>(out.data()), a.columns, a.rows, a.pairing};
    const emulated::Index grid{static_cast<unsigned int>((groups + WARPS - 1) / WARPS), static_cast<unsigned int>(blocks), 1};
    require(emulate_unpack(shape.name, grid, numbers(), arguments), "no such kernel");
    for (int row = 0; row < a.rows; row++) {
        for (int column = 0; column < a.columns; column++) {
            const double wanted = weight(shape, a, record, row, column);
            const double found = Bf16{out[static_cast<std::size_t>(row * a.columns + column)]}.value();
            require(std::fabs(found - wanted) <= std::fabs(wanted) / 256 + 1e-30, "a weight is unpacked wrongly");
        }
    }
}

// A record with a matrix of a tiled format, its bias, and where they lie.
struct TiledRecord {
    ProductArguments at{};
    int end = 0;
    TiledRecord(const Shape& shape, int rows, int columns, int pairing) {
        const int tiles = (rows + 31) / 32 * ((columns + 31) / 32);
        const auto part = [&](int bytes) {
            const int begin = end;
            end += aligned(bytes);
            return begin;
        };
        at.rows = rows, at.columns = columns, at.pairing = pairing;
        at.weights_at = part(tiles * (shape.has_nibbles ? 512 : 1024));
        at.scales_at = part(tiles * 64);
        at.zeros_at = shape.has_zeros ? part(tiles * 32) : -1;
        at.bias_at = between(0, 1) ? part(rows * 2) : -1;
        at.table_at = shape.has_table ? part(16) : -1;
    }
    void fill(const Shape& shape, u8* record) const {
        const int tiles = (at.rows + 31) / 32 * ((at.columns + 31) / 32);
        for (int i = 0; i < tiles * (shape.has_nibbles ? 512 : 1024); i++) record[at.weights_at + i] = static_cast<u8>(between(0, 255));
        for (int i = 0; i < tiles * 32; i++) {
            const float scale = real(-0.02f, 0.02f);
            const u16 bits = shape.has_half_scales ? Fp16::of(scale).bits : Bf16::of(scale).bits;
            std::memcpy(record + at.scales_at + 2 * i, &bits, 2);
        }
        for (int i = 0; shape.has_zeros && i < tiles * 32; i++) record[at.zeros_at + i] = static_cast<u8>(between(0, 255));
        for (int i = 0; shape.has_table && i < 16; i++) record[at.table_at + i] = static_cast<u8>(between(-127, 127));
        for (int i = 0; at.bias_at >= 0 && i < at.rows; i++) set_element(SHAPES[3], record + at.bias_at + 2 * i, real(-1, 1));
    }
};

void go_through_latents(bool is_small) {
    const Shape& shape = SHAPES[between(0, 5)];
    const LatentSizes sizes(is_small);
    TiledRecord layout(shape, sizes.rows(), sizes.rank, 0);
    if (!shape.is_tiled) layout.at.weights_at = 0, layout.end = sizes.rows() * sizes.rank * shape.bytes;
    const Exact record(static_cast<std::size_t>(layout.end));
    if (shape.is_tiled) layout.fill(shape, record.data);
    for (int i = 0; !shape.is_tiled && i < sizes.rows() * sizes.rank; i++) set_element(shape, record.data + i * shape.bytes, real(-0.1f, 0.1f));
    const TileRows matrix{record.data + layout.at.weights_at, record.data + layout.at.scales_at, record.data + layout.at.zeros_at, record.data + layout.at.table_at};
    check_latents(sizes, shape.name, matrix, [&](int row, int column) { return weight(shape, layout.at, record.data, row, column); }, is_small);
}

// Visits sorted by expert, some of them nobody's, by matrix units and without: both have to give the same bits.
void go_through_groups(bool is_small) {
    const Shape& shape = SHAPES[between(0, 2)];
    const int pairing = between(0, 2), tiles = between(0, 1) ? 2 : 8, block = tiles * NEIGHBOURS;
    const int columns = between(0, 1) ? between(1, is_small ? 70 : 300) : 32 * between(1, is_small ? 2 : 9);
    const int rows = between(1, is_small ? 20 : 100) * 2 - (pairing == 0 ? between(0, 1) : 0), outputs = pairing ? rows / 2 : rows;
    const TiledRecord layout(shape, rows, columns, pairing);
    const int experts = between(1, 4), width = between(1, 3);
    std::vector<Exact> records;
    std::vector<i64> distances;
    for (int expert = 0; expert < experts; expert++) {
        records.emplace_back(static_cast<std::size_t>(layout.end));
        layout.fill(shape, records.back().data);
        distances.push_back(reinterpret_cast<i64>(records.back().data) - reinterpret_cast<i64>(records[0].data));
    }
    std::vector<i64> order, ends, block_expert, block_begin, expert_of;
    for (int expert = 0; expert <= experts; expert++) {  // the last is nobody
        const int count = between(0, is_small ? 20 : 80);
        const i64 begin = static_cast<i64>(expert_of.size());
        for (int i = 0; i < count; i++) expert_of.push_back(expert);
        if (expert == experts) break;
        ends.push_back(begin + count);
        for (int first = 0; first < count; first += block) block_expert.push_back(expert), block_begin.push_back(begin + first);
    }
    for (int spare = between(0, 2); spare > 0; spare--) block_expert.push_back(experts), block_begin.push_back(0);
    const int visits = static_cast<int>(expert_of.size()), blocks = static_cast<int>(block_expert.size());
    if (blocks == 0) return;
    for (int i = 0; i < visits; i++) order.push_back(i);
    std::shuffle(order.begin(), order.end(), numbers);
    const int x_rows = (visits + width - 1) / width, groups = (columns + 31) / 32;
    Exact x(static_cast<std::size_t>(x_rows * columns * 2));
    for (int i = 0; i < x_rows * columns; i++) set_element(SHAPES[3], x.data + i * 2, real(-2, 2));
    Exact codes(static_cast<std::size_t>(blocks * groups * block * 32)), scales(static_cast<std::size_t>(blocks * groups * block * 8));
    const Groups sorted{order.data(), ends.data(), block_expert.data(), block_begin.data(), experts};
    const RoundedRows rounded{reinterpret_cast<u32*>(codes.data), reinterpret_cast<float*>(scales.data)};
    const RoundArguments rounding{x.data, sorted, rounded, columns, width, tiles};
    require(emulate_round_rows({static_cast<unsigned int>(blocks), static_cast<unsigned int>(tiles), 1}, numbers(), rounding), "no such kernel");
    std::vector<u8> out[2];
    for (int units = 0; units < 2; units++) {
        out[units].assign(static_cast<std::size_t>(visits * outputs * 2), 0xff);
        const ProductArguments& at = layout.at;
        const GroupProductArguments arguments{out[units].data(), sorted, rounded, distances.data(), records[0].data, at.weights_at, at.scales_at,
                                              at.zeros_at, at.bias_at, at.table_at, -1, columns, rows, pairing, Activation{pairing ? 3 : -1, 0, 0, 1}};
        const emulated::Index grid{static_cast<unsigned int>(blocks), static_cast<unsigned int>(((rows + 31) / 32 + WARPS - 1) / WARPS), 1};
        require(emulate_group_product(shape.name, tiles, units != 0, grid, numbers(), arguments), "no such kernel");
    }
    require(out[0] == out[1], "matrix units give other bits");
    for (int place = 0; place < visits; place++) {
        const i64 visit = order[static_cast<std::size_t>(place)], expert = expert_of[static_cast<std::size_t>(place)];
        for (int output = 0; output < outputs; output++) {
            const u8* found = out[0].data() + (visit * outputs + output) * 2;
            if (expert == experts) {
                require(found[0] == 0xff && found[1] == 0xff, "nobody's visit was written");
                continue;
            }
            const Bounded wanted = output_of(shape, layout.at, records[static_cast<std::size_t>(expert)].data, output, x.data + visit / width * columns * 2);
            const double value = element(SHAPES[3], found);
            if (!(std::fabs(value - wanted.value) <= wanted.error)) {
                std::fprintf(stderr, "%s in groups, %d x %d, visit %d, output %d: %g, not %g +- %g\n", shape.name, rows, columns, static_cast<int>(visit), output, value, wanted.value, wanted.error);
                std::exit(1);
            }
        }
    }
}

void go_through_a_case(bool is_small) {
    const Shape& shape = SHAPES[between(0, 5)];
    const int element_bytes = shape.is_tiled ? 2 : shape.bytes, block = shape.is_tiled ? 32 : 8;
    const int row_choices[] = {1, 2, 4, 8}, most_columns = is_small ? 300 : 1200;
    ProductArguments a{};
    const bool is_linear = between(0, 3) == 0, is_summed = !is_linear && between(0, 1) == 0;
    a.pairing = is_summed ? 0 : between(0, 2);
    a.columns = between(0, 1) ? between(1, most_columns) : 32 * between(1, most_columns / 32);
    a.rows = between(1, is_small ? 40 : 100);
    if (a.pairing != 0) a.rows += a.rows % 2;
    a.slots = is_linear ? 1 : between(1, 5);
    a.experts = is_linear ? 1 : a.slots + between(0, 3);
    const int tokens = between(1, 8), per_token = is_linear ? 1 : between(1, 3);
    a.visits = tokens * per_token;
    a.width = is_summed ? 1 : per_token;
    a.together = is_summed ? per_token : 1;
    a.splits = between(1, 4);
    const int blocks = (a.rows + block - 1) / block, groups = (a.columns + 31) / 32, outputs = a.pairing ? a.rows / 2 : a.rows;

    int end = 0;
    const auto part = [&end](int bytes) {
        const int begin = end;
        end += aligned(bytes);
        return begin;
    };
    const int tiles = blocks * groups, code_bytes = shape.has_nibbles ? 512 : 1024;
    a.weights_at = part(shape.is_tiled ? tiles * code_bytes : a.rows * a.columns * shape.bytes);
    a.scales_at = shape.is_tiled ? part(tiles * 64) : -1;
    a.zeros_at = shape.has_zeros ? part(tiles * 32) : -1;
    a.bias_at = between(0, 1) ? part(a.rows * element_bytes) : -1;
    a.table_at = shape.has_table ? part(16) : -1;
    std::vector<Exact> records;
    std::vector<i64> distances;
    for (int slot = 0; slot < a.slots; slot++) {
        records.emplace_back(static_cast<std::size_t>(end));
        u8* record = records.back().data;
        const auto fill = [&](i64 at, int count, auto&& set) {
            for (int i = 0; at >= 0 && i < count; i++) set(record + at, i);
        };
        const Shape& plain = shape.is_tiled ? SHAPES[3] : shape;
        if (shape.is_tiled) {
            fill(a.weights_at, tiles * code_bytes, [](u8* to, int i) { to[i] = static_cast<u8>(between(0, 255)); });
            fill(a.scales_at, tiles * 32, [&](u8* to, int i) {
                const float scale = real(-0.02f, 0.02f);
                const u16 bits = shape.has_half_scales ? Fp16::of(scale).bits : Bf16::of(scale).bits;
                std::memcpy(to + 2 * i, &bits, 2);
            });
            fill(a.zeros_at, tiles * 32, [](u8* to, int i) { to[i] = static_cast<u8>(between(0, 255)); });
            fill(a.table_at, 16, [](u8* to, int i) { to[i] = static_cast<u8>(between(-127, 127)); });
        } else {
            fill(a.weights_at, a.rows * a.columns, [&](u8* to, int i) { set_element(shape, to + i * shape.bytes, real(-1, 1)); });
        }
        fill(a.bias_at, a.rows, [&](u8* to, int i) { set_element(plain, to + i * element_bytes, real(-1, 1)); });
    }
    a.base = records[0].data;
    for (const Exact& each : records) distances.push_back(reinterpret_cast<i64>(each.data) - reinterpret_cast<i64>(a.base));
    a.records = distances.data();

    if (shape.is_tiled) check_unpacked(shape, a, records[0].data, blocks, groups);
    const int x_rows = a.visits / a.width;
    Exact x(static_cast<std::size_t>(x_rows) * static_cast<std::size_t>(a.columns * element_bytes));
    for (int i = 0; i < x_rows * a.columns; i++) set_element(shape.is_tiled ? SHAPES[3] : shape, x.data + i * element_bytes, real(-2, 2));
    std::vector<i64> ids(static_cast<std::size_t>(a.visits));
    std::vector<int> slot_of(static_cast<std::size_t>(a.experts)), absent(static_cast<std::size_t>(a.visits), 7);
    for (i64& id : ids) id = between(-1, a.experts);
    for (int& slot : slot_of) slot = between(-1, a.slots - 1);
    std::vector<float> shares(static_cast<std::size_t>(a.visits));
    for (float& share : shares) share = real(0, 1);
    std::vector<float> parts(static_cast<std::size_t>(a.visits * a.splits * blocks * block), NAN);
    std::vector<u32> arrived(static_cast<std::size_t>(a.visits * blocks), 0);
    const int out_rows = is_summed ? tokens : a.visits, out_columns = is_summed ? a.rows : outputs;
    std::vector<u8> out(static_cast<std::size_t>(out_rows * out_columns * element_bytes), 0xff);
    a.x = x.data;
    a.out = out.data();
    a.ids = is_linear ? nullptr : ids.data();
    const bool has_table_of_slots = !is_linear && between(0, 3) != 0;
    a.slot_of = has_table_of_slots ? slot_of.data() : nullptr;
    a.absent = has_table_of_slots ? absent.data() : nullptr;
    a.shares = is_summed ? shares.data() : nullptr;
    a.parts = parts.data();
    a.arrived = arrived.data();
    a.activation = Activation{a.pairing ? 3 : -1, 0, 0, 1};
    if (!has_table_of_slots) a.experts = a.slots;

    const emulated::Index grid{static_cast<unsigned int>(is_linear ? 1 : a.visits), static_cast<unsigned int>(blocks), static_cast<unsigned int>(a.splits)};
    require(emulate_product(shape.name, row_choices[between(0, 3)], grid, numbers(), a), "no such kernel");

    const auto slot_at = [&](int visit) { return slot_of_visit(a, visit); };
    for (int visit = 0; has_table_of_slots && visit < a.visits; visit++) {
        require(absent[static_cast<std::size_t>(visit)] == (slot_at(visit) == ABSENT), "an absent expert is not reported, or another is");
    }
    for (const u32 count : arrived) require(count == 0, "a counter is not left at zero");
    for (int row = 0; row < out_rows; row++) {
        for (int column = 0; column < out_columns; column++) {
            Bounded wanted;
            for (int visit = row * a.together; visit < (row + 1) * a.together; visit++) {
                const int slot = slot_at(visit);
                if (slot < 0) continue;
                const u8* of = x.data + static_cast<i64>(visit / a.width) * a.columns * element_bytes;
                const Bounded one = output_of(shape, a, records[static_cast<std::size_t>(slot)].data, column, of);
                const double share = is_summed ? shares[static_cast<std::size_t>(visit)] : 1;
                wanted.value += share * one.value;
                wanted.error += share * one.error;
            }
            wanted = rounded(shape, wanted);
            const double found = element(shape.is_tiled ? SHAPES[3] : shape, out.data() + (row * out_columns + column) * element_bytes);
            if (!(std::fabs(found - wanted.value) <= wanted.error)) {
                std::fprintf(stderr, "%s, %d x %d, row %d, output %d: %g, not %g +- %g\n", shape.name, a.rows, a.columns, row, column, found, wanted.value, wanted.error);
                std::exit(1);
            }
        }
    }
}
}  // namespace

int main(int, char** argv) {
    numbers.seed(static_cast<unsigned int>(std::atoi(argv[1])));
    const int cases = std::atoi(argv[2]);
#ifdef EMULATED_THREADS
    const bool is_small = true;
#else
    const bool is_small = false;
#endif
    for (int i = 0; i < cases; i++) {
        go_through_a_case(is_small);
        go_through_groups(is_small);
        go_through_blocks(is_small);
        go_through_attention(is_small);
        go_through_latents(is_small);
        go_through_angles();
        go_through_norm();
        go_through_rotary();
        go_through_router(is_small);
    }
}
