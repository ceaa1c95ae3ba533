// A few tokens of one sequence, or of several, through attention that compresses what lies behind a window (DeepSeek-V4, section 2.3):
// norm, projections, entries of the runs that are full now, the index, attention, output and residual.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <numeric>
#include <vector>

#include "cached_attention.h"
#include "dispatch.h"
#include "held_rows.h"
#include "matrix.h"
#include "rows.h"
#include "stamps.h"
#include "switchyard_kernels.h"
#include "thread_pool.h"
#include "token_index.h"

namespace {

constexpr int64_t kScored = 512;      // entries that a thread scores at once
constexpr int64_t kGathered = 64;     // rows that a thread copies at once
constexpr int64_t kSummedUp = 128;    // numbers of an entry that a thread sums up at once

// What a matrix gives of hidden states, among all that is projected of a token.
struct Product {
    const SwitchyardMatrix *weight;
    int64_t place;
};

// The entries of one kind: those of attention, or those that an index looks up.
struct Entries {
    const SwitchyardCompressor *own = nullptr;
    int64_t kv = 0, gate = 0;     // where a token's are among what is projected
    const uint16_t *raw = nullptr;  // [rows, 2 * kv rows]: of each token both, as they are kept
    uint16_t *rows = nullptr;
    int64_t step = 0;             // numbers from a page's entries to the next page's
    std::vector<float> sums;      // [tokens, dim]

    int64_t width() const { return own ? own->kv.rows : 0; }
};

struct CompressedStep {
    const SwitchyardCompressedAttention *layer;
    Kernels kernels;
    const SwitchyardPages *held;
    int32_t tokens;
    const float *hidden;
    const float *cos, *sin;
    int64_t angle_step, token_step;
    float *out;
    std::vector<int32_t> all;        // 0, 1, ..., tokens - 1
    std::vector<const SwitchyardPiece *> piece_of;
    std::vector<float> normed;       // [tokens, hidden]
    Vectors x;                       // the same, for the projections
    std::vector<Product> products;
    int64_t width, kv, weights;      // of all that is projected, and where in it a token's key and its index's weights are
    std::vector<float> projected;    // [tokens, width]
    Vectors q_x;                     // what q_a gave, normalised
    std::vector<float> queries, index_queries;
    Entries entries, index;
    std::vector<int64_t> scoring_begins, places;  // of each token among all that is scored, and where its scores are
    std::vector<float> scores;
    std::vector<int32_t> chosen;     // [tokens, most]
    std::vector<int64_t> gathered_begins;  // rows of each token
    std::vector<uint16_t> gathered;  // [rows, head_dim]
    std::vector<CachedAttention> attention;
    std::vector<int64_t> attention_begins;
    std::vector<float> attended;     // [tokens, heads * head_dim]
    Vectors attended_x;              // [tokens, groups] of the same
    std::vector<float> middle;       // [tokens, o_a rows]
    Vectors middle_x;

    int64_t position_of(int64_t token) const { return piece_of[token]->held + token - piece_of[token]->first; }
    // Where a token's row is among those of a window's pages.
    int64_t row_of(int64_t token, int64_t position) const {
        return piece_of[token]->pages[position / held->page_tokens] * held->page_tokens + position % held->page_tokens;
    }
    uint16_t *entry(const Entries &of, int64_t token, int64_t number) const {
        const int64_t rate = layer->rate, place = ((number + 1) * rate - 1) / held->page_tokens;
        return of.rows + piece_of[token]->entry_pages[place] * of.step + (number - place * held->page_tokens / rate) * of.own->dim;
    }
    // Entries that a token sees, of which it may choose some.
    int64_t seen(int64_t token) const { return entries.own ? (position_of(token) + 1) / layer->rate : 0; }
    bool chooses(int64_t token) const { return index.own && seen(token) > layer->most; }
    int64_t entries_of(int64_t token) const { return chooses(token) ? layer->most : seen(token); }
    int64_t window_of(int64_t token) const { return std::min<int64_t>(position_of(token) + 1, held->window); }
    int64_t rows_of(int64_t token) const { return window_of(token) + entries_of(token); }
    bool fills_run(int64_t token) const { return entries.own && (position_of(token) + 1) % layer->rate == 0; }
    float *of_token(int64_t token, int64_t place) { return &projected[token * width + place]; }
    const float *angles_of(const float *all_angles, int64_t token) const { return all_angles + token * token_step; }

