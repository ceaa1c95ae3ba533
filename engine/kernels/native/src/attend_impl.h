// The kernels of attend.h in the target's own vectors: included once for every instruction set.
#include <algorithm>

#include "attend.h"
#include "attend_keys.h"
#include "delta_rule.h"

namespace {

constexpr int kQueriesTogether = 4;  // that meet a key at once
constexpr int kScoreLines = 5, kWeighLines = 6;  // that are asked for at each of these steps; the others while mixing

// Keeps what was loaded in a register: GCC loads it again for each of its uses, where 256 bits are too few for that.
template <class T> ALWAYS_INLINE inline void hold(T &value) {
#if defined(__GNUC__) && defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(value));
#else
    (void)value;
#endif
}

// What the next page holds: memory delivers it, a few lines at each step, while this one is computed.
class Ahead {
  public:
    struct Lines {
        const char *first;
        int64_t count;
    };

    void add(const void *start, int64_t bytes) { parts_[count_++] = {static_cast<const char *>(start), (bytes + 63) / 64}; }
    // The next `most` lines, or fewer.
    Lines take(int64_t most) {
        while (part_ < count_ && parts_[part_].count == 0) ++part_;
        if (part_ == count_) return {nullptr, 0};
        Lines &part = parts_[part_];
        const Lines taken = {part.first, std::min(most, part.count)};
        part.first += taken.count * 64;
        part.count -= taken.count;
        return taken;
    }
    void fetch(int64_t most) {
        const Lines lines = take(most);
        for (int64_t line = 0; line < lines.count; ++line) prefetch(lines.first + line * 64);
    }

