// A linear layer for few tokens, its rows shared among the pool's threads.
#include <algorithm>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "dispatch.h"
#include "matrix.h"
#include "thread_pool.h"

namespace {

struct LinearCall {
    Kernels kernels;
    const SwitchyardMatrix &weight;
    const Vectors &x;
    const std::vector<int32_t> &tokens;
    const uint16_t *bias;
    bool floats;
    void *out;
    Phase blocks;
};

void linear_blocks(LinearCall &call, int64_t begin, int64_t end) {
    static thread_local std::vector<float> dots;
    const auto count = static_cast<int64_t>(call.tokens.size());
    dots.resize(static_cast<size_t>(count * kTileRows));
    for (int64_t block = begin; block < end; ++block) {
        block_dot(call.kernels, call.weight, block, call.x, call.tokens.data(), count, dots.data());
        const int64_t row = block * kTileRows, rows = std::min(kTileRows, call.weight.rows - row);
        for (int64_t token = 0; token < count; ++token)
            for (int64_t i = 0; i < rows; ++i) {
                const float bias = call.bias ? from_bf16(call.bias[row + i]) : 0.0f;
                set_output(call.out, call.floats, token * call.weight.rows + row + i, dots[token * kTileRows + i] + bias);
            }
    }
}

void linear_work(void *argument) {
    auto &call = *static_cast<LinearCall *>(argument);
    call.blocks.run([&](int64_t begin, int64_t end) { linear_blocks(call, begin, end); });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_linear(SwitchyardPool *pool, const SwitchyardMatrix *weight, int32_t tokens,
                                         const uint16_t *x, const uint16_t *bias, int32_t floats, void *out) try {
    static thread_local Vectors vectors;
    static thread_local std::vector<int32_t> which;
    const Kernels kernels = kernels_in_use();
    vectors.resize({weight}, tokens, weight->columns);
    which.resize(static_cast<size_t>(tokens));
    std::iota(which.begin(), which.end(), 0);
    for (int32_t token = 0; token < tokens; ++token) vectors.set(kernels, token, x + token * weight->columns);
    LinearCall call = {kernels, *weight, vectors, which, bias, floats != 0, out, Phase(blocks_of(*weight), pool->threads(), 1)};
    if (tokens > kDecodeTokens)
        pool->run_long(linear_work, &call, tokens * bytes_of(*weight));
    else
        pool->run(linear_work, &call, tokens * bytes_of(*weight));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