    void take_pieces(const SwitchyardPiece *pieces, int32_t count) {
        piece_of.clear();
        for (int32_t i = 0; i < count; ++i) piece_of.insert(piece_of.end(), static_cast<size_t>(pieces[i].tokens), &pieces[i]);
        tokens = static_cast<int32_t>(piece_of.size());
        all.resize(piece_of.size());
        std::iota(all.begin(), all.end(), 0);
    }
    void arrange();
    void prepare_choice();
    void prepare_attention();
};

void CompressedStep::arrange() {
    products.clear();
    width = 0;
    const auto add = [&](const SwitchyardMatrix &weight) {
        const int64_t place = width;
        products.push_back({&weight, place});
        width += weight.rows;
        return place;
    };
    add(layer->q_a);
    kv = add(layer->kv);
    entries.own = layer->compressor;
    index.own = layer->index;
    for (Entries *each : {&entries, &index})
        if (each->own) {
            each->kv = add(each->own->kv);
            each->gate = add(each->own->gate);
            each->sums.resize(static_cast<size_t>(tokens * int64_t{each->own->dim}));
        }
    entries.raw = static_cast<const uint16_t *>(held->values);
    index.raw = static_cast<const uint16_t *>(held->index_keys);
    entries.rows = static_cast<uint16_t *>(held->entries), entries.step = held->entry_step;
    index.rows = static_cast<uint16_t *>(held->entry_keys), index.step = held->entry_key_step;
    weights = index.own ? add(layer->index_weights) : 0;
    projected.resize(static_cast<size_t>(tokens * width));
    queries.resize(static_cast<size_t>(tokens * layer->q_b.rows));
    index_queries.resize(static_cast<size_t>(index.own ? tokens * layer->index_q.rows : 0));
}

void CompressedStep::prepare_choice() {
    scoring_begins.assign(1, 0);
    places.assign(1, 0);
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t count = chooses(token) ? seen(token) : 0;
        scoring_begins.push_back(scoring_begins.back() + (count + kScored - 1) / kScored);
        places.push_back(places.back() + (count + kPageTokens - 1) / kPageTokens * kPageTokens);
    }
    scores.resize(static_cast<size_t>(places.back()));
    chosen.resize(static_cast<size_t>(index.own ? tokens * int64_t{layer->most} : 0));
}

void CompressedStep::prepare_attention() {
    const int64_t dim = layer->head_dim;
    gathered_begins.assign(1, 0);
    attention_begins.assign(1, 0);
    if (attention.size() < static_cast<size_t>(tokens)) attention.resize(static_cast<size_t>(tokens));
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t rows = rows_of(token);
        gathered_begins.push_back(gathered_begins.back() + (rows + kPageTokens - 1) / kPageTokens * kPageTokens);
        attention[token].resize(layer->heads, 1, {0, rows, 0}, layer->scale, {nullptr, nullptr, dim, dim}, {nullptr, layer->sinks});
        attention_begins.push_back(attention_begins.back() + attention[token].items());
    }
    gathered.resize(static_cast<size_t>(gathered_begins.back() * dim));
}

struct CompressedRun {
    CompressedStep &step;
    Phase norm, first, between, second, heads, entering, scoring, choosing, gathering, attention, joining, middle, spreading, output;

    CompressedRun(CompressedStep &step, int threads)
        : step(step),
          norm(step.tokens, threads, 1),
          first(blocks_of_all(step), threads, 1),
          between(step.tokens, threads, 1),
          second(blocks_of(step.layer->q_b) + (step.index.own ? blocks_of(step.layer->index_q) : 0) +
                     step.tokens * (summing(step.entries) + summing(step.index)),
                 threads, 1),
          heads(step.tokens * (int64_t{step.layer->heads} + (step.index.own ? step.layer->index_heads : 0)), threads, 4),
          entering(2 * int64_t{step.tokens}, threads, 1),
          scoring(step.scoring_begins.back(), threads, 1),
          choosing(step.index.own ? step.tokens : 0, threads, 1),
          gathering(step.tokens * chunks(step), threads, 1),
          attention(step.attention_begins.back(), threads, 1),
          joining(int64_t{step.tokens} * step.layer->groups, threads, 1),
          middle(blocks_of(step.layer->o_a), threads, 1),
          spreading(step.tokens, threads, 1),
          output(blocks_of(step.layer->o_b), threads, 1) {}

