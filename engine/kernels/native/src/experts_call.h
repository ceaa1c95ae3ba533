// One call of a layer's experts, its work shared among a pool's threads.
#pragma once
#include <cstdint>
#include <numeric>
#include <vector>

#include "matrix.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"
#include "visits.h"

struct ExpertsCall {
    const SwitchyardExperts *layer;
    Kernels kernels;
    int32_t tokens;
    Visits visits;
    Vectors x;                       // [tokens], [hidden]
    std::vector<float> inner;        // [visits, inner]
    Vectors activated;               // the same
    std::vector<float> products;     // [visits, hidden], unless they go elsewhere
    std::vector<float *> outputs;    // [visits]: of each, [hidden], before its share
    std::vector<int32_t> one_by_one; // 0, 1, 2, ...
    const float *residual;           // [tokens, hidden] to add to the result, or null
    const float *addend;             // [tokens, hidden] to add to the result as well, or null
    float *sums;                     // [tokens, hidden]: where the result goes if there is something to add it to
    float multiple;                  // of the result before `residual` is added
    bool apart;                      // whether it is not added to `residual` yet
    uint16_t *out;                   // [tokens, hidden]: where it goes if there is not

    // Of experts alone.
    void begin(const SwitchyardExperts *experts, int32_t token_count, uint16_t *result);
    // Of experts within a layer.
    void begin(const SwitchyardExperts *experts, int32_t token_count, const float *add_to, float *result);
    // Makes room for this many visits, whose outputs go to `rows`, [count, hidden], or else to `products`.
    void reserve(int64_t count, float *rows = nullptr);

    int64_t inner_block() const { return layer->pairing == SWITCHYARD_PLAIN ? kTileRows : kHalfRows; }
    int64_t inner_blocks() const { return (layer->inner + inner_block() - 1) / inner_block(); }
    int64_t down_block_count() const { return (layer->hidden + kTileRows - 1) / kTileRows; }
    SwitchyardMatrix first_matrix(int32_t expert) const;
    SwitchyardMatrix down_matrix(int32_t expert) const;
    const uint16_t *bias(int32_t expert, const SwitchyardRecordPart &part) const;
    // Bytes of one expert's weights.
    int64_t expert_bytes() const { return bytes_of(first_matrix(0)) + bytes_of(down_matrix(0)); }
};

// For up to `active` experts and `visits` of them.
struct ExpertsRun {
    ExpertsCall &call;
    Phase first, spreading, down, sums;

    ExpertsRun(ExpertsCall &call, int64_t active, int64_t visits, int threads)
        : call(call),
          first(active * call.inner_blocks(), threads, 1),
          spreading(visits, threads, 1),
          down(active * call.down_block_count(), threads, 1),
          sums(call.down_block_count(), threads, 4) {}

    void work() {
        work_apart();
        add_up();
    }
    // The visits' outputs alone, and their sums alone.
    void work_apart();
    void add_up();
};

// The outputs of experts in ascending order, each for one row of x, bf16 [rows, hidden], up to kDecodeTokens of them:
// outputs [count, hidden].  1 if there was no memory.
int32_t experts_apart(SwitchyardPool *pool, const SwitchyardExperts &experts, int32_t count, const int32_t *ids,
                      const int32_t *row_of, const uint16_t *x, float *outputs);
