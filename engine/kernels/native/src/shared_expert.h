// The expert that every token goes to, besides the chosen ones, or a dense MLP.
#pragma once
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

struct SharedExpert {
    const SwitchyardSparseBlock *block = nullptr;
    Kernels kernels;
    int32_t tokens = 1;
    std::vector<int32_t> all;   // 0, 1, ..., tokens - 1
    Vectors x;                  // [tokens, hidden]
    std::vector<float> inner;   // [tokens, inner]
    Vectors activated;          // the same
    std::vector<float> out;     // [tokens, hidden]

    bool exists() const { return block->shared_down_proj.rows > 0; }
    bool is_gated() const { return block->shared_gate_proj.rows > 0; }
    void begin(const SwitchyardSparseBlock *sparse_block, int32_t token_count, const Kernels &in_use);
    int64_t bytes() const;
};

struct SharedExpertRun {
    SharedExpert &expert;
    Phase first, spreading, down;

    SharedExpertRun(SharedExpert &expert, int threads)
        : expert(expert),
          first(expert.exists() ? blocks_of(expert.block->shared_up_proj) : 0, threads, 1),
          spreading(expert.exists() ? expert.tokens : 0, threads, 1),
          down(expert.exists() ? blocks_of(expert.block->shared_down_proj) : 0, threads, 1) {}

    // normed: bf16 [tokens, hidden], which `expert.x` holds already.
    void work(const uint16_t *normed);
};
