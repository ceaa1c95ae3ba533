// Rotations of random heads, of exactly their sizes, against plain loops.
#pragma once
#include <cmath>

#include "cases.h"

struct RandomHeads {
    Exact x, out, weights;
    HeadsOf of{};

    RandomHeads(const RotaryArguments& a, int rows, int heads, bool has_norm)
        : x(static_cast<std::size_t>(held(rows, heads, a.dim) * bytes(a.states))),
          out(static_cast<std::size_t>(rows * heads * a.dim * bytes(a.states))),
          weights(static_cast<std::size_t>(has_norm ? (a.norms_all_heads ? heads : 1) * a.dim * bytes(a.weight_states) : 0)) {
        of.x = x.data;
        of.out = out.data;
        of.weights = has_norm ? weights.data : nullptr;
        of.head_step = a.dim;
        of.row_step = heads * a.dim + 3;
        of.heads = heads;
        for (int i = 0; i < held(rows, heads, a.dim); i++) set_state(x.data, a.states, i, real(-3, 3));
        for (int i = 0; has_norm && i < (a.norms_all_heads ? heads : 1) * a.dim; i++) set_state(weights.data, a.weight_states, i, real(-2, 2));
    }
    static int bytes(int type) { return type == 2 ? 4 : 2; }
    static int held(int rows, int heads, int dim) { return (rows - 1) * (heads * dim + 3) + heads * dim; }

    void check(const RotaryArguments& a, int rows) const {
        const double rounding = a.states == 0 ? 1.0 / 40 : a.states == 1 ? 1.0 / 300 : 1e-5;
        for (int row = 0; row < rows; row++) {
            for (int head = 0; head < of.heads; head++) {
                std::vector<double> normed;
                double sum = 0;
                const int count = a.norms_all_heads ? of.heads * a.dim : a.dim, from = a.norms_all_heads ? 0 : head * a.dim;
                for (int i = 0; i < count; i++) sum += std::pow(static_cast<double>(state_at(of.x, a.states, row * of.row_step + from + i)), 2);
                double largest = 0;
                for (int i = 0; i < a.dim; i++) {
                    double value = state_at(of.x, a.states, row * of.row_step + head * a.dim + i);
                    if (of.weights != nullptr) {
                        value *= (state_at(of.weights, a.weight_states, (a.norms_all_heads ? head * a.dim : 0) + i) + a.offset) / std::sqrt(sum / count + a.epsilon);
                    }
                    normed.push_back(value);
                    largest = std::fmax(largest, std::fabs(value));
                }
                const auto element = [&](int i) { return normed[static_cast<std::size_t>(i)]; };
                for (int i = 0; i < a.dim; i++) {
                    double wanted = element(i);
                    if (i < a.rotated) {
                        const int pair = a.is_interleaved ? i / 2 : i % (a.rotated / 2);
                        const bool is_first = a.is_interleaved ? i % 2 == 0 : i < a.rotated / 2;
                        const int other = a.is_interleaved ? i ^ 1 : is_first ? i + a.rotated / 2 : i - a.rotated / 2;
                        const i64 angle = row * a.angle_row_step + pair * a.angle_step;
                        const double cosine = state_at(a.cosines, a.angle_states, angle), sine = state_at(a.sines, a.angle_states, angle);
                        wanted = element(i) * cosine + (is_first ? -1 : 1) * element(other) * sine;
                    }
                    const double found = state_at(of.out, a.states, (static_cast<i64>(row) * of.heads + head) * a.dim + i);
                    require(std::fabs(found - wanted) <= rounding * largest + 1e-6, "a rotation is wrong");
                }
            }
        }
    }
};

inline void go_through_rotary() {
    RotaryArguments a{};
    const int rows = between(1, 8), heads = between(1, 9), kv_heads = between(1, 5);
    const bool has_norm = between(0, 2) != 0, is_same_for_all = between(0, 3) == 0;
    a.dim = between(1, 150);
    a.rotated = 2 * between(0, a.dim / 2);
    a.is_interleaved = between(0, 1);
    a.angle_step = between(1, 2);
    a.rounds_once = between(0, 1);
    a.norms_all_heads = between(0, 1);
    a.norm_rounds_once = between(0, 1);
    a.states = between(0, 2);
    a.weight_states = between(0, 2);
    a.angle_states = between(0, 2);
    a.epsilon = 1e-5f;
    a.offset = static_cast<float>(between(0, 1));
    const int angles = a.rotated / 2 * a.angle_step;
    a.angle_row_step = is_same_for_all ? 0 : angles;
    const int held = is_same_for_all ? angles : rows * angles;
    const Exact cosines(static_cast<std::size_t>(held * RandomHeads::bytes(a.angle_states))), sines(static_cast<std::size_t>(held * RandomHeads::bytes(a.angle_states)));
    for (int i = 0; i < held; i++) {
        set_state(cosines.data, a.angle_states, i, real(-1, 1));
        set_state(sines.data, a.angle_states, i, real(-1, 1));
    }
    a.cosines = cosines.data;
    a.sines = sines.data;
    const RandomHeads queries(a, rows, heads, has_norm), keys(a, rows, kv_heads, has_norm);
    a.queries = queries.of;
    a.keys = keys.of;
    const emulated::Index grid{static_cast<unsigned int>((heads + kv_heads + WARPS - 1) / WARPS), static_cast<unsigned int>(rows), 1};
    emulate_rotary(grid, numbers(), a);
    queries.check(a, rows);
    keys.check(a, rows);
}
