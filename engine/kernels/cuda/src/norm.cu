// Root mean square norms (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"): a block of threads for each row.
#include "states.h"

// As `NormArguments` in norm.py.
struct NormArguments {
    const u8* x;        // [rows, width], `step` elements apart
    u8* out;            // [rows, width]
    const u8* weights;  // [width]
    i64 step;
    int width;
    int states, weight_states;  // types: see `state_at`
    int rounds_once;            // whether weights multiply before rounding, not after
    float epsilon, offset;      // offset: added to weights
};

__device__ __forceinline__ float rounded_state(int type, float value) {
    return type == 0 ? Bf16::of(value).value() : type == 1 ? Fp16::of(value).value() : value;
}

__device__ __forceinline__ void norm(const NormArguments& a) {
    __shared__ float of_warps[WARPS];
    const i64 from = static_cast<i64>(blockIdx.x) * a.step, to = static_cast<i64>(blockIdx.x) * a.width;
    float sum = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        const float value = state_at(a.x, a.states, from + i);
        sum += value * value;
    }
    sum = sum_over_lanes<1, LANES / 2>(sum);
    if (lane_number() == 0) of_warps[warp_number()] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += of_warps[warp];
    const float factor = rsqrtf(sum / static_cast<float>(a.width) + a.epsilon);
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        const float value = state_at(a.x, a.states, from + i) * factor, weight = state_at(a.weights, a.weight_states, i) + a.offset;
        set_state(a.out, a.states, to + i, weight * (a.rounds_once ? value : rounded_state(a.states, value)));
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) norm_kernel(const NormArguments arguments) { norm(arguments); }
#endif
