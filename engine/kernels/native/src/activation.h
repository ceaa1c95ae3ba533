// The activation between an expert's first matrix and its second.
#pragma once
#include <cmath>

#include "kernel_set.h"
#include "switchyard_kernels.h"

// Rounds where torch's operators would if the weights are bf16, and not at all if they are quantised.
struct Rounding {
    bool bf16;
    float operator()(float value) const { return bf16 ? round_bf16(value) : value; }
};

inline float activate(int32_t kind, float x, const Rounding &round) {
    switch (kind) {
        case 0: return round(x / (1.0f + std::exp(-x)));
        case 1: return round(x * 0.5f * (1.0f + std::erf(x * 0.70710678f)));
        case 2: return round(0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))));
        case 3: return x < 0 ? 0.0f : x;
        default: {
            const float positive = x < 0 ? 0.0f : x;
            return round(positive * positive);
        }
    }
}

// `up` is ignored if experts have no gate.  NaNs pass the clamps unchanged.
inline float gated(const SwitchyardExperts &experts, float gate, float up, const Rounding &round) {
    if (experts.pairing == SWITCHYARD_PLAIN) return activate(experts.activation, gate, round);
    if (gate > experts.limit) gate = experts.limit;
    if (up > experts.limit) up = experts.limit;
    if (up < -experts.limit) up = -experts.limit;
    if (experts.activation == 5) {
        const float sigmoid = round(1.0f / (1.0f + std::exp(-round(gate * experts.alpha))));
        return round(round(up + 1.0f) * round(gate * sigmoid));
    }
    return round(activate(experts.activation, gate, round) * up);
}
