#include "many_experts.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "dispatch.h"
#include "experts_call.h"
#include "many_rows.h"

namespace {

constexpr int64_t kWaveVisits = 1024;
constexpr int64_t kBlocksTogether = 4;  // of rows, for which vectors are read from the outer caches once
constexpr size_t kKeptBytes = 64 << 20;

// What one thread converts for the kernels at a time: a packed tile of vectors, or a single quantised one.
struct Piece {
    int32_t which, first, count;  // of the active experts; of its visits
};

struct Buffers {
    ExpertsCall call;  // its vectors are those of experts with few tokens
    AlignedMemory packed_x, packed_inner;
    std::vector<uint16_t> rows;  // [visits of a wave, inner]: activated, of experts with many tokens
    std::vector<float> sums;     // [tokens, hidden]
    std::vector<Piece> pieces;
    std::vector<int64_t> tile;   // of each active expert: where its packed tiles begin, in its wave
};

// Active experts [begin, end) and the work for them, in order.
struct Wave {
    int32_t begin, end;
    int64_t first_piece;
    Phase pack, first, activated, down;

    Wave(int32_t begin, int32_t end, int64_t first_piece, int64_t pieces, int64_t first_items, int64_t down_items,
         int threads)
        : begin(begin), end(end), first_piece(first_piece), pack(pieces, threads, 1), first(first_items, threads, 1),
          activated(pieces, threads, 1), down(down_items, threads, 1) {}
};

// Both matrices of an expert are computed in one way.
ManyChoice choice_for(const ExpertsCall &call) {
    const SwitchyardMatrix first = call.first_matrix(0), down = call.down_matrix(0);
    return many_for(call.kernels, {&first, &down});
}

class ManyExperts {
  public:
    ManyExperts(Buffers &buffers, const SwitchyardExperts &layer, int32_t tokens, const uint16_t *x, uint16_t *out,
                int threads)
        : own_(buffers), call_(buffers.call), visits_(buffers.call.visits), choice_(choice_for(buffers.call)),
          many_(choice_.kernels ? *choice_.kernels : *buffers.call.kernels.many[layer.first.format]), layer_(layer), x_(x),
          out_(out), quantise_(tokens, threads, 1), finish_(tokens, threads, 1) {
        plan_waves(threads);
    }

    void work() {
        if (some_few_)
            quantise_.run([&](int64_t begin, int64_t end) {
                for (int64_t token = begin; token < end; ++token)
                    call_.x.set(call_.kernels, token, x_ + token * layer_.hidden);
            });
        for (auto &wave : waves_) {
            wave.pack.run([&](int64_t begin, int64_t end) { pack_x(wave, begin, end); });
            wave.first.run([&](int64_t begin, int64_t end) { first(wave, begin, end); });
            wave.activated.run([&](int64_t begin, int64_t end) { pack_inner(wave, begin, end); });
            wave.down.run([&](int64_t begin, int64_t end) { down(wave, begin, end); });
        }
        finish_.run([&](int64_t begin, int64_t end) {
            const int64_t hidden = layer_.hidden;
            many_.narrow(&own_.sums[begin * hidden], (end - begin) * hidden, out_ + begin * hidden);
        });
    }

  private:
    int64_t count(int32_t which) const { return visits_.first[which + 1] - visits_.first[which]; }
    bool is_many(int32_t which) const { return choice_.kernels && count(which) >= choice_.fewest; }
    int64_t x_bytes() const { return many_.packed_bytes(layer_.first.format, layer_.hidden); }
    int64_t inner_bytes() const { return many_.packed_bytes(layer_.down.format, layer_.inner); }
    int64_t visits_before(const Wave &wave) const { return visits_.first[wave.begin]; }

    void plan_waves(int threads) {
        const auto active = static_cast<int32_t>(visits_.active.size());
        const int64_t down_blocks = (layer_.hidden + kTileRows - 1) / kTileRows;
        const auto together = [threads](int64_t blocks) {
            return std::clamp<int64_t>(blocks / (4 * threads), 1, kBlocksTogether);
        };
        first_together_ = std::min(kBlocksTogether, call_.inner_blocks());
        down_together_ = together(down_blocks);
        first_items_ = (call_.inner_blocks() + first_together_ - 1) / first_together_;
        own_.pieces.clear();
        own_.tile.resize(active);
        int64_t most_tiles = 0, most_visits = 0;
        for (int32_t begin = 0, end; begin < active; begin = end) {
            const auto first_piece = static_cast<int64_t>(own_.pieces.size());
            int64_t tiles = 0, visits = 0;
            for (end = begin; end < active && (end == begin || visits + count(end) <= kWaveVisits); ++end) {
                const int64_t mine = count(end), step = is_many(end) ? many_.lanes : 1;
                own_.tile[end] = tiles;
                for (int64_t at = 0; at < mine; at += step)
                    own_.pieces.push_back({end, static_cast<int32_t>(at),
                                           static_cast<int32_t>(std::min(step, mine - at))});
                if (is_many(end)) tiles += (mine + step - 1) / step;
                some_few_ |= !is_many(end);
                visits += mine;
            }
            most_tiles = std::max(most_tiles, tiles);
            most_visits = std::max(most_visits, visits);
            waves_.emplace_back(begin, end, first_piece, static_cast<int64_t>(own_.pieces.size()) - first_piece,
                                (end - begin) * first_items_, (down_blocks + down_together_ - 1) / down_together_,
                                threads);
        }
        packed_x_ = own_.packed_x.room(most_tiles * x_bytes());
        packed_inner_ = own_.packed_inner.room(most_tiles * inner_bytes());
        own_.rows.resize(static_cast<size_t>(most_visits * layer_.inner));
        if (some_few_) call_.reserve(most_visits);
    }

