// Latent attention over pages in any order, with exactly the rows that a sequence has, against plain loops that expand keys
// and values.
#pragma once
#include <cmath>
#include <functional>

#include "cases.h"
#include "latent_kernels.h"

struct LatentSizes {
    int sequences = between(1, 3), heads = between(1, 6), rank, rope, key_dim, value_dim;
    explicit LatentSizes(bool is_small)
        : rank(8 * between(1, is_small ? 5 : 64)), rope(2 * between(1, 32)), key_dim(between(1, is_small ? 40 : 70)), value_dim(between(1, is_small ? 40 : 70)) {}
    int rows() const { return heads * (key_dim + value_dim); }
};

inline std::size_t sized(i64 count) { return static_cast<std::size_t>(count); }

// Row and column of the matrix -> the weight that it means.
typedef std::function<double(int, int)> WeightOf;

inline void check_latents(const LatentSizes& of, const char* format, const TileRows& matrix, const WeightOf& weight, bool is_small) {
    const char* kinds[] = {"KvBf16", "KvFp16", "KvFp32"};
    const int heads = of.heads, rank = of.rank, rope = of.rope, most = is_small ? 50 : 200;
    LatentQueries q{};
    q.matrix = matrix;
    q.heads = heads, q.rank = rank, q.rope = rope, q.key_dim = of.key_dim, q.value_dim = of.value_dim;
    q.states = between(0, 2), q.weight_states = between(0, 2), q.angle_states = between(0, 2), q.kept_states = between(0, 2);
    q.takes_pairs = between(0, 1), q.makes_pairs = between(0, 1), q.angle_step = between(1, 2);
    q.rounds_once = between(0, 1), q.norm_rounds_once = between(0, 1);
    q.epsilon = 1e-5f, q.offset = static_cast<float>(between(0, 1));
    const auto bytes = [](int type) { return type == 2 ? 4 : 2; };
    const int kept_bytes = bytes(q.kept_states), row_bytes[] = {rank * kept_bytes, rope * kept_bytes};

    std::vector<i64> held;
    for (int i = 0; i < of.sequences; i++) held.push_back(between(0, 3) ? between(0, most - 1) : 0);
    const int pages = most / PAGE + 1;
    q.part_step = 1 + pages, q.table_step = 2 * q.part_step;
    std::vector<i64> table(sized(of.sequences * q.table_step), 0);
    std::vector<Exact> memory;
    for (int sequence = 0; sequence < of.sequences; sequence++) {
        const int rows = static_cast<int>(held[sized(sequence)]) + 1;
        for (int part = 0; part < 2; part++) {
            i64* entries = table.data() + sequence * q.table_step + part * q.part_step;
            for (int page = 0; page * PAGE < rows; page++) {
                const int count = std::min(PAGE, rows - page * PAGE) * row_bytes[part];
                memory.emplace_back(sized(count));
                entries[1 + page] = reinterpret_cast<i64>(memory.back().data);
                for (int i = 0; i < count / kept_bytes; i++) set_state(memory.back().data, q.kept_states, i, real(-1, 1));
            }
        }
    }
    const auto drawn = [&](i64 count, int type, float size) {
        Exact made(sized(count * bytes(type)));
        for (i64 i = 0; i < count; i++) set_state(made.data, type, i, real(-size, size));
        return made;
    };
    const bool is_same_for_all = between(0, 3) == 0;
    const int angles = rope / 2 * q.angle_step, of_query = of.key_dim + rope, of_latent = rank + rope;
    const Exact queries = drawn(static_cast<i64>(of.sequences) * heads * of_query, q.states, 1), latents = drawn(of.sequences * of_latent, q.states, 2), norm = drawn(rank, q.weight_states, 1);
    const Exact cosines = drawn((is_same_for_all ? 1 : of.sequences) * angles, q.angle_states, 1), sines = drawn((is_same_for_all ? 1 : of.sequences) * angles, q.angle_states, 1);
    const Exact asked(sized(static_cast<i64>(of.sequences) * heads * of_latent * 4)), mixed(sized(static_cast<i64>(of.sequences) * heads * rank * 4));
    const Exact out(sized(static_cast<i64>(of.sequences) * heads * of.value_dim * bytes(q.states)));
    q.angle_row_step = is_same_for_all ? 0 : angles;
    q.queries = queries.data, q.latents = latents.data, q.norm = norm.data, q.cosines = cosines.data, q.sines = sines.data;
    q.out = reinterpret_cast<float*>(asked.data), q.held = held.data(), q.table = table.data();
    const auto grid = [&](int x, int y, int z) { return emulated::Index{static_cast<unsigned int>(x), static_cast<unsigned int>(y), static_cast<unsigned int>(z)}; };
    const int warps = heads * ((rank + GROUP - 1) / GROUP);
    require(emulate_latents("latent_queries_kernel", format, grid((warps + WARPS - 1) / WARPS + 1, of.sequences, 1), numbers(), &q), "no such kernel of latents' queries");

    LatentAttention a{};
    const int runs = (heads + LATENT_HEADS - 1) / LATENT_HEADS;
    a.splits = between(1, 5), a.heads = heads, a.value_dim = rank, a.rope = rope;
    a.window = between(0, 1) ? 0 : between(1, most);
    a.scale = real(0.05f, 0.4f);
    std::vector<float> parts(sized(static_cast<i64>(of.sequences) * heads * a.splits * (2 + rank)), NAN);
    std::vector<u32> arrived(sized(runs * of.sequences), 0);
    a.queries = q.out, a.out = reinterpret_cast<float*>(mixed.data), a.held = q.held, a.table = q.table;
    a.table_step = q.table_step, a.part_step = q.part_step, a.parts = parts.data(), a.arrived = arrived.data();
    require(emulate_latents("latent_attention_kernel", kinds[q.kept_states], grid(a.splits, runs, of.sequences), numbers(), &a), "no such kernel of latents' attention");
    for (const u32 count : arrived) require(count == 0, "a counter of latents' attention is not left at zero");

    const LatentValues v{matrix, a.out, out.data, heads, rank, of.key_dim, of.value_dim, q.states};
    const int of_head = (of.value_dim + TILE_ROWS - 2) / TILE_ROWS + 1;  // wherever a head begins
    require(emulate_latents("latent_values_kernel", format, grid(heads * of_head, of.sequences, 1), numbers(), &v), "no such kernel of latents' values");

    const double step = q.states == 0 ? 1.0 / 256 : q.states == 1 ? 1.0 / 2048 : 1e-6;
    const double kept_step = std::max(step, q.kept_states == 0 ? 1.0 / 256 : q.kept_states == 1 ? 1.0 / 2048 : 1e-6);
    for (int sequence = 0; sequence < of.sequences; sequence++) {
        const i64 before = held[sized(sequence)];
        const auto kept = [&](int part, int token, int i) {
            const i64* entries = table.data() + sequence * q.table_step + part * q.part_step;
            return static_cast<double>(state_at(row_in_pages(entries, 0, token, row_bytes[part]), q.kept_states, i));
        };
        const auto turned = [&](const u8* states, i64 from, int i) {
            const int half = rope / 2, pair = q.makes_pairs ? i / 2 : i % half;
            const bool is_first = q.makes_pairs ? i % 2 == 0 : i < half;
            const int first = q.takes_pairs ? 2 * pair : pair, second = q.takes_pairs ? first + 1 : first + half;
            const i64 angle = sequence * q.angle_row_step + pair * q.angle_step;
            const double c = state_at(q.cosines, q.angle_states, angle), s = state_at(q.sines, q.angle_states, angle);
            const double one = state_at(states, q.states, from + first), other = state_at(states, q.states, from + second);
            return is_first ? one * c - other * s : other * c + one * s;
        };
        const i64 own = static_cast<i64>(sequence) * of_latent;
        const int row = static_cast<int>(before);
        double squares = 0;
        for (int i = 0; i < rank; i++) squares += std::pow(static_cast<double>(state_at(q.latents, q.states, own + i)), 2);
        for (int i = 0; i < rank; i++) {
            const double wanted = state_at(q.latents, q.states, own + i) / std::sqrt(squares / rank + q.epsilon) * (state_at(q.norm, q.weight_states, i) + q.offset);
            require(std::fabs(kept(0, row, i) - wanted) <= 3 * kept_step * std::fabs(wanted) + 1e-5, "a latent is normed or stored wrongly");
        }
        for (int i = 0; i < rope; i++) require(std::fabs(kept(1, row, i) - turned(q.latents, own + rank, i)) <= 8 * kept_step + 1e-5, "a key is rotated or stored wrongly");

        const int seen = row + 1, oldest = a.window ? std::max(0, seen - a.window) : 0;
        for (int head = 0; head < heads; head++) {
            const int first = head * (of.key_dim + of.value_dim);
            const i64 from = (static_cast<i64>(sequence) * heads + head) * of_query;
            std::vector<double> query(sized(rank), 0), turned_query, shares, mixture(sized(rank), 0);
            for (int i = 0; i < of.key_dim; i++) {
                const double of_row = state_at(q.queries, q.states, from + i);
                for (int column = 0; column < rank; column++) query[sized(column)] += of_row * weight(first + i, column);
            }
            for (int i = 0; i < rope; i++) turned_query.push_back(turned(q.queries, from + of.key_dim, i));
            double largest = -1e300, total = 0, moved = 0;
            for (int token = oldest; token < seen; token++) {
                double score = 0, size = 0;
                for (int i = 0; i < rank; i++) score += query[sized(i)] * kept(0, token, i);
                for (int i = 0; i < rope; i++) score += turned_query[sized(i)] * kept(1, token, i), size += std::fabs(kept(1, token, i));
                shares.push_back(score * a.scale);
                largest = std::max(largest, shares.back());
                moved = std::max(moved, a.scale * (4 * step * size + 1e-5 * std::fabs(score)));  // what rounding a rotation does
            }
            for (double& share : shares) total += share = std::exp(share - largest);
            for (int token = oldest; token < seen; token++)
                for (int i = 0; i < rank; i++) mixture[sized(i)] += shares[sized(token - oldest)] / total * kept(0, token, i);
            for (int i = 0; i < of.value_dim; i++) {
                double wanted = 0, size = 0;
                for (int column = 0; column < rank; column++) {
                    const double of_column = weight(first + of.key_dim + i, column);
                    wanted += mixture[sized(column)] * of_column;
                    size += std::fabs(of_column) * 4;  // latents are no larger
                }
                const double found = state_at(out.data, q.states, (static_cast<i64>(sequence) * heads + head) * of.value_dim + i);
                if (!(std::fabs(found - wanted) <= step * std::fabs(wanted) + (std::expm1(2 * moved) + 1e-4) * size + 1e-6)) {
                    std::fprintf(stderr, "latents, %s, %d heads of %d and %d, rank %d, rope %d, %d held, window %d, %d parts: %g, not %g\n", format, heads, of.key_dim,
                                 of.value_dim, rank, rope, static_cast<int>(before), a.window, a.splits, found, wanted);
                    std::exit(1);
                }
            }
        }
    }
}
