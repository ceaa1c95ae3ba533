// A router: the logits of all experts, their scores, and the best of them, in one launch.
//
// A warp multiplies the rows of x with the weights of one expert; the block that ends last chooses, a warp for each row.
// Equal scores: the earlier expert, or group of experts, comes first.
#include "states.h"

constexpr int MOST_EXPERTS = 512, ROUTED_ROWS = 8;
constexpr int OF_LANE = MOST_EXPERTS / LANES;

struct RouterArguments {
    const u8* x;              // [rows, columns], of `states`
    const u8* weights;        // [experts, columns], of `weight_states`
    const u8* bias;           // [experts] of `weight_states`, added to logits; or null
    const float* correction;  // [experts], added to scores for the choice alone; or null
    float* logits;            // [rows, experts] <-
    i64* chosen;              // [rows, per_token] <- experts, the best first
    float* shares;            // [rows, per_token] <- their weights
    u32* arrived;             // counters of launches' blocks, by runs of ROUTED_ROWS rows; 0 before and after
    int rows, columns, experts, per_token;
    int groups, kept_groups;  // experts are chosen among those of the best groups
    int states, weight_states;
    int is_sigmoid;      // scores: sigmoid, else softmax of logits
    int rounds_logits;   // whether logits are rounded to the type of x
    int normalises;      // whether shares are made to sum to 1
    int rounds_shares;   // whether shares are rounded to the type of x
    float scale;         // of shares
    float slack;         // above 0: experts one after the other, with shares among those with logits this near, see `mix`
};

template <class T>
struct EightOf {  // elements, read together where they lie so
    float values[8];
    __device__ __forceinline__ EightOf(const T* from, int count, bool is_aligned) {
        constexpr int PER_READ = 16 / static_cast<int>(sizeof(T));
        union { uint4 bits; T elements[PER_READ]; } read;
        if (is_aligned && count >= 8) {
#pragma unroll
            for (int begin = 0; begin < 8; begin += PER_READ) {
                read.bits = *reinterpret_cast<const uint4*>(from + begin);
#pragma unroll
                for (int i = 0; i < PER_READ; i++) values[begin + i] = read.elements[i].value();
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) values[i] = i < count ? from[i].value() : 0.0f;
        }
    }
};

// The logits of one expert for up to ROUTED_ROWS rows.  By one warp.
template <class State, class Weight>
__device__ __forceinline__ void find_logits(const RouterArguments& a, int expert, int first_row, int count) {
    const Weight* weights = reinterpret_cast<const Weight*>(a.weights) + static_cast<i64>(expert) * a.columns;
    const State* x = reinterpret_cast<const State*>(a.x) + static_cast<i64>(first_row) * a.columns;
    const bool is_aligned = a.columns % 8 == 0;
    float sums[ROUTED_ROWS] = {};
#pragma unroll 2
    for (int column = lane_number() * 8; column < a.columns; column += LANES * 8) {
        const EightOf<Weight> w(weights + column, a.columns - column, is_aligned);
#pragma unroll
        for (int row = 0; row < ROUTED_ROWS; row++) {
            if (row >= count) continue;
            const EightOf<State> of_row(x + static_cast<i64>(row) * a.columns + column, a.columns - column, is_aligned);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[row] += w.values[i] * of_row.values[i];
        }
    }
    const float bias = a.bias != nullptr ? reinterpret_cast<const Weight*>(a.bias)[expert].value() : 0.0f;
#pragma unroll
    for (int row = 0; row < ROUTED_ROWS; row++) {
        if (row >= count) continue;
        float logit = sum_over_lanes<1, LANES / 2>(sums[row]) + bias;
        if (a.rounds_logits) logit = State::of(logit).value();
        if (lane_number() == 0) a.logits[static_cast<i64>(first_row + row) * a.experts + expert] = logit;
    }
}

// Whether one comes before another: what is no number first, as in PyTorch, and of equals the earlier.
__device__ __forceinline__ bool comes_before(float value, int at, float other, int other_at) {
    const bool is_number = value == value, other_is = other == other;
    if (is_number && other_is && value != other) return value > other;
    if (is_number != other_is) return other_is;
    return at < other_at;
}

// The lane whose candidate comes first gives it to all; candidates beyond `end` are none.
__device__ __forceinline__ void agree(float& value, int& at, int end) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, value, bit);
        const int other_at = __shfl_xor_sync(ALL_LANES, at, bit);
        if (other_at < end && (at >= end || comes_before(other, other_at, value, at))) {
            value = other;
            at = other_at;
        }
    }
}

// Which of the groups may be chosen from, a bit each.  Lane g looks at group g: at its best score, or with sigmoids at the
// sum of its best two (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
__device__ __forceinline__ u32 best_groups(const RouterArguments& a, const float* scores) {
    const int mine = lane_number(), size = a.experts / a.groups;
    const float least = -float_of_bits(0x7f800000);
    float best = least, second = least;
    for (int i = 0; mine < a.groups && i < size; i++) {
        const float score = scores[mine * size + i];
        if (!(score <= best)) {
            second = best;
            best = score;
        } else if (score > second) {
            second = score;
        }
    }
    const float of_group = a.is_sigmoid ? best + second : best;
    u32 kept = 0;
    for (int i = 0; i < a.kept_groups; i++) {
        const bool is_free = mine < a.groups && (kept >> mine & 1u) == 0;
        float value = of_group;
        int at = is_free ? mine : a.groups;
        agree(value, at, a.groups);
        kept |= 1u << at;
    }
    return kept;
}

