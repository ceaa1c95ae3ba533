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
    std::vector<float> products;     // [visits, hidden]: of the down matrices
    std::vector<int32_t> one_by_one; // 0, 1, 2, ...
    const uint16_t *residual;        // [tokens, hidden] to add to the result, or null
    const uint16_t *addend;          // [tokens, hidden] to add to the result before that, or null
    uint16_t *out;

    void begin(const SwitchyardExperts *experts, int32_t token_count, const uint16_t *add_to, uint16_t *result);
    // Makes room for this many visits.
    void reserve(int64_t count);

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

    void work();
};
