// The choice of a token's experts from the logits of all of them.
#pragma once
#include <cstdint>
#include <vector>

#include "row_kernels.h"
#include "switchyard_kernels.h"

inline SwitchyardMatrix router_matrix(const SwitchyardSparseBlock &block) {
    SwitchyardMatrix matrix = {};
    matrix.weights = block.router.weight;
    matrix.rows = block.experts.count, matrix.columns = block.experts.hidden;
    matrix.format = block.router.is_exact ? SWITCHYARD_BLOCKS : SWITCHYARD_BF16;
    matrix.type = block.router.is_exact ? kF32Type : kBf16Type;
    return matrix;
}

class Routing {
  public:
    std::vector<float> logits;  // [experts], filled in by the caller; scores afterwards

    void resize(int32_t experts);
    // Of a step's token with this number.  chosen, shares: [top_k], best first.
    void choose(const SwitchyardRouter &router, int64_t token, int64_t *chosen, float *shares);

  private:
    void keep_best_groups(const SwitchyardRouter &router);

    std::vector<float> preference_;  // [experts]
    std::vector<float> group_;       // [groups]
    std::vector<int32_t> order_;     // [experts]
};