    void pack_x(const Wave &wave, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const Piece &piece = own_.pieces[wave.first_piece + at];
            if (!is_many(piece.which)) continue;
            const uint16_t *rows[64];
            const int32_t *token = &visits_.token[visits_.first[piece.which] + piece.first];
            for (int32_t v = 0; v < piece.count; ++v) rows[v] = x_ + int64_t{token[v]} * layer_.hidden;
            const int64_t tile = own_.tile[piece.which] + piece.first / many_.lanes;
            many_.pack(layer_.first.format, rows, piece.count, layer_.hidden, packed_x_ + tile * x_bytes());
        }
    }

    void pack_inner(const Wave &wave, int64_t begin, int64_t end) {
        const int64_t inner = layer_.inner;
        for (int64_t at = begin; at < end; ++at) {
            const Piece &piece = own_.pieces[wave.first_piece + at];
            const int64_t visit = visits_.first[piece.which] - visits_before(wave) + piece.first;
            if (!is_many(piece.which)) {
                call_.activated.set(call_.kernels, visit, &call_.inner[visit * inner]);
                continue;
            }
            const uint16_t *rows[64];
            for (int32_t v = 0; v < piece.count; ++v) rows[v] = &own_.rows[(visit + v) * inner];
            const int64_t tile = own_.tile[piece.which] + piece.first / many_.lanes;
            many_.pack(layer_.down.format, rows, piece.count, inner, packed_inner_ + tile * inner_bytes());
        }
    }

    // Calls take(first, some, dots) for a block's products with an expert's vectors; `next` is fetched meanwhile.
    template <class Take>
    void products(int32_t which, const SwitchyardMatrix &matrix, int64_t block, const uint8_t *packed,
                  const Vectors &few, const int32_t *which_few, const BlockAt *next, Take take) {
        if (is_many(which)) {
            const int64_t tile = many_.packed_bytes(matrix.format, matrix.columns);
            multiply_block(many_, matrix, block, packed + own_.tile[which] * tile, count(which), next, take);
            return;
        }
        static thread_local std::vector<float> dots;
        dots.resize(static_cast<size_t>(count(which) * kTileRows));
        block_dot(call_.kernels, matrix, block, few, which_few, count(which), dots.data(), next);
        take(int64_t{0}, count(which), dots.data());
    }

    // The biases of a block's rows, zeros beyond them.
    void bias_of(const uint16_t *bias, const RowOrder &order, int64_t block, int64_t rows, float *out) const {
        for (int64_t i = 0; i < kTileRows; ++i) {
            const int64_t first = block * order.block + i % kHalfRows * order.step;
            const int64_t row = first + i / kHalfRows * order.partner;
            out[i] = bias && first < order.first_limit && row < rows ? from_bf16(bias[row]) : 0.0f;
        }
    }

    // The first block of an item of first matrices, -1 beyond the last item.
    BlockAt begin_of(const Wave &wave, int64_t item) const {
        const int64_t which = wave.begin + item / first_items_;
        if (which >= wave.end) return {{}, -1};
        return {call_.first_matrix(visits_.active[which]), item % first_items_ * first_together_};
    }

    void first(const Wave &wave, int64_t begin, int64_t end) {
        const int64_t inner = layer_.inner, width = call_.inner_block();
        for (int64_t item = begin; item < end; ++item) {
            const auto which = static_cast<int32_t>(wave.begin + item / first_items_);
            const int64_t from = item % first_items_ * first_together_;
            const int64_t to = std::min(from + first_together_, call_.inner_blocks());
            const SwitchyardMatrix matrix = call_.first_matrix(visits_.active[which]);
            const RowOrder order(matrix);
            const uint16_t *biases = call_.bias(visits_.active[which], layer_.first);
            const int64_t visit = visits_.first[which] - visits_before(wave);
            const bool many = is_many(which);
            for (int64_t block = from; block < to; ++block) {
                float bias[kTileRows];
                bias_of(biases, order, block, matrix.rows, bias);
                const int64_t column = block * width, columns = std::min(width, inner - column);
                const auto take = [&](int64_t first, int64_t some, float *dots) {
                    many_.activate(layer_, bias, some, dots);
                    for (int64_t v = 0; v < some; ++v) {
                        const int64_t at = (visit + first + v) * inner + column;
                        if (many)
                            many_.narrow(dots + v * kTileRows, columns, &own_.rows[at]);
                        else
                            std::memcpy(&call_.inner[at], dots + v * kTileRows, static_cast<size_t>(columns) * 4);
                    }
                };
                const BlockAt next = block + 1 < to ? BlockAt{matrix, block + 1} : begin_of(wave, wave.first.coming());
                products(which, matrix, block, packed_x_, call_.x, &visits_.token[visits_.first[which]],
                         next.block < 0 ? nullptr : &next, take);
            }
        }
    }

