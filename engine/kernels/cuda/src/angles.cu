// Cosines and sines of tokens' positions (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
// section 3.2.2), once for all layers of a step.
#include "states.h"

struct AngleArguments {
    const i64* positions;      // [rows]
    const float* frequencies;  // [pairs]
    u8* cosines;               // [rows, times, pairs] <- of `states`, `step` elements from one to the next
    u8* sines;
    int pairs, times, step, states;
    float scale;  // of both
};

// Grid: rows.
__device__ __forceinline__ void find_angles(const AngleArguments& a) {
    const i64 row = static_cast<i64>(blockIdx.x);
    const float position = static_cast<float>(a.positions[row]);
    for (int pair = threadIdx.x; pair < a.pairs; pair += THREADS) {
        const float angle = position * a.frequencies[pair], cosine = cosf(angle) * a.scale, sine = sinf(angle) * a.scale;
        for (int time = 0; time < a.times; time++) {
            const i64 at = ((row * a.times + time) * a.pairs + pair) * a.step;
            set_state(a.cosines, a.states, at, cosine);
            set_state(a.sines, a.states, at, sine);
        }
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) angles_kernel(const AngleArguments arguments) { find_angles(arguments); }
#endif
