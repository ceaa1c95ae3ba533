#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernel_set.h"

namespace {

// The first k of `order` become the largest of `values`, the earlier one of equals first.
void put_best_first(const std::vector<float> &values, int32_t k, std::vector<int32_t> &order) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
}

}  // namespace

void Routing::resize(int32_t experts) {
    logits.resize(static_cast<size_t>(experts));
    preference_.resize(static_cast<size_t>(experts));
}

void Routing::choose(const SwitchyardRouter &router, int64_t token, int64_t *chosen, float *shares) {
    if (router.scoring == SWITCHYARD_SOFTMAX) {
        const float top = *std::max_element(logits.begin(), logits.end());
        float total = 0;
        for (float &logit : logits) total += logit = std::exp(logit - top);
        for (float &logit : logits) logit /= total;
    } else if (router.scoring == SWITCHYARD_SIGMOID) {
        for (float &logit : logits) logit = 1.0f / (1.0f + std::exp(-logit));
    } else {
        for (float &logit : logits) logit = std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit)));
    }
    for (size_t expert = 0; expert < logits.size(); ++expert)
        preference_[expert] = logits[expert] + (router.correction ? router.correction[expert] : 0.0f);
    if (router.kept_groups < router.groups) keep_best_groups(router);
    order_.resize(logits.size());
    if (router.table)
        std::copy_n(router.table + router.ids[token] * router.top_k, router.top_k, order_.begin());
    else
        put_best_first(preference_, router.top_k, order_);
    float kept = router.scoring == SWITCHYARD_SOFTMAX ? 0.0f : 1e-20f;
    for (int32_t i = 0; i < router.top_k; ++i) kept += logits[order_[i]];
    kept = std::max(kept, router.least);
    for (int32_t i = 0; i < router.top_k; ++i) {
        const float share = logits[order_[i]] / (router.normalise ? kept : 1.0f) * router.scale;
        chosen[i] = order_[i];
        shares[i] = router.bf16_shares ? round_bf16(share) : share;
        if (router.multiples) shares[i] *= router.multiples[order_[i]];
    }
}

void Routing::keep_best_groups(const SwitchyardRouter &router) {
    const int64_t size = static_cast<int64_t>(preference_.size()) / router.groups;
    group_.resize(static_cast<size_t>(router.groups));
    for (int64_t group = 0; group < router.groups; ++group) {
        float best = -std::numeric_limits<float>::infinity(), second = best;
        for (int64_t expert = group * size; expert < (group + 1) * size; ++expert) {
            second = std::max(second, std::min(best, preference_[expert]));
            best = std::max(best, preference_[expert]);
        }
        group_[group] = router.scoring == SWITCHYARD_SOFTMAX ? best : best + second;
    }
    order_.resize(group_.size());
    put_best_first(group_, router.groups, order_);
    for (int32_t i = router.kept_groups; i < router.groups; ++i)
        std::fill_n(preference_.begin() + order_[i] * size, size, -std::numeric_limits<float>::infinity());
}
