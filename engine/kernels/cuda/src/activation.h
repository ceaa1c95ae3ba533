// Activations between an expert's two matrices; `engine/kernels/interface.py` defines and numbers them.
#pragma once
#include "card.h"

struct Activation {
    int kind;       // -1: none
    int has_limit;  // whether `limit` clamps
    float limit;
    float alpha;
};

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// act(gate) * up, or act(gate) where there is no gate.  Comparisons, as minimum and maximum would lose a NaN.
static __device__ __forceinline__ float activate(const Activation& how, float gate, float up, bool is_gated) {
    if (how.kind < 0) return gate;
    if (how.has_limit) {
        gate = gate > how.limit ? how.limit : gate;
        up = up > how.limit ? how.limit : up;
        up = up < -how.limit ? -how.limit : up;
    }
    float result;
    switch (how.kind) {
        case 0: result = gate * sigmoid(gate); break;
        case 1: result = 0.5f * gate * (1.0f + erff(gate * 0.70710678f)); break;
        case 2: result = gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)); break;
        case 3: result = gate < 0 ? 0 : gate; break;
        case 4: result = gate < 0 ? 0 : gate * gate; break;
        default:
            result = gate * sigmoid(how.alpha * gate);
            up += 1.0f;
    }
    return is_gated ? result * up : result;
}
