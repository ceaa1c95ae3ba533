// A linear layer for many tokens.
#include <algorithm>
#include <cstddef>
#include <new>

#include "row_products.h"
#include "rows_kernels.h"
#include "thread_pool.h"

namespace {

struct LinearRows {
    const SwitchyardMatrix &weight;
    RowProducts &x;
    const uint16_t *rows, *bias;
    bool floats;
    void *out;
    Phase packing, blocks;
};

void work(void *argument) {
    auto &call = *static_cast<LinearRows *>(argument);
    call.packing.run([&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) call.x.set(tile, call.rows);
    });
    call.blocks.run([&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            const int64_t row = block * kTileRows, rows = std::min(kTileRows, call.weight.rows - row);
            call.x.block(call.weight, block, [&](int64_t first, int64_t some, const float *dots) {
                for (int64_t v = 0; v < some; ++v) {
                    const int64_t at = (first + v) * call.weight.rows + row;
                    for (int64_t i = 0; i < rows; ++i) {
                        const float bias = call.bias ? from_bf16(call.bias[row + i]) : 0.0f;
                        set_output(call.out, call.floats, at + i, dots[v * kTileRows + i] + bias);
                    }
                }
            });
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_linear_rows(SwitchyardPool *pool, const SwitchyardMatrix *weight, int32_t tokens,
                                              const uint16_t *x, const uint16_t *bias, int32_t floats, void *out) try {
    static thread_local RowProducts products;
    products.resize(kernels_for_many(), {weight}, tokens);
    LinearRows call = {*weight, products, x, bias, floats != 0, out, Phase(products.tiles(), pool->threads(), 1),
                       Phase(blocks_of(*weight), pool->threads(), 1)};
    pool->run_long(work, &call, tokens * bytes_of(*weight));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
