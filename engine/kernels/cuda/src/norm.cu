// Root mean square norms (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"): a block of threads for each row.
// A residual sum before the norm is computed on the way.
#include "states.h"

struct NormArguments {
    const u8* x;        // [rows, width], `step` elements apart
    const u8* added;    // [rows, width]: added to x first; or null
    u8* sum;            // [rows, width] <- both, if there is something to add
    u8* out;            // [rows, width]
    const u8* weights;  // [width]; null: all are 1
    i64 step;
    int width;
    int states, weight_states;  // types: see `state_at`
    int rounds_once;            // whether weights multiply before rounding, not after
    float epsilon, offset;      // offset: added to weights
    float added_scale;          // of what is added, which is rounded then, too
};

template <class State>
__device__ __forceinline__ void norm_of(const NormArguments& a) {
    const i64 row = static_cast<i64>(blockIdx.x), to = row * a.width;
    const State* x = reinterpret_cast<const State*>(a.x) + row * a.step;
    State* out = reinterpret_cast<State*>(a.out) + to;
    float total = 0;
    if (a.added != nullptr) {
        const State* added = reinterpret_cast<const State*>(a.added) + to;
        State* sum = reinterpret_cast<State*>(a.sum) + to;
#pragma unroll 4
        for (int i = threadIdx.x; i < a.width; i += THREADS) {
            const State scaled = a.added_scale == 1 ? added[i] : State::of(added[i].value() * a.added_scale);
            const State both = State::of(x[i].value() + scaled.value());
            sum[i] = both;
            total += both.value() * both.value();
        }
        x = sum;  // a thread reads what it wrote itself
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < a.width; i += THREADS) total += x[i].value() * x[i].value();
    }
    const float factor = rsqrtf(sum_over_block(total) / static_cast<float>(a.width) + a.epsilon);
#pragma unroll 4
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        const float value = x[i].value() * factor;
        const float weight = a.weights != nullptr ? state_at(a.weights, a.weight_states, i) + a.offset : 1.0f;
        out[i] = State::of(weight * (a.rounds_once ? value : State::of(value).value()));
    }
}

__device__ __forceinline__ void norm(const NormArguments& a) {
    if (a.states == 0) norm_of<Bf16>(a);
    else if (a.states == 1) norm_of<Fp16>(a);
    else norm_of<Fp32>(a);
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) norm_kernel(const NormArguments arguments) { norm(arguments); }
#endif