    static int64_t blocks_of_all(const CompressedStep &step) {
        int64_t blocks = 0;
        for (const Product &each : step.products) blocks += blocks_of(*each.weight);
        return blocks;
    }
    static int64_t summing(const Entries &of) { return of.own ? (of.own->dim + kSummedUp - 1) / kSummedUp : 0; }
    // That the rows of a token are copied in.
    static int64_t chunks(const CompressedStep &step) {
        int64_t most = 0;
        for (int64_t token = 0; token < step.tokens; ++token) most = std::max(most, step.rows_of(token));
        return (most + kGathered - 1) / kGathered;
    }
};

// One block of weight x for all tokens: out[token * step + row].
void product_block(const CompressedStep &step, const SwitchyardMatrix &weight, int64_t block, const Vectors &x, int64_t to_step,
                   float *out) {
    float dots[kDecodeTokens * kTileRows];
    block_dot(step.kernels, weight, block, x, step.all.data(), step.tokens, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    for (int64_t token = 0; token < step.tokens; ++token) std::copy_n(dots + token * kTileRows, rows, out + token * to_step + row);
}

void first_block(CompressedStep &step, int64_t block) {
    for (const Product &each : step.products) {
        if (block < blocks_of(*each.weight))
            return product_block(step, *each.weight, block, step.x, step.width, &step.projected[each.place]);
        block -= blocks_of(*each.weight);
    }
}

// Of the last dimensions of x [dim], by the angles of a token, or back.
void turn(const CompressedStep &step, int64_t token, int64_t dim, float *x, bool back = false) {
    const int64_t half = step.layer->rope / 2, at = step.angle_step;
    const float *cos = step.angles_of(step.cos, token), *sin = step.angles_of(step.sin, token);
    x += dim - 2 * half;
    if (!back) return rotate_neighbours(x, half, cos, sin, at);
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], c = cos[i * at], s = sin[i * at];
        x[2 * i] = a * c + b * s;
        x[2 * i + 1] = b * c - a * s;
    }
}

// By one thread: what queries are made of, and the rows of a token's key and of what is to be compressed.
void between_projections(CompressedStep &step, int64_t token) {
    const auto &layer = *step.layer;
    const int64_t dim = layer.head_dim, row = step.row_of(token, step.position_of(token));
    float *latent = step.of_token(token, 0), *key = step.of_token(token, step.kv);
    rms_norm(latent, layer.q_a_norm, layer.epsilon, layer.q_a.rows, latent);
    step.q_x.set(step.kernels, token, latent);
    rms_norm(key, layer.kv_norm, layer.epsilon, dim, key);
    turn(step, token, dim, key);
    write_row(SWITCHYARD_KV_BF16, key, dim, row, step.held->keys, nullptr);
    if (!step.entries.own) write_row(SWITCHYARD_KV_BF16, key, dim, row, step.held->values, nullptr);
    for (const Entries *each : {&step.entries, &step.index}) {
        if (!each->own) continue;
        void *raw = each == &step.entries ? step.held->values : step.held->index_keys;
        const int64_t width = each->width();
        write_row(SWITCHYARD_KV_BF16, step.of_token(token, each->kv), width, 2 * row, raw, nullptr);
        write_row(SWITCHYARD_KV_BF16, step.of_token(token, each->gate), width, 2 * row + 1, raw, nullptr);
    }
}

