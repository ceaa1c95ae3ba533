// Routers over random weights, of exactly their sizes, against plain loops.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cases.h"

// The first k of `order` become the largest of `values`, the earlier of equals first.
inline std::vector<int> best_first(const std::vector<float>& values, int k) {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)]; });
    order.resize(static_cast<std::size_t>(k));
    return order;
}

// SparseMixer's choice, in numbers of the type of x.
inline void check_mixed(const RouterArguments& a, int row) {
    const std::vector<float> logits(a.logits + static_cast<i64>(row) * a.experts, a.logits + static_cast<i64>(row + 1) * a.experts);
    const std::vector<int> wanted = best_first(logits, a.per_token);
    for (int place = 0; place < a.per_token; place++) {
        const auto of = [&](int at) { return logits[static_cast<std::size_t>(wanted[static_cast<std::size_t>(at)])]; };
        double total = 0;
        for (int expert = 0; expert < a.experts; expert++) {
            const float logit = logits[static_cast<std::size_t>(expert)], best = of(place), less = rounded_to(a.states, rounded_to(a.states, best - logit) / std::fmax(std::fabs(logit), best));
            const bool is_taken = std::find(wanted.begin(), wanted.begin() + place, expert) != wanted.begin() + place;
            if (!is_taken && !(less > rounded_to(a.states, a.slack))) total += std::exp(static_cast<double>(logit) - best);
        }
        require(a.chosen[static_cast<i64>(row) * a.per_token + place] == wanted[static_cast<std::size_t>(place)], "an expert is not mixed in its turn");
        const double rounding = a.rounds_shares && a.states != 2 ? (a.states == 0 ? 1.0 / 256 : 1.0 / 2048) : 0;
        require(std::fabs(a.shares[static_cast<i64>(row) * a.per_token + place] - 1 / total) <= (rounding + 1e-4) / total, "a mixed share is wrong");
    }
}

inline void check_routed(const RouterArguments& a, int row) {
    const auto at = [](auto& values, int i) -> auto& { return values[static_cast<std::size_t>(i)]; };
    std::vector<float> logits(a.logits + static_cast<i64>(row) * a.experts, a.logits + static_cast<i64>(row + 1) * a.experts), scores;
    for (int expert = 0; expert < a.experts; expert++) {
        double wanted = a.bias == nullptr ? 0 : state_at(a.bias, a.weight_states, expert), size = std::fabs(wanted);
        for (int i = 0; i < a.columns; i++) {
            const double product = static_cast<double>(state_at(a.x, a.states, static_cast<i64>(row) * a.columns + i)) * state_at(a.weights, a.weight_states, static_cast<i64>(expert) * a.columns + i);
            wanted += product;
            size += std::fabs(product);
        }
        const double rounding = a.rounds_logits && a.states != 2 ? (a.states == 0 ? 1.0 / 256 : 1.0 / 2048) : 0;
        require(std::fabs(at(logits, expert) - wanted) <= rounding * std::fabs(wanted) + 1e-5 * size + 1e-6, "a logit is wrong");
    }
    const float largest = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit) - largest);
    for (const float logit : logits) {
        scores.push_back(static_cast<float>(a.is_sigmoid ? 1 / (1 + std::exp(-static_cast<double>(logit))) : std::exp(static_cast<double>(logit) - largest) / total));
    }
    std::vector<float> preference = scores, of_groups;
    for (int expert = 0; expert < a.experts && a.correction != nullptr; expert++) at(preference, expert) += a.correction[expert];
    const int size = a.experts / a.groups;
    for (int group = 0; group < a.groups; group++) {
        std::vector<float> own(preference.begin() + group * size, preference.begin() + (group + 1) * size);
        std::sort(own.begin(), own.end(), std::greater<float>());
        of_groups.push_back(a.is_sigmoid ? own[0] + (size > 1 ? own[1] : -std::numeric_limits<float>::infinity()) : own[0]);
    }
    std::vector<bool> is_open(static_cast<std::size_t>(a.experts), a.kept_groups == a.groups);
    for (const int group : best_first(of_groups, a.kept_groups))
        for (int i = 0; i < size; i++) is_open[static_cast<std::size_t>(group * size + i)] = true;
    for (int expert = 0; expert < a.experts; expert++)
        if (!is_open[static_cast<std::size_t>(expert)]) at(preference, expert) = -std::numeric_limits<float>::infinity();
    const std::vector<int> wanted = best_first(preference, a.per_token);
    double kept = 0;
    std::vector<i64> found(a.chosen + static_cast<i64>(row) * a.per_token, a.chosen + static_cast<i64>(row + 1) * a.per_token);
    for (const i64 expert : found) {
        require(expert >= 0 && expert < a.experts, "an expert that there is none of");
        kept += at(scores, static_cast<int>(expert));
    }
    for (int i = 0; i < a.per_token; i++) {
        const int expert = static_cast<int>(at(found, i));
        // exp is not the same to the last bit: near equals may change places, and groups of them.
        const float difference = at(preference, expert) - at(preference, at(wanted, i));
        require(std::fabs(difference) <= 1e-5f || a.kept_groups < a.groups || expert == at(wanted, i), "another expert is better");
        require(std::count(found.begin(), found.end(), found[static_cast<std::size_t>(i)]) == 1, "an expert is chosen twice");
        double share = at(scores, expert);
        if (a.normalises) share /= kept + (a.is_sigmoid ? 1e-20 : 0);
        share *= a.scale;
        const double rounding = a.rounds_shares && a.states != 2 ? (a.states == 0 ? 1.0 / 256 : 1.0 / 2048) : 0;
        require(std::fabs(a.shares[static_cast<i64>(row) * a.per_token + i] - share) <= (rounding + 1e-4) * share + 1e-6, "a share is wrong");
    }
}

