// Attention over pages in any order, with exactly the rows that a sequence has, against plain loops.
#pragma once
#include <cmath>

#include "attention_kernels.h"
#include "cases.h"

struct KvKind {
    const char* name;
    int bytes;
    double step;  // of rounding, of a number's size; for 8 bits of the largest in a row
};

inline double kv_value(const KvKind& kind, const u8* row, int at, double scale) {
    if (std::strcmp(kind.name, "KvBf16") == 0) return reinterpret_cast<const Bf16*>(row)[at].value();
    if (std::strcmp(kind.name, "KvFp16") == 0) return reinterpret_cast<const Fp16*>(row)[at].value();
    if (std::strcmp(kind.name, "KvFp32") == 0) return reinterpret_cast<const float*>(row)[at];
    return scale * reinterpret_cast<const i8*>(row)[at];
}

inline void go_through_attention(bool is_small) {
    const KvKind kinds[] = {{"KvBf16", 2, 1.0 / 256}, {"KvFp16", 2, 1.0 / 2048}, {"KvFp32", 4, 1e-6}, {"KvInt8", 1, 1.0 / 250}};
    const KvKind& kind = kinds[between(0, 3)];
    const int rows_choices[] = {1, 4, 8};
    const bool is_coded = kind.bytes == 1;
    AttentionArguments a{};
    const int sequences = between(1, 3), most = is_small ? 90 : 400;
    a.kv_heads = between(1, 3);
    const int group = between(1, 9);
    a.heads = a.kv_heads * group;
    a.key_dim = 8 * between(1, is_small ? 8 : 32);
    a.value_dim = between(0, 2) ? a.key_dim : 8 * between(1, is_small ? 8 : 32);
    a.scale = real(0.05f, 0.4f);
    a.softcap = between(0, 2) ? 0.0f : real(2, 30);
    a.splits = between(1, 5);
    a.states = between(0, 2);
    a.window = between(0, 1) ? 0 : between(1, most);
    a.kept = a.window && between(0, 1) ? between(1, 40) : 0;
    const int state_bytes = a.states == 2 ? 4 : 2;

    std::vector<i64> held;
    int pages = 0;
    for (int i = 0; i < sequences; i++) {
        held.push_back(between(0, 3) ? between(0, most - 1) : 0);
        pages = std::max(pages, static_cast<int>(held.back()) / PAGE + 1);
    }
    // A page of its own memory each: keys, values and scales of all heads; and rows beyond the context are never read.
    const int parts = is_coded ? 4 : 2;
    a.part_step = 1 + pages;
    a.table_step = parts * a.part_step;
    std::vector<i64> table(static_cast<std::size_t>(sequences * a.table_step), 0);
    std::vector<Exact> memory;
    const int row_bytes[] = {a.key_dim * kind.bytes, a.value_dim * kind.bytes, 4, 4};
    for (int sequence = 0; sequence < sequences; sequence++) {
        for (int part = 0; part < parts; part++) {
            i64* entries = table.data() + sequence * a.table_step + part * a.part_step;
            entries[0] = PAGE * row_bytes[part];
            const int rows = static_cast<int>(held[static_cast<std::size_t>(sequence)]) + 1;
            for (int page = 0; page * PAGE < rows; page++) {
                const int last = std::min(PAGE, rows - page * PAGE);
                memory.emplace_back(static_cast<std::size_t>(((a.kv_heads - 1) * PAGE + last) * row_bytes[part]));
                u8* at = memory.back().data;
                entries[1 + page] = reinterpret_cast<i64>(at);
                const int count = ((a.kv_heads - 1) * PAGE + last) * row_bytes[part];
                for (int i = 0; part >= 2 && i < count / 4; i++) reinterpret_cast<float*>(at)[i] = real(0.001f, 0.02f);
                for (int i = 0; part < 2 && i < count / kind.bytes; i++) {
                    if (is_coded) reinterpret_cast<i8*>(at)[i] = static_cast<i8>(between(-127, 127));
                    else if (kind.bytes == 4) reinterpret_cast<float*>(at)[i] = real(-2, 2);
                    else if (std::strcmp(kind.name, "KvBf16") == 0) reinterpret_cast<Bf16*>(at)[i] = Bf16::of(real(-2, 2));
                    else reinterpret_cast<Fp16*>(at)[i] = Fp16::of(real(-2, 2));
                }
            }
        }
    }
    const auto states = [&](int count, float size) {
        Exact made(static_cast<std::size_t>(count * state_bytes));
        for (int i = 0; i < count; i++) set_state(made.data, a.states, i, real(-size, size));
        return made;
    };
    const Exact queries = states(sequences * a.heads * a.key_dim, 1), keys = states(sequences * a.kv_heads * a.key_dim, 2), values = states(sequences * a.kv_heads * a.value_dim, 2);
    const Exact out(static_cast<std::size_t>(sequences * a.heads * a.value_dim * state_bytes));
    std::vector<float> sinks(static_cast<std::size_t>(a.heads));
    for (float& sink : sinks) sink = real(-3, 3);
    std::vector<float> sums(static_cast<std::size_t>(sequences * a.heads * a.splits * (2 + a.value_dim)), NAN);
    const int rows = rows_choices[between(0, 2)], runs = a.kv_heads * ((group + rows - 1) / rows);
    std::vector<u32> arrived(static_cast<std::size_t>(runs * sequences), 0);
    a.queries = queries.data;
    const bool are_stored = between(0, 3) == 0;
    a.keys = are_stored ? nullptr : keys.data;
    a.values = are_stored ? nullptr : values.data;
    a.out = out.data;
    a.held = held.data();
    a.table = table.data();
    a.sinks = between(0, 1) ? sinks.data() : nullptr;
    a.parts = sums.data();
    a.arrived = arrived.data();
    const int widest = std::max(a.key_dim, a.value_dim), width = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
    const emulated::Index grid{static_cast<unsigned int>(a.splits), static_cast<unsigned int>(runs), static_cast<unsigned int>(sequences)};
    require(emulate_attention(kind.name, width, rows, grid, numbers(), a), "no such kernel of attention");
    for (const u32 count : arrived) require(count == 0, "a counter of attention is not left at zero");

    for (int sequence = 0; sequence < sequences; sequence++) {
        const int before = static_cast<int>(held[static_cast<std::size_t>(sequence)]);
        const int seen = before + 1, oldest = a.window ? std::max(0, seen - a.window) : 0;
        const auto row_of_part = [&](int part, int token, int head) {
            const i64* entries = table.data() + sequence * a.table_step + part * a.part_step;
            return reinterpret_cast<const u8*>(entries[1 + token / PAGE]) + head * entries[0] + token % PAGE * row_bytes[part];
        };
        const auto scale_of = [&](int part, int token, int head) { return is_coded ? *reinterpret_cast<const float*>(row_of_part(2 + part, token, head)) : 1.0f; };
        for (int head = 0; head < a.heads; head++) {
            const int of = head / group;
            for (int part = 0; part < 2 && !are_stored; part++) {  // what was stored
                const int size = part ? a.value_dim : a.key_dim;
                const u8* own = part ? a.values : a.keys;
                double largest = 0;
                const i64 from = static_cast<i64>(sequence * a.kv_heads + of) * size;
                for (int i = 0; i < size; i++) largest = std::max<double>(largest, std::fabs(state_at(own, a.states, from + i)));
                for (int i = 0; i < size; i++) {
                    const double wanted = state_at(own, a.states, from + i), found = kv_value(kind, row_of_part(part, before, of), i, scale_of(part, before, of));
                    require(std::fabs(found - wanted) <= kind.step * (is_coded ? largest : std::fabs(wanted)) + 1e-7, "a state is stored wrongly");
                }
            }
            std::vector<double> shares;
            double largest = a.sinks ? a.sinks[head] : -1e300, total = 0;
            const auto is_seen = [&](int token) { return token < a.kept || token >= oldest; };
            for (int token = 0; token < seen; token++) {
                shares.push_back(-1e300);
                if (!is_seen(token)) continue;
                double score = 0;
                for (int i = 0; i < a.key_dim; i++) {
                    score += static_cast<double>(state_at(a.queries, a.states, static_cast<i64>(sequence * a.heads + head) * a.key_dim + i)) * a.scale *
                             kv_value(kind, row_of_part(0, token, of), i, scale_of(0, token, of));
                }
                if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
                shares.back() = score;
                largest = std::max(largest, score);
            }
            for (double& share : shares) total += share = std::exp(share - largest);
            if (a.sinks) total += std::exp(a.sinks[head] - largest);
            for (int i = 0; i < a.value_dim; i++) {
                double wanted = 0, size = 0;
                for (int token = 0; token < seen; token++) {
                    if (!is_seen(token)) continue;
                    const double value = kv_value(kind, row_of_part(1, token, of), i, scale_of(1, token, of));
                    wanted += shares[static_cast<std::size_t>(token)] / total * value;
                    size += shares[static_cast<std::size_t>(token)] / total * std::fabs(value);
                }
                const double found = state_at(a.out, a.states, static_cast<i64>(sequence * a.heads + head) * a.value_dim + i);
                const double rounding = a.states == 0 ? 1.0 / 256 : a.states == 1 ? 1.0 / 2048 : 1e-6;
                if (!(std::fabs(found - wanted) <= rounding * std::fabs(wanted) + 1e-4 * size + 1e-6)) {
                    std::fprintf(stderr, "%s, %d heads of %d and %d, %d held, window %d, %d parts, %d at once: %g, not %g\n", kind.name, a.heads, a.key_dim, a.value_dim, before,
                                 a.window, a.splits, rows, found, wanted);
                    std::exit(1);
                }
            }
        }
    }
}
