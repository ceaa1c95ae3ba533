// Norms of queries and keys and their rotation (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position
// Embedding") in one launch: a warp for each head of each token.
#include "states.h"

// Steps are in elements.
struct HeadsOf {
    const u8* x;        // [rows, heads, dim], steps apart
    u8* out;            // [rows, heads, dim]
    const u8* weights;  // [dim] of their norm, or [heads, dim] if it is over all heads; null: none
    i64 row_step, head_step;
    int heads;
};

struct RotaryArguments {
    HeadsOf queries, keys;
    const u8* cosines;  // of row r from r * angle_row_step on: that of pair p is p * angle_step further
    const u8* sines;
    i64 angle_row_step;
    int dim, rotated;      // elements of a head, and how many of them, the first, are rotated
    int angle_step;
    int is_interleaved;    // pairs are neighbours; else they are half of `rotated` apart
    int rounds_once;       // whether a rotated element is rounded only in the end, not each product, too
    int norms_all_heads;   // whether norms are over all heads together
    int norm_rounds_once;  // as in norm.cu
    int states, weight_states, angle_states;
    float epsilon, offset;  // of the norms
};

template <class State>
__device__ __forceinline__ float rounded_if(bool is_rounded, float value) { return is_rounded ? State::of(value).value() : value; }

template <class State>
__device__ __forceinline__ void rotate_head(const RotaryArguments& a, const HeadsOf& of, int head) {
    const i64 row = static_cast<i64>(blockIdx.y);
    const State* of_row = reinterpret_cast<const State*>(of.x) + row * of.row_step;
    const State* x = of_row + head * of.head_step;
    State* out = reinterpret_cast<State*>(of.out) + (row * of.heads + head) * a.dim;
    float factor = 1;
    if (of.weights != nullptr) {
        float sum = 0;
        const int first = a.norms_all_heads ? 0 : head, end = a.norms_all_heads ? of.heads : head + 1;
        for (int each = first; each < end; each++) {
            for (int i = lane_number(); i < a.dim; i += LANES) {
                const float value = of_row[each * of.head_step + i].value();
                sum += value * value;
            }
        }
        sum = sum_over_lanes<1, LANES / 2>(sum);
        factor = rsqrtf(sum / static_cast<float>((end - first) * a.dim) + a.epsilon);
    }
    const int weight_at = a.norms_all_heads ? head * a.dim : 0;
    const auto normed = [&](int i) {
        const float value = x[i].value();
        if (of.weights == nullptr) return value;
        const float weight = state_at(of.weights, a.weight_states, weight_at + i) + a.offset;
        return State::of(weight * rounded_if<State>(!a.norm_rounds_once, value * factor)).value();
    };
    const int half = a.rotated / 2;
    for (int pair = lane_number(); pair < half; pair += LANES) {
        const int first = a.is_interleaved ? 2 * pair : pair, second = a.is_interleaved ? first + 1 : first + half;
        const i64 angle = row * a.angle_row_step + static_cast<i64>(pair) * a.angle_step;
        const float cosine = state_at(a.cosines, a.angle_states, angle), sine = state_at(a.sines, a.angle_states, angle);
        const float one = normed(first), other = normed(second);
        const bool is_rounded = !a.rounds_once;
        out[first] = State::of(rounded_if<State>(is_rounded, one * cosine) - rounded_if<State>(is_rounded, other * sine));
        out[second] = State::of(rounded_if<State>(is_rounded, other * cosine) + rounded_if<State>(is_rounded, one * sine));
    }
    for (int i = a.rotated + lane_number(); i < a.dim; i += LANES) out[i] = State::of(normed(i));
}

// Grid: heads of queries and then of keys, WARPS at a time; rows.
__device__ __forceinline__ void rotate(const RotaryArguments& a) {
    const int number = static_cast<int>(blockIdx.x) * WARPS + warp_number();
    if (number >= a.queries.heads + a.keys.heads) return;
    const bool is_query = number < a.queries.heads;
    const HeadsOf& of = is_query ? a.queries : a.keys;
    const int head = is_query ? number : number - a.queries.heads;
    if (a.states == 0) rotate_head<Bf16>(a, of, head);
    else if (a.states == 1) rotate_head<Fp16>(a, of, head);
    else rotate_head<Fp32>(a, of, head);
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, 4) rotary_kernel(const RotaryArguments arguments) { rotate(arguments); }
#endif