inline void go_through_router(bool is_small) {
    static const char* const NAMES[] = {"Bf16", "Fp16", "Fp32"};
    RouterArguments a{};
    a.rows = between(1, is_small ? 3 : 17);
    a.columns = between(0, 1) ? between(1, is_small ? 60 : 300) : 8 * between(1, is_small ? 8 : 40);
    const int group_size = between(1, is_small ? 5 : 40);
    a.groups = between(1, is_small ? 3 : 12);
    a.experts = a.groups * group_size;
    a.kept_groups = between(1, a.groups);
    a.per_token = between(1, std::min(32, a.kept_groups * group_size));
    a.states = between(0, 2);
    a.weight_states = between(0, 1) ? a.states : 2;
    a.is_sigmoid = between(0, 1);
    a.rounds_logits = between(0, 1);
    a.normalises = between(0, 1);
    a.rounds_shares = between(0, 1);
    a.scale = real(0.5f, 3);
    a.slack = between(0, 3) ? 0 : real(0.01f, 1);
    const auto bytes = [](int type) { return type == 2 ? 4 : 2; };
    const auto filled = [&](int type, int count, float most) {
        Exact made(static_cast<std::size_t>(count * bytes(type)));
        for (int i = 0; i < count; i++) set_state(made.data, type, i, real(-most, most));
        return made;
    };
    const Exact x = filled(a.states, a.rows * a.columns, 2), weights = filled(a.weight_states, a.experts * a.columns, 0.3f);
    const Exact bias = filled(a.weight_states, a.experts, 1), correction = filled(2, a.experts, 0.5f);
    const Exact logits = filled(2, a.rows * a.experts, 0), shares = filled(2, a.rows * a.per_token, 0);
    std::vector<i64> chosen(static_cast<std::size_t>(a.rows * a.per_token), -7);
    const int runs = (a.rows + ROUTED_ROWS - 1) / ROUTED_ROWS;
    std::vector<u32> arrived(static_cast<std::size_t>(runs), 0);
    // Equal experts: the earlier comes first.
    const i64 row_bytes = static_cast<i64>(a.columns) * bytes(a.weight_states);
    for (int expert = 1; expert < a.experts && between(0, 3) == 0; expert++) std::memcpy(weights.data + expert * row_bytes, weights.data, static_cast<std::size_t>(row_bytes));
    a.x = x.data;
    a.weights = weights.data;
    a.bias = between(0, 1) ? bias.data : nullptr;
    a.correction = between(0, 1) ? reinterpret_cast<float*>(correction.data) : nullptr;
    a.logits = reinterpret_cast<float*>(logits.data);
    a.shares = reinterpret_cast<float*>(shares.data);
    a.chosen = chosen.data();
    a.arrived = arrived.data();
    const emulated::Index grid{static_cast<unsigned int>((a.experts + WARPS - 1) / WARPS), static_cast<unsigned int>(runs), 1};
    require(emulate_router(NAMES[a.states], NAMES[a.weight_states], grid, numbers(), a), "no such kernel");
    for (const u32 count : arrived) require(count == 0, "a counter is not left at zero");
    for (int row = 0; row < a.rows; row++) {
        if (a.slack > 0) check_mixed(a, row);
        else check_routed(a, row);
    }
}
