#include "shared_expert.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "many_kernels.h"

namespace {

float sigmoid_of_gate(const SwitchyardSparseBlock &block, const uint16_t *normed) {
    float dot = 0;
    for (int64_t i = 0; i < block.experts.hidden; ++i) dot += from_bf16(block.shared_gate[i]) * from_bf16(normed[i]);
    return round_bf16(1.0f / (1.0f + std::exp(-round_bf16(dot))));
}

}  // namespace

void SharedExpert::begin(const SwitchyardSparseBlock *sparse_block, int32_t token_count, const Kernels &in_use) {
    block = sparse_block;
    kernels = in_use;
    tokens = token_count;
    if (!exists()) return;
    all.resize(static_cast<size_t>(tokens));
    std::iota(all.begin(), all.end(), 0);
    const auto &up = block->shared_up_proj;
    x.resize({is_gated() ? &block->shared_gate_proj : &up, &up}, tokens, up.columns);
    inner.resize(static_cast<size_t>(tokens * up.rows));
    activated.resize({&block->shared_down_proj}, tokens, block->shared_down_proj.columns);
    out.resize(static_cast<size_t>(tokens * block->shared_down_proj.rows));
}

int64_t SharedExpert::bytes() const {
    if (!exists()) return 0;
    return bytes_of(block->shared_gate_proj) + bytes_of(block->shared_up_proj) + bytes_of(block->shared_down_proj);
}

void SharedExpertRun::work(const uint16_t *normed) {
    const auto &block = *expert.block;
    SwitchyardExperts as_expert = {};
    as_expert.first.format = SWITCHYARD_BF16;  // rounds as torch would
    as_expert.pairing = expert.is_gated() ? SWITCHYARD_HALVES : SWITCHYARD_PLAIN;
    as_expert.activation = block.shared_activation;
    as_expert.limit = block.shared_limit;
    as_expert.alpha = block.shared_alpha;
    const auto activate = expert.kernels.many[SWITCHYARD_BF16]->activate;
    const int64_t tokens = expert.tokens, inner = block.shared_up_proj.rows, hidden = block.shared_down_proj.rows;
    first.run([&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            constexpr float no_bias[kTileRows] = {};
            float gate[kDecodeTokens * kTileRows], up[kDecodeTokens * kTileRows];
            block_dot(expert.kernels, block.shared_up_proj, at, expert.x, expert.all.data(), tokens, up);
            const int64_t row = at * kTileRows, rows = std::min(kTileRows, inner - row);
            if (!expert.is_gated()) {
                activate(as_expert, no_bias, tokens, up);
                for (int64_t token = 0; token < tokens; ++token)
                    std::copy_n(&up[token * kTileRows], rows, &expert.inner[token * inner + row]);
                continue;
            }
            block_dot(expert.kernels, block.shared_gate_proj, at, expert.x, expert.all.data(), tokens, gate);
            for (int64_t from = 0; from < rows; from += kHalfRows)
                for (int64_t token = 0; token < tokens; ++token) {
                    float pairs[kTileRows];
                    std::copy_n(&gate[token * kTileRows + from], kHalfRows, pairs);
                    std::copy_n(&up[token * kTileRows + from], kHalfRows, pairs + kHalfRows);
                    activate(as_expert, no_bias, 1, pairs);
                    std::copy_n(pairs, std::min(kHalfRows, rows - from), &expert.inner[token * inner + row + from]);
                }
        }
    });
    spreading.run([&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            expert.activated.set(expert.kernels, token, &expert.inner[token * inner]);
    });
    down.run([&](int64_t begin, int64_t end) {
        float shares[kDecodeTokens];
        for (int64_t token = 0; token < tokens; ++token)
            shares[token] = block.shared_gate ? sigmoid_of_gate(block, normed + token * block.experts.hidden) : 1.0f;
        for (int64_t at = begin; at < end; ++at) {
            float dots[kDecodeTokens * kTileRows];
            block_dot(expert.kernels, block.shared_down_proj, at, expert.activated, expert.all.data(), tokens, dots);
            const int64_t row = at * kTileRows, rows = std::min(kTileRows, hidden - row);
            for (int64_t token = 0; token < tokens; ++token)
                for (int64_t i = 0; i < rows; ++i)
                    expert.out[token * hidden + row + i] = shares[token] * dots[token * kTileRows + i];
        }
    });
}
