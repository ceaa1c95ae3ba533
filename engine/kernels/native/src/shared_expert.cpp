#include "shared_expert.h"

#include <algorithm>
#include <cmath>

#include "activation.h"

namespace {

float sigmoid_of_gate(const SwitchyardSparseBlock &block, const uint16_t *normed) {
    float dot = 0;
    for (int64_t i = 0; i < block.experts.hidden; ++i) dot += from_bf16(block.shared_gate[i]) * from_bf16(normed[i]);
    return round_bf16(1.0f / (1.0f + std::exp(-round_bf16(dot))));
}

}  // namespace

void SharedExpert::begin(const SwitchyardSparseBlock *sparse_block, const Kernels &in_use) {
    block = sparse_block;
    kernels = in_use;
    if (!exists()) return;
    x.resize(block->shared_gate_proj.format, 1, block->shared_gate_proj.columns);
    inner.resize(static_cast<size_t>(block->shared_gate_proj.rows));
    activated.resize(block->shared_down_proj.format, 1, block->shared_down_proj.columns);
    out.resize(static_cast<size_t>(block->shared_down_proj.rows));
}

int64_t SharedExpert::bytes() const {
    if (!exists()) return 0;
    return bytes_of(block->shared_gate_proj) + bytes_of(block->shared_up_proj) + bytes_of(block->shared_down_proj);
}

void SharedExpertRun::work(const uint16_t *normed) {
    const auto &block = *expert.block;
    const int32_t token = 0;
    const Rounding round = {true};
    first.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            float gate[kTileRows], up[kTileRows];
            block_dot(expert.kernels, block.shared_gate_proj, at, expert.x, &token, 1, gate);
            block_dot(expert.kernels, block.shared_up_proj, at, expert.x, &token, 1, up);
            const int64_t row = at * kTileRows, rows = std::min(kTileRows, block.shared_gate_proj.rows - row);
            for (int64_t i = 0; i < rows; ++i)
                expert.inner[row + i] = round(activate(0, round(gate[i]), round) * round(up[i]));
        }
    });
    spreading.run([&](int64_t, int64_t) { expert.activated.set(expert.kernels, 0, expert.inner.data()); });
    down.run([&](int64_t begin, int64_t end) {
        const float share = block.shared_gate ? sigmoid_of_gate(block, normed) : 1.0f;
        for (int64_t at = begin; at < end; ++at) {
            float dots[kTileRows];
            block_dot(expert.kernels, block.shared_down_proj, at, expert.activated, &token, 1, dots);
            const int64_t row = at * kTileRows, rows = std::min(kTileRows, block.shared_down_proj.rows - row);
            for (int64_t i = 0; i < rows; ++i) expert.out[row + i] = to_bf16(share * round(dots[i]));
        }
    });
}