// Numbers [begin, end) of the entry of a run that a token fills: the mean of what its tokens gave, by the softmax of their gates.
// Where runs overlap, the one before gives its first half of both, and the run itself the second.
void sum_up(CompressedStep &step, Entries &of, int64_t token, int64_t begin, int64_t end) {
    const int64_t rate = step.layer->rate, dim = of.own->dim, width = of.width(), last = step.position_of(token);
    const bool overlaps = width > dim;
    const int64_t reach = std::min(overlaps ? 2 * rate : rate, last + 1), count = end - begin;
    float tops[kSummedUp], totals[kSummedUp], sums[kSummedUp];
    std::fill_n(tops, count, -HUGE_VALF);
    std::fill_n(totals, count, 0.0f);
    std::fill_n(sums, count, 0.0f);
    for (int pass = 0; pass < 2; ++pass)
        for (int64_t back = reach - 1; back >= 0; --back) {
            const int64_t half = overlaps && back < rate ? dim : 0, at = half + begin;
            const uint16_t *kv = of.raw + 2 * step.row_of(token, last - back) * width + at, *gates = kv + width;
            const float *bias = of.own->bias + (rate - 1 - back % rate) * width + at;
            for (int64_t i = 0; i < count; ++i) {
                const float gate = from_bf16(gates[i]) + bias[i];
                if (pass == 0) {
                    tops[i] = std::max(tops[i], gate);
                } else {
                    const float share = std::exp(gate - tops[i]);
                    totals[i] += share;
                    sums[i] += share * from_bf16(kv[i]);
                }
            }
        }
    for (int64_t i = 0; i < count; ++i) of.sums[token * dim + begin + i] = sums[i] / totals[i];
}

void second_item(CompressedStep &step, int64_t item) {
    const auto &layer = *step.layer;
    const int64_t of_queries = blocks_of(layer.q_b), of_index = step.index.own ? blocks_of(layer.index_q) : 0;
    if (item < of_queries) return product_block(step, layer.q_b, item, step.q_x, layer.q_b.rows, step.queries.data());
    if ((item -= of_queries) < of_index)
        return product_block(step, layer.index_q, item, step.q_x, layer.index_q.rows, step.index_queries.data());
    item -= of_index;
    const int64_t of_entries = CompressedRun::summing(step.entries), token = item % step.tokens;
    if (!step.fills_run(token)) return;
    int64_t part = item / step.tokens;
    Entries &of = part < of_entries ? step.entries : step.index;
    part -= part < of_entries ? 0 : of_entries;
    sum_up(step, of, token, part * kSummedUp, std::min<int64_t>(of.own->dim, (part + 1) * kSummedUp));
}

// Entry `number`, of the run that a token has filled, to its row.
void enter(CompressedStep &step, Entries &of, int64_t token) {
    if (!of.own || !step.fills_run(token)) return;
    const int64_t dim = of.own->dim, half = step.layer->rope / 2, number = step.seen(token) - 1;
    const auto position = static_cast<float>(number * step.layer->rate);
    float *x = &of.sums[token * dim];
    rms_norm(x, of.own->norm, step.layer->epsilon, dim, x);
    for (int64_t i = 0; i < half; ++i) {
        const float angle = position * step.layer->frequencies[i];
        const float c = std::cos(angle) * step.layer->angle_scale, s = std::sin(angle) * step.layer->angle_scale;
        float *pair = x + dim - 2 * half + 2 * i;
        const float a = pair[0], b = pair[1];
        pair[0] = a * c - b * s;
        pair[1] = b * c + a * s;
    }
    uint16_t *to = step.entry(of, token, number);
    for (int64_t i = 0; i < dim; ++i) to[i] = to_bf16(x[i]);
}

void prepare_head(CompressedStep &step, int64_t token, int64_t head) {
    const auto &layer = *step.layer;
    if (head >= layer.heads) {
        const int64_t dim = step.index.own->dim;
        float *query = &step.index_queries[(token * layer.index_heads + head - layer.heads) * dim];
        turn(step, token, dim, query);
        for (int64_t i = 0; i < dim; ++i) query[i] = round_bf16(query[i]);
        return;
    }
    const int64_t dim = layer.head_dim;
    float *query = &step.queries[(token * layer.heads + head) * dim];
    rms_norm(query, static_cast<const float *>(nullptr), layer.epsilon, dim, query);
    turn(step, token, dim, query);
    std::copy_n(query, dim, step.attention[token].query(head));
}