    void down(const Wave &wave, int64_t begin, int64_t end) {
        const int64_t hidden = layer_.hidden, blocks = (hidden + kTileRows - 1) / kTileRows;
        for (int64_t item = begin; item < end; ++item) {
            const int64_t from = item * down_together_, to = std::min(from + down_together_, blocks);
            if (wave.begin == 0) clear(from, to);
            for (int32_t which = wave.begin; which < wave.end; ++which)
                for (int64_t block = from; block < to; ++block) {
                    const bool is_last = block + 1 == to;
                    const BlockAt next = {call_.down_matrix(visits_.active[std::min(which + is_last, wave.end - 1)]),
                                          is_last ? from : block + 1};
                    down_block(wave, which, block, is_last && which + 1 == wave.end ? nullptr : &next);
                }
        }
    }

    void clear(int64_t from, int64_t to) {
        const int64_t hidden = layer_.hidden, row = from * kTileRows, rows = std::min(to * kTileRows, hidden) - row;
        for (int64_t token = 0; token < call_.tokens; ++token)
            std::memset(&own_.sums[token * hidden + row], 0, static_cast<size_t>(rows) * 4);
    }

    void down_block(const Wave &wave, int32_t which, int64_t block, const BlockAt *next) {
        const int64_t hidden = layer_.hidden, row = block * kTileRows, rows = std::min(kTileRows, hidden - row);
        const SwitchyardMatrix matrix = call_.down_matrix(visits_.active[which]);
        const int64_t start = visits_.first[which];
        const bool rounds = layer_.down.format == SWITCHYARD_BF16;
        float bias[kTileRows];
        bias_of(call_.bias(visits_.active[which], layer_.down), RowOrder(matrix), block, matrix.rows, bias);
        const auto take = [&](int64_t first, int64_t some, float *dots) {
            for (int64_t v = 0; v < some; ++v) {
                float *sum = &own_.sums[visits_.token[start + first + v] * hidden + row];
                many_.add(visits_.weight[start + first + v], dots + v * kTileRows, bias, rounds, rows, sum);
            }
        };
        const int32_t *one_by_one = call_.one_by_one.data() + (start - visits_before(wave));
        products(which, matrix, block, packed_inner_, call_.activated, one_by_one, next, take);
    }

    Buffers &own_;
    ExpertsCall &call_;
    const Visits &visits_;
    const ManyChoice choice_;
    const ManyKernels &many_;
    const SwitchyardExperts &layer_;
    const uint16_t *x_;
    uint16_t *out_;
    uint8_t *packed_x_ = nullptr, *packed_inner_ = nullptr;
    int64_t first_together_, first_items_, down_together_;
    bool some_few_ = false;
    std::deque<Wave> waves_;  // phases cannot be moved
    Phase quantise_, finish_;
};

void work(void *argument) { static_cast<ManyExperts *>(argument)->work(); }

}  // namespace

void many_experts(SwitchyardPool &pool, const SwitchyardExperts &layer, int32_t tokens, int32_t k, const uint16_t *x,
                  const int64_t *index, const float *weights, uint16_t *out) {
    static thread_local Buffers buffers;
    auto &call = buffers.call;
    call.begin(&layer, tokens, out);
    call.kernels = kernels_for_many();
    call.kernels.alone = 0;  // a token's logits depend on how many share its experts anyway
    call.visits.group(layer.count, tokens, k, index, weights);
    const int64_t visits = call.visits.count();
    if (visits == 0) {
        std::memset(out, 0, static_cast<size_t>(tokens) * static_cast<size_t>(layer.hidden) * 2);
        return;
    }
    buffers.sums.resize(static_cast<size_t>(tokens) * static_cast<size_t>(layer.hidden));
    ManyExperts experts(buffers, layer, tokens, x, out, pool.threads());
    pool.run_long(work, &experts, visits * call.expert_bytes());
    buffers.packed_x.shrink(kKeptBytes);
    buffers.packed_inner.shrink(kKeptBytes);
    if (buffers.sums.size() * sizeof(float) > kKeptBytes) buffers.sums = {};
    if (buffers.rows.size() * sizeof(uint16_t) > kKeptBytes) buffers.rows = {};
}
