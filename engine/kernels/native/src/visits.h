// Which tokens of a step use which experts, sorted by expert, so that a row of weights is read once for all of them.
#pragma once
#include <cstdint>
#include <vector>

struct Visits {
    std::vector<int32_t> active;  // experts in use, each once
    std::vector<int32_t> first;   // [active + 1]: where an expert's visits begin
    std::vector<int32_t> token;   // [visits]
    std::vector<float> weight;    // [visits]

    int64_t count() const { return first.back(); }

    // index, weights: [tokens, k]; ids outside [0, experts) are ignored.
    void group(int32_t experts, int64_t tokens, int32_t k, const int64_t *index, const float *weights) {
        tally_.assign(static_cast<size_t>(experts), 0);
        for (int64_t i = 0; i < tokens * k; ++i)
            if (index[i] >= 0 && index[i] < experts) ++tally_[index[i]];
        active.clear();
        first.assign(1, 0);
        for (int32_t expert = 0; expert < experts; ++expert) {
            if (tally_[expert] == 0) continue;
            const int32_t begin = first.back();
            active.push_back(expert);
            first.push_back(begin + tally_[expert]);
            tally_[expert] = begin;
        }
        token.resize(first.back());
        weight.resize(first.back());
        for (int64_t i = 0; i < tokens * k; ++i) {
            if (index[i] < 0 || index[i] >= experts) continue;
            const int32_t at = tally_[index[i]]++;
            token[at] = static_cast<int32_t>(i / k);
            weight[at] = weights[i];
        }
    }

    // Those of experts in ascending order, each by one token.
    void take(int32_t count, const int32_t *experts, const int32_t *tokens) {
        active.clear();
        first.clear();
        for (int32_t i = 0; i < count; ++i) {
            if (i > 0 && experts[i] == experts[i - 1]) continue;
            active.push_back(experts[i]);
            first.push_back(i);
        }
        first.push_back(count);
        token.assign(tokens, tokens + count);
        weight.assign(static_cast<size_t>(count), 1.0f);
    }

  private:
    std::vector<int32_t> tally_;
};
