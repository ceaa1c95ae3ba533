// Cosines and sines of random positions, of exactly their sizes, against the library's.
#pragma once
#include <cmath>

#include "cases.h"

inline void go_through_angles() {
    AngleArguments a{};
    const int rows = between(1, 8);
    a.pairs = between(1, 200);
    a.times = between(1, 2);
    a.step = between(1, 2);
    a.states = between(0, 2);
    a.scale = real(0.5f, 1.5f);
    std::vector<i64> positions;
    std::vector<float> frequencies;
    for (int i = 0; i < rows; i++) positions.push_back(between(0, 3) ? between(0, 200000) : 0);
    for (int i = 0; i < a.pairs; i++) frequencies.push_back(real(0, 1));
    const int width = a.times * a.pairs, bytes = a.states == 2 ? 4 : 2;
    const Exact both(static_cast<std::size_t>(2 * rows * width * bytes));
    a.positions = positions.data();
    a.frequencies = frequencies.data();
    a.cosines = both.data;
    a.sines = both.data + (a.step == 2 ? 1 : rows * width) * bytes;
    emulate_angles(emulated::Index{static_cast<unsigned int>(rows), 1, 1}, numbers(), a);
    const double rounding = a.states == 0 ? 1.0 / 256 : a.states == 1 ? 1.0 / 2048 : 1e-6;
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < width; i++) {
            const double angle = static_cast<float>(positions[static_cast<std::size_t>(row)]) * frequencies[static_cast<std::size_t>(i % a.pairs)];
            const i64 at = static_cast<i64>(row * width + i) * a.step;
            require(std::fabs(state_at(a.cosines, a.states, at) - a.scale * std::cos(angle)) <= rounding * a.scale + 1e-6, "a cosine is wrong");
            require(std::fabs(state_at(a.sines, a.states, at) - a.scale * std::sin(angle)) <= rounding * a.scale + 1e-6, "a sine is wrong");
        }
    }
}
