// The norm and the router before a layer's experts, for many tokens.
#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "routing.h"
#include "row_products.h"
#include "rows.h"
#include "rows_kernels.h"
#include "thread_pool.h"

namespace {

struct RouteRows {
    const SwitchyardSparseBlock &block;
    const SwitchyardMatrix weight;
    RowProducts &x;
    std::vector<float> &logits;  // [tokens, experts]
    int64_t tokens;
    const float *hidden;
    uint16_t *normed;
    int64_t *chosen;
    float *shares;
    Phase norms, router, choices;
};

void work(void *argument) {
    static thread_local Routing routing;
    auto &call = *static_cast<RouteRows *>(argument);
    const auto &router = call.block.router;
    const int64_t width = call.weight.columns, experts = call.weight.rows;
    call.norms.run([&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t first = tile * call.x.lanes(), last = std::min(first + call.x.lanes(), call.tokens);
            for (int64_t token = first; token < last; ++token)
                rms_norm(call.hidden + token * width, call.block.norm, call.block.epsilon, width,
                         call.normed + token * width, call.block.norm_offset);
            call.x.set(tile, call.normed);
        }
    });
    call.router.run([&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            const int64_t row = block * kTileRows, rows = std::min(kTileRows, experts - row);
            call.x.block(call.weight, block, [&](int64_t first, int64_t some, const float *dots) {
                for (int64_t v = 0; v < some; ++v)
                    for (int64_t i = 0; i < rows; ++i) {
                        const float bias = router.bias ? from_bf16(router.bias[row + i]) : 0.0f;
                        const float logit = dots[v * kTileRows + i] + bias;
                        call.logits[(first + v) * experts + row + i] = router.bf16_logits ? round_bf16(logit) : logit;
                    }
            });
        }
    });
    call.choices.run([&](int64_t begin, int64_t end) {
        routing.resize(static_cast<int32_t>(experts));
        for (int64_t token = begin; token < end; ++token) {
            std::copy_n(&call.logits[token * experts], experts, routing.logits.data());
            routing.choose(router, token, call.chosen + token * router.top_k, call.shares + token * router.top_k);
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_route_rows(SwitchyardPool *pool, const SwitchyardSparseBlock *block, int32_t tokens,
                                             const float *hidden, uint16_t *normed, int64_t *chosen,
                                             float *shares) try {
    static thread_local RowProducts products;
    static thread_local std::vector<float> logits;
    const auto &experts = block->experts;
    const SwitchyardMatrix weight = router_matrix(*block);
    products.resize(kernels_for_many(), {&weight}, tokens);
    logits.resize(static_cast<size_t>(tokens) * static_cast<size_t>(experts.count));
    RouteRows call = {*block, weight, products, logits, tokens, hidden, normed, chosen, shares,
                      Phase(products.tiles(), pool->threads(), 1), Phase(blocks_of(weight), pool->threads(), 1),
                      Phase(tokens, pool->threads(), 8)};
    pool->run_long(work, &call, tokens * (bytes_of(weight) + int64_t{8} * experts.hidden));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