void score(CompressedStep &step, int64_t item) {
    const auto &layer = *step.layer;
    int64_t token = 0;
    while (item >= step.scoring_begins[token + 1]) ++token;
    const int64_t dim = step.index.own->dim, begin = (item - step.scoring_begins[token]) * kScored;
    const int64_t count = std::min(kScored, step.seen(token) - begin);
    static thread_local std::vector<uint16_t> keys;
    static thread_local std::vector<float> shares;
    keys.resize(static_cast<size_t>(kScored * dim));
    for (int64_t i = 0; i < count; ++i) std::copy_n(step.entry(step.index, token, begin + i), dim, &keys[i * dim]);
    shares.resize(static_cast<size_t>(layer.index_heads));
    for (int64_t i = 0; i < layer.index_heads; ++i) shares[i] = step.of_token(token, step.weights)[i] * layer.index_scale;
    const HeldRows rows = {keys.data(), nullptr, dim, 0};
    const IndexQueries queries = {layer.index_heads, &step.index_queries[token * layer.index_q.rows], shares.data()};
    step.kernels.attention->index(rows, 0, count, queries, &step.scores[step.places[token] + begin]);
}

void choose(CompressedStep &step, int64_t token) {
    if (!step.chooses(token)) return;
    float *scores = &step.scores[step.places[token]];
    const int64_t count = step.seen(token), most = step.layer->most;
    for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] == scores[i] ? scores[i] : -HUGE_VALF;
    take_highest(scores, count, most, &step.chosen[token * most]);
}

// Some of the rows that a token sees, side by side: of its window, and then entries.
void gather(CompressedStep &step, int64_t item) {
    const int64_t dim = step.layer->head_dim, token = item % step.tokens, begin = item / step.tokens * kGathered;
    const int64_t window = step.window_of(token), first = step.position_of(token) + 1 - window;
    const int32_t *chosen = step.chooses(token) ? &step.chosen[token * step.layer->most] : nullptr;
    const auto *keys = static_cast<const uint16_t *>(step.held->keys);
    for (int64_t i = begin; i < std::min(begin + kGathered, step.rows_of(token)); ++i) {
        const int64_t at = i - window;
        const uint16_t *from = at < 0 ? keys + step.row_of(token, first + i) * dim
                                      : step.entry(step.entries, token, chosen ? chosen[at] : at);
        std::copy_n(from, dim, &step.gathered[(step.gathered_begins[token] + i) * dim]);
    }
}

void attend(CompressedStep &step, int64_t item) {
    int64_t token = 0;
    while (item >= step.attention_begins[token + 1]) ++token;
    const int64_t dim = step.layer->head_dim;
    const uint16_t *rows = &step.gathered[step.gathered_begins[token] * dim];
    step.attention[token].run(item - step.attention_begins[token], SWITCHYARD_KV_BF16, {rows, rows, dim, dim});
}

// The heads of a token that are projected together.
void join_group(CompressedStep &step, int64_t token, int64_t group) {
    const auto &layer = *step.layer;
    const int64_t dim = layer.head_dim, heads = layer.heads / layer.groups;
    float *out = &step.attended[(token * layer.heads + group * heads) * dim];
    for (int64_t i = 0; i < heads; ++i) {
        step.attention[token].finish(group * heads + i, out + i * dim);
        turn(step, token, dim, out + i * dim, true);
    }
    step.attended_x.set(step.kernels, token * layer.groups + group, out);
}

// A block of the first output's rows, each of which is of one group.
void middle_block(CompressedStep &step, int64_t block) {
    const auto &layer = *step.layer;
    const int64_t row = block * kTileRows, end = std::min(row + kTileRows, layer.o_a.rows), each = layer.o_a.rows / layer.groups;
    for (int64_t group = row / each; group * each < end; ++group) {
        int32_t which[kDecodeTokens];
        float dots[kDecodeTokens * kTileRows];
        for (int32_t token = 0; token < step.tokens; ++token) which[token] = static_cast<int32_t>(token * layer.groups + group);
        block_dot(step.kernels, layer.o_a, block, step.attended_x, which, step.tokens, dots);
        const int64_t from = std::max(row, group * each), to = std::min(end, (group + 1) * each);
        for (int64_t token = 0; token < step.tokens; ++token)
            std::copy(dots + token * kTileRows + from - row, dots + token * kTileRows + to - row,
                      &step.middle[token * layer.o_a.rows + from]);
    }
}

void output_block(CompressedStep &step, int64_t block) {
    const auto &weight = step.layer->o_b;
    float dots[kDecodeTokens * kTileRows];
    block_dot(step.kernels, weight, block, step.middle_x, step.all.data(), step.tokens, dots);
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, weight.rows - row);
    for (int64_t token = 0; token < step.tokens; ++token) {
        const int64_t at = token * weight.rows + row;
        for (int64_t i = 0; i < rows; ++i) step.out[at + i] = step.hidden[at + i] + dots[token * kTileRows + i];
    }
}