  private:
    Lines parts_[3];
    int count_ = 0, part_ = 0;
};

// The products of kRowsTogether keys with `count` queries: out[query * kPageTokens + row].
template <class Kind, int count>
inline void row_scores(const typename Kind::Element *const *rows, int64_t dim, const typename Kind::Query *const *q,
                       float *out) {
    constexpr int all_sums = count * kRowsTogether;  // of query 0 with each row, then of query 1, ..
    typename Kind::Sum sums[all_sums];
    repeat<all_sums>([&](auto at) ALWAYS_INLINE { sums[at] = Kind::none(); });
    int64_t d = 0;
    for (; d + Kind::step <= dim; d += Kind::step) {
        typename Kind::Part key[kRowsTogether];
        repeat<kRowsTogether>([&](auto row) ALWAYS_INLINE { key[row] = Kind::key(rows[row] + d); });
        repeat<count>([&](auto i) ALWAYS_INLINE {
            typename Kind::Part query = Kind::query(q[i] + d);
            hold(query);
            repeat<kRowsTogether>([&](auto row) ALWAYS_INLINE {
                auto &sum = sums[i * kRowsTogether + row];
                sum = Kind::add_products(key[row], query, sum);
            });
        });
    }
    constexpr int most_sums = kQueriesTogether * kRowsTogether;
    V parts[most_sums];
    repeat<most_sums>([&](auto at) ALWAYS_INLINE { parts[at] = Kind::floats(sums[at < all_sums ? at : 0]); });
    float dots[kQueriesTogether][kRowsTogether];
    repeat<most_sums / kWidth>([&](auto at) ALWAYS_INLINE { store(&dots[0][0] + at * kWidth, sums_of(parts + at * kWidth)); });
    for (int i = 0; i < count; ++i) {
        if (d < dim)
            for (int row = 0; row < kRowsTogether; ++row)
                for (int64_t rest = d; rest < dim; ++rest) dots[i][row] += Kind::product(rows[row][rest], q[i][rest]);
        std::memcpy(out + i * kPageTokens, dots[i], sizeof dots[i]);
    }
}

// Of a page's first `tokens` keys.
template <class Kind, int count>
int page_scores(const typename Kind::Element *keys, int64_t dim, int64_t tokens, const typename Kind::Query *const *q,
                int left, Ahead &ahead, float *out) {
    if constexpr (count > 1) {
        if (left < count) return page_scores<Kind, count - 1>(keys, dim, tokens, q, left, ahead, out);
    }
    for (int64_t first = 0; first < tokens; first += kRowsTogether) {
        const typename Kind::Element *rows[kRowsTogether];
        for (int row = 0; row < kRowsTogether; ++row) rows[row] = keys + std::min(first + row, tokens - 1) * dim;
        ahead.fetch(kScoreLines);
        row_scores<Kind, count>(rows, dim, q, out + first);
    }
    return count;
}

// scores[query][token], of the part of keys and queries that has `dim` numbers, times the scale of either.
template <class Kind>
void score_page(const void *keys, const float *scales, int64_t row, int64_t dim, int64_t tokens,
                const Packed<Kind> &packed, const Queries &queries, Ahead &ahead, float (*scores)[kPageTokens]) {
    const auto *mine = static_cast<const typename Kind::Element *>(keys) + row * dim;
    for (int i = 0; i < queries.count;)
        i += page_scores<Kind, kQueriesTogether>(mine, dim, tokens, packed.q + i, queries.count - i, ahead, scores[i]);
    for (int i = 0; i < queries.count; ++i)
        for (int t = 0; t < kPageTokens; t += kWidth) {
            V factor = all(queries.scale * packed.scales[i]);
            if (scales) factor = multiply(factor, load(scales + row + t));
            store(scores[i] + t, multiply(load(scores[i] + t), factor));
        }
}

// Hides what a query does not see of the page whose first token is `first`.
void mask(float *scores, int64_t first, int64_t tokens, const Queries &queries, int i) {
    if (queries.softcap != 0)
        for (int64_t t = 0; t < tokens; ++t) scores[t] = queries.softcap * std::tanh(scores[t] / queries.softcap);
    const int64_t from = queries.from[i] - first, to = std::min(queries.to[i] - first, tokens), kept = queries.kept - first;
    if (from > 0)
        for (int64_t t = std::max<int64_t>(kept, 0); t < std::min(from, kPageTokens); ++t) scores[t] = kLow;
    for (int64_t t = std::max<int64_t>(to, 0); t < kPageTokens; ++t) scores[t] = kLow;
}

// Turns a page's scores into shares, not divided by the total yet; what was mixed before shrinks with a new top.
void weigh(float *scores, const Queries &queries, int i, int64_t dim) {
    V most = load(scores);
    for (int t = kWidth; t < kPageTokens; t += kWidth) most = larger(most, load(scores + t));
    const float top = most_of(most);
    float &highest = queries.tops[i], *mixed = queries.mixed + i * dim;
    if (top > highest) {
        const float shrink = std::exp(highest - top);
        queries.totals[i] *= shrink;
        for (int64_t at = 0; at < dim; ++at) mixed[at] *= shrink;
        highest = top;
    }
    if (highest == kLow) {  // it has seen nothing yet
        std::fill_n(scores, kPageTokens, 0.0f);
        return;
    }
    V total = all(0);
    for (int t = 0; t < kPageTokens; t += kWidth) {
        const V share = exponential(subtract(load(scores + t), all(highest)));
        store(scores + t, share);
        total = add(total, share);
    }
    queries.totals[i] += sum_of(total);
}

// mixed[i] += sum over tokens of shares[i][token] * values[token], in `columns` vectors of each.
template <class T, int count, int columns>
inline void mix_columns(const typename T::Element *values, int64_t dim, int64_t tokens,
                        const float (*shares)[kPageTokens], float *mixed, int64_t step, Ahead &ahead) {
    V sums[count * columns];
    repeat<count * columns>([&](auto at) ALWAYS_INLINE {
        sums[at] = load(mixed + at / columns * step + at % columns * kWidth);
    });
    const Ahead::Lines lines = ahead.take(tokens);
    const char *line = lines.count == tokens ? lines.first : reinterpret_cast<const char *>(shares);
    const int64_t line_step = lines.count == tokens ? 64 : 0;
    for (int64_t token = 0; token < tokens; ++token, values += dim, line += line_step) {
        prefetch(line);
        V value[columns];
        repeat<columns>([&](auto c) ALWAYS_INLINE { value[c] = T::load(values + c * kWidth); });
        repeat<count>([&](auto i) ALWAYS_INLINE {
            const V share = all(shares[i][token]);
            repeat<columns>([&](auto c) ALWAYS_INLINE {
                V &sum = sums[i * columns + c];
                sum = fma(value[c], share, sum);
            });
        });
    }
    repeat<count * columns>([&](auto at) ALWAYS_INLINE {
        store(mixed + at / columns * step + at % columns * kWidth, sums[at]);
    });
}

template <class T, int count>
int mix_page(const typename T::Element *values, int64_t dim, int64_t tokens, const float (*shares)[kPageTokens],
             float *mixed, int left, Ahead &ahead) {
    if constexpr (count > 1) {
        if (left < count) return mix_page<T, count - 1>(values, dim, tokens, shares, mixed, left, ahead);
    }
    constexpr int columns = kAccumulators / count;
    int64_t at = 0;
    for (; at + columns * kWidth <= dim; at += columns * kWidth)
        mix_columns<T, count, columns>(values + at, dim, tokens, shares, mixed + at, dim, ahead);
    for (; at + kWidth <= dim; at += kWidth)
        mix_columns<T, count, 1>(values + at, dim, tokens, shares, mixed + at, dim, ahead);
    for (; at < dim; ++at)
        for (int i = 0; i < count; ++i)
            for (int64_t token = 0; token < tokens; ++token)
                mixed[i * dim + at] += shares[i][token] * T::one(values[token * dim + at]);
    return count;
}

template <class T, class Kind>
void attend_pages(const HeldRows &rows, int64_t begin, int64_t end, const Queries &queries, const Packed<Kind> &packed,
                  const Packed<Kind> &further) {
    const int count = queries.count;
    const int64_t from = *std::min_element(queries.from, queries.from + count);
    const int64_t last = *std::max_element(queries.to, queries.to + count);
    end = std::min(end, last);
    // The next page at or after this token that some query sees, or the end.
    const auto seen = [&](int64_t token) {
        if (token >= queries.kept && token + kPageTokens <= from) token = from / kPageTokens * kPageTokens;
        return std::min(token, end);
    };
    typedef typename T::Element Element;
    const auto *values = static_cast<const Element *>(rows.values);
    const auto page_bytes = [](int64_t dim) { return kPageTokens * dim * static_cast<int64_t>(sizeof(Element)); };
    for (int64_t first = seen(begin), following; first < end; first = following) {
        following = seen(first + kPageTokens);
        const int64_t tokens = std::min(kPageTokens, end - first), row = rows.row_of(first);
        Ahead ahead;
        // Beyond the end too: who computes these rows goes on with those behind them.
        if (following < last) {
            const int64_t next = rows.row_of(following);
            ahead.add(static_cast<const Element *>(rows.keys) + next * rows.key_dim, page_bytes(rows.key_dim));
            if (rows.further_dim)
                ahead.add(static_cast<const Element *>(rows.further_keys) + next * rows.further_dim, page_bytes(rows.further_dim));
            if (rows.values != rows.keys) ahead.add(values + next * rows.value_dim, page_bytes(rows.value_dim));
        }
        float shares[kMostTogether][kPageTokens];
        score_page<Kind>(rows.keys, rows.key_scales, row, rows.key_dim, tokens, packed, queries, ahead, shares);
        if (rows.further_dim > 0) {
            float more[kMostTogether][kPageTokens];
            score_page<Kind>(rows.further_keys, rows.further_scales, row, rows.further_dim, tokens, further, queries, ahead,
                             more);
            for (int i = 0; i < count; ++i)
                for (int t = 0; t < kPageTokens; t += kWidth)
                    store(shares[i] + t, add(load(shares[i] + t), load(more[i] + t)));
        }
        for (int i = 0; i < count; ++i) {
            ahead.fetch(kWeighLines);
            mask(shares[i], first, tokens, queries, i);
            weigh(shares[i], queries, i, rows.value_dim);
            if (rows.value_scales)
                for (int64_t t = 0; t < tokens; ++t) shares[i][t] *= rows.value_scales[row + t];
        }
        for (int i = 0; i < count;)
            i += mix_page<T, kMixedTogether>(values + row * rows.value_dim, rows.value_dim, tokens, shares + i,
                                             queries.mixed + i * rows.value_dim, count - i, ahead);
    }
}

template <class T, class Kind>
bool attend_as(const HeldRows &rows, int64_t begin, int64_t end, const Queries &queries) {
    const int64_t step = rows.query_dim();
    const Packed<Kind> packed(queries.q, queries.count, step, rows.key_dim);
    if (!packed.is_whole) return false;
    const Packed<Kind> further(queries.q + rows.key_dim, rows.further_dim ? queries.count : 0, step, rows.further_dim);
    if (!further.is_whole) return false;
    attend_pages<T, Kind>(rows, begin, end, queries, packed, further);
    return true;
}

template <class T> void attend(const HeldRows &rows, int64_t begin, int64_t end, const Queries &queries) {
    if (!attend_as<T, typename Keys<T>::Kind>(rows, begin, end, queries)) attend_as<T, AsFloats<T>>(rows, begin, end, queries);
}

template <class T, class Kind>
bool index_as(const HeldRows &rows, int64_t begin, int64_t end, const IndexQueries &index, float *scores) {
    const int64_t room = (end - begin + kPageTokens - 1) / kPageTokens * kPageTokens;
    for (int64_t first = 0; first < index.count; first += kMostTogether) {
        Queries queries = {};
        queries.count = static_cast<int>(std::min<int64_t>(kMostTogether, index.count - first));
        queries.scale = 1.0f;
        const Packed<Kind> packed(index.q + first * rows.key_dim, queries.count, rows.key_dim, rows.key_dim);
        if (!packed.is_whole) return false;
        Ahead ahead;
        for (int64_t page = begin; page < end; page += kPageTokens) {
            float dots[kMostTogether][kPageTokens];
            score_page<Kind>(rows.keys, nullptr, rows.row_of(page), rows.key_dim, std::min(kPageTokens, end - page), packed,
                             queries, ahead, dots);
            for (int64_t t = 0; t < kPageTokens; t += kWidth) {
                float *to = scores + page - begin + t;
                if (!index.weights) {
                    for (int i = 0; i < queries.count; ++i) store(to + (first + i) * room, load(dots[i] + t));
                    continue;
                }
                V sum = first ? load(to) : all(0.0f);
                for (int i = 0; i < queries.count; ++i)
                    sum = fma(larger(load(dots[i] + t), all(0.0f)), all(index.weights[first + i]), sum);
                store(to, sum);
            }
        }
    }
    return true;
}

void index_scores(const HeldRows &rows, int64_t begin, int64_t end, const IndexQueries &queries, float *scores) {
    if (!index_as<Bf16, typename Keys<Bf16>::Kind>(rows, begin, end, queries, scores))
        index_as<Bf16, AsFloats<Bf16>>(rows, begin, end, queries, scores);
}

}  // namespace

#define ATTEND_KERNELS                                                         \
    {                                                                          \
        {attend<Bf16>, attend<Fp16>, attend<Int8>, attend<Fp32>}, delta_rule, \
            state_space, convolve_all, gate_all, decay_all, index_scores                   \
    }