// SparseMixer's choice (Liu et al. 2024, "GRIN: GRadient-INformed MoE", section 2; without what it does in training): an
// expert has the largest logit that is left, and its share in the softmax of those left whose logits are not smaller by
// more than `slack` of their size, or of the largest if that is more.  All in numbers of the type of x, as the model was
// trained with.  By one warp.
template <class State>
__device__ __forceinline__ void mix(const RouterArguments& a, int row) {
    const float* logits = a.logits + static_cast<i64>(row) * a.experts;
    const float slack = State::of(a.slack).value();
    const int lane = lane_number();
    u32 is_taken = 0;  // of the lane's own experts
    for (int place = 0; place < a.per_token; place++) {
        float best = 0, total = 0;
        int at = a.experts;
        for (int i = 0, expert = lane; expert < a.experts; i++, expert += LANES) {
            const float logit = __ldcg(logits + expert);
            if ((is_taken >> i & 1u) == 0 && (at == a.experts || comes_before(logit, expert, best, at))) {
                best = logit;
                at = expert;
            }
        }
        agree(best, at, a.experts);
        for (int i = 0, expert = lane; expert < a.experts; i++, expert += LANES) {
            const float logit = __ldcg(logits + expert), size = fmaxf(fabsf(logit), best);
            const float less = State::of(State::of(best - logit).value() / size).value();
            if ((is_taken >> i & 1u) == 0 && !(less > slack)) total += expf(logit - best);
        }
        total = sum_over_lanes<1, LANES / 2>(total);
        if (at % LANES == lane) is_taken |= 1u << at / LANES;
        if (lane != 0) continue;
        a.chosen[static_cast<i64>(row) * a.per_token + place] = at;
        a.shares[static_cast<i64>(row) * a.per_token + place] = a.rounds_shares ? State::of(1 / total).value() : 1 / total;
    }
}

// The best experts of one row.  By one warp; `scores` is its own memory.
template <class State>
__device__ __forceinline__ void choose(const RouterArguments& a, int row, float* scores) {
    const float* logits = a.logits + static_cast<i64>(row) * a.experts;
    const int lane = lane_number();
    float largest = -float_of_bits(0x7f800000), total = 0;
    for (int expert = lane; expert < a.experts; expert += LANES) largest = fmaxf(largest, __ldcg(logits + expert));
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, bit));
    for (int expert = lane; expert < a.experts; expert += LANES) total += expf(__ldcg(logits + expert) - largest);
    total = sum_over_lanes<1, LANES / 2>(total);
    const auto score_of = [&](int expert) {
        const float logit = __ldcg(logits + expert);
        return a.is_sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest) / total;
    };
    for (int expert = lane; expert < a.experts; expert += LANES) {
        scores[expert] = score_of(expert) + (a.correction != nullptr ? a.correction[expert] : 0.0f);
    }
    __syncwarp();
    const u32 kept = a.kept_groups < a.groups ? best_groups(a, scores) : 0u;
    const int group_size = a.experts / a.groups;
    u32 is_taken = 0;  // of the lane's own experts
    float sum = 0, share = 0;  // share: of the lane's choice, the lane being its place among the chosen
    int mine = 0;
    for (int place = 0; place < a.per_token; place++) {
        float best = 0;
        int at = a.experts;
#pragma unroll 4
        for (int i = 0; i < OF_LANE; i++) {
            const int expert = lane + i * LANES;
            if (expert >= a.experts) break;
            const bool is_open = a.kept_groups >= a.groups || (kept >> expert / group_size & 1u) != 0;
            if (is_open && (is_taken >> i & 1u) == 0 && (at == a.experts || comes_before(scores[expert], expert, best, at))) {
                best = scores[expert];
                at = expert;
            }
        }
        agree(best, at, a.experts);
        if (at % LANES == lane) is_taken |= 1u << at / LANES;
        const float score = score_of(at);
        sum += score;
        if (lane == place) {
            share = score;
            mine = at;
        }
    }
    if (lane >= a.per_token) return;
    if (a.normalises) share /= sum + (a.is_sigmoid ? 1e-20f : 0.0f);
    share *= a.scale;
    a.chosen[static_cast<i64>(row) * a.per_token + lane] = mine;
    a.shares[static_cast<i64>(row) * a.per_token + lane] = a.rounds_shares ? State::of(share).value() : share;
}

// Grid: experts, WARPS at a time; rows, ROUTED_ROWS at a time.
template <class State, class Weight>
__device__ __forceinline__ void route(const RouterArguments& a) {
    __shared__ float scores[WARPS][MOST_EXPERTS];
    const int first_row = static_cast<int>(blockIdx.y) * ROUTED_ROWS, count = min(ROUTED_ROWS, a.rows - first_row);
    const int expert = static_cast<int>(blockIdx.x) * WARPS + warp_number();
    if (expert < a.experts) find_logits<State, Weight>(a, expert, first_row, count);
    if (!is_last_block(a.arrived + blockIdx.y, gridDim.x)) return;
    for (int row = warp_number(); row < count; row += WARPS) {
        if (a.slack > 0) mix<State>(a, first_row + row);
        else choose<State>(a, first_row + row, scores[warp_number()]);
        __syncwarp();
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, 4) router_kernel(const RouterArguments arguments) {
    route<SWITCHYARD_STATE, SWITCHYARD_WEIGHT>(arguments);
}
#endif
