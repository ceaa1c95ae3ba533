// Norms of rows of any width, of exactly their sizes, against plain loops.
#pragma once
#include <cmath>

#include "cases.h"

inline void go_through_norm() {
    NormArguments a{};
    const int rows = between(1, 8);
    a.width = between(1, 700);
    a.step = a.width + between(0, 9);
    a.states = between(0, 2);
    a.weight_states = between(0, 2);
    a.rounds_once = between(0, 1);
    a.epsilon = 1e-5f;
    a.offset = static_cast<float>(between(0, 1));
    a.added_scale = between(0, 1) ? 1 : real(0.1f, 2);
    const auto bytes = [](int type) { return type == 2 ? 4 : 2; };
    const int held = static_cast<int>(a.step) * (rows - 1) + a.width;
    const Exact x(static_cast<std::size_t>(held * bytes(a.states))), weights(static_cast<std::size_t>(a.width * bytes(a.weight_states)));
    const Exact out(static_cast<std::size_t>(rows * a.width * bytes(a.states)));
    for (int i = 0; i < held; i++) set_state(x.data, a.states, i, real(-3, 3));
    for (int i = 0; i < a.width; i++) set_state(weights.data, a.weight_states, i, real(-2, 2));
    a.x = x.data;
    a.weights = between(0, 3) ? weights.data : nullptr;
    a.out = out.data;
    const bool has_more = between(0, 1) == 1;
    const std::size_t whole = static_cast<std::size_t>(has_more ? rows * a.width * bytes(a.states) : 0);
    const Exact added(whole), sum(whole);
    for (int i = 0; has_more && i < rows * a.width; i++) set_state(added.data, a.states, i, real(-3, 3));
    a.added = has_more ? added.data : nullptr;
    a.sum = has_more ? sum.data : nullptr;
    emulate_norm(emulated::Index{static_cast<unsigned int>(rows), 1, 1}, numbers(), a);
    const double rounding = a.states == 0 ? 1.0 / 128 : a.states == 1 ? 1.0 / 1024 : 1e-5;
    for (int row = 0; row < rows; row++) {
        const auto given = [&](int i) -> double {
            const float own = state_at(a.x, a.states, row * a.step + i);
            if (!has_more) return own;
            const i64 at = static_cast<i64>(row) * a.width + i;
            const float more = state_at(a.added, a.states, at) * a.added_scale, meant = own + more, found_sum = state_at(a.sum, a.states, at);
            const float rounding = a.states == 2 ? (a.added_scale == 1 ? 0.0f : 1e-6f) : 1.0f / 256;
            require(std::fabs(found_sum - meant) <= rounding * (std::fabs(meant) + (a.added_scale == 1 ? 0 : std::fabs(more))), "a sum is wrong");
            return found_sum;
        };
        double total = 0;
        for (int i = 0; i < a.width; i++) total += std::pow(given(i), 2);
        for (int i = 0; i < a.width; i++) {
            const double weight = a.weights ? state_at(a.weights, a.weight_states, i) + a.offset : 1;
            const double wanted = given(i) / std::sqrt(total / a.width + a.epsilon) * weight;
            const double found = state_at(a.out, a.states, static_cast<i64>(row) * a.width + i);
            require(std::fabs(found - wanted) <= rounding * std::fabs(wanted) + 1e-6, "a norm is wrong");
        }
    }
}
