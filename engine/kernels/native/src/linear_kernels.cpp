// A linear layer of one token: its rows shared among the pool's threads.
#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "dispatch.h"
#include "rows.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"

namespace {

struct LinearCall {
    const KernelSet *kernels;
    const uint16_t *weight;
    int64_t rows, columns;
    const float *spread_x;
    const uint16_t *bias;
    uint16_t *out;
    Phase row_pairs;
};

void linear_work(void *argument) {
    auto &call = *static_cast<LinearCall *>(argument);
    call.row_pairs.run([&](int64_t begin, int64_t end) {
        for (int64_t pair = begin; pair < end; ++pair) {
            const int64_t row = 2 * pair, other = std::min(row + 1, call.rows - 1);
            float a, b;
            call.kernels->dot_pair(call.weight + row * call.columns, call.weight + other * call.columns, call.spread_x,
                                   call.columns, &a, &b);
            if (call.bias) {
                a += from_bf16(call.bias[row]);
                b += from_bf16(call.bias[other]);
            }
            call.out[row] = to_bf16(a);
            if (other != row) call.out[other] = to_bf16(b);
        }
    });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_linear_bf16(SwitchyardPool *pool, const uint16_t *weight, int64_t rows,
                                              int64_t columns, const uint16_t *x, const uint16_t *bias,
                                              uint16_t *out) try {
    static thread_local std::vector<float> spread_x;
    spread_x.resize(static_cast<size_t>(padded(columns)));
    const KernelSet &kernels = kernels_in_use();
    kernels.spread(x, columns, spread_x.data());
    LinearCall call = {&kernels, weight, rows, columns, spread_x.data(), bias, out,
                       Phase((rows + 1) / 2, pool->threads())};
    pool->run(linear_work, &call, rows * columns * static_cast<int64_t>(sizeof(uint16_t)));
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