void compressed_work(void *argument) {
    auto &run = *static_cast<CompressedRun *>(argument);
    auto &step = run.step;
    const auto &layer = *step.layer;
    const auto each = [&](Phase &phase, auto body) {
        phase.run([&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; ++item) body(item);
        });
    };
    const int64_t heads = layer.heads + int64_t{step.index.own ? layer.index_heads : 0};
    each(run.norm, [&](int64_t token) {
        const int64_t at = token * layer.hidden;
        rms_norm(step.hidden + at, layer.norm, layer.epsilon, layer.hidden, &step.normed[at]);
        step.x.set(step.kernels, token, &step.normed[at]);
    });
    each(run.first, [&](int64_t block) { first_block(step, block); });
    each(run.between, [&](int64_t token) { between_projections(step, token); });
    each(run.second, [&](int64_t item) { second_item(step, item); });
    each(run.heads, [&](int64_t item) { prepare_head(step, item / heads, item % heads); });
    each(run.entering, [&](int64_t item) { enter(step, item % 2 ? step.index : step.entries, item / 2); });
    each(run.scoring, [&](int64_t item) { score(step, item); });
    each(run.choosing, [&](int64_t token) { choose(step, token); });
    each(run.gathering, [&](int64_t item) { gather(step, item); });
    each(run.attention, [&](int64_t item) { attend(step, item); });
    each(run.joining, [&](int64_t item) { join_group(step, item / layer.groups, item % layer.groups); });
    each(run.middle, [&](int64_t block) { middle_block(step, block); });
    each(run.spreading, [&](int64_t token) { step.middle_x.set(step.kernels, token, &step.middle[token * layer.o_a.rows]); });
    each(run.output, [&](int64_t block) { output_block(step, block); });
}

}  // namespace

SWITCHYARD_API int32_t switchyard_compressed_step(SwitchyardPool *pool, const SwitchyardCompressedAttention *attention,
                                                  const SwitchyardPages *held, const SwitchyardPiece *pieces, int32_t count,
                                                  const float *hidden, const float *cos, const float *sin,
                                                  int32_t angle_step, int64_t token_step, float *out) try {
    const Stamp stamp(attention);
    static thread_local CompressedStep step;
    const auto &layer = *attention;
    step.layer = attention;
    step.kernels = kernels_in_use();
    step.held = held;
    step.hidden = hidden;
    step.cos = cos;
    step.sin = sin;
    step.angle_step = angle_step;
    step.token_step = token_step;
    step.out = out;
    step.take_pieces(pieces, count);
    step.arrange();
    step.prepare_choice();
    step.prepare_attention();
    const int64_t tokens = step.tokens, width = int64_t{layer.heads} * layer.head_dim;
    step.normed.resize(static_cast<size_t>(tokens * int64_t{layer.hidden}));
    const SwitchyardMatrix &none = layer.kv;
    const SwitchyardCompressor *first = layer.compressor, *second = layer.index;
    step.x.resize({&layer.q_a, &layer.kv, first ? &first->kv : &none, first ? &first->gate : &none, second ? &second->kv : &none,
                   second ? &second->gate : &none, second ? &layer.index_weights : &none},
                  tokens, layer.hidden);
    step.q_x.resize({&layer.q_b, second ? &layer.index_q : &layer.q_b}, tokens, layer.q_b.columns);
    step.attended.resize(static_cast<size_t>(tokens * width));
    step.attended_x.resize({&layer.o_a}, tokens * layer.groups, width / layer.groups);
    step.middle.resize(static_cast<size_t>(tokens * layer.o_a.rows));
    step.middle_x.resize({&layer.o_b}, tokens, layer.o_a.rows);
    CompressedRun run(step, pool->threads());
    int64_t weights = bytes_of(layer.q_b) + bytes_of(layer.o_a) + bytes_of(layer.o_b);
    for (const Product &each : step.products) weights += bytes_of(*each.weight);
    if (second) weights += bytes_of(layer.index_q);
    // As in switchyard_attention_step.
    pool->run(compressed_work, &run, tokens * weights + 2 * width * step.gathered_begins.back());
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}
