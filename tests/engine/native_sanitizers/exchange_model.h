// A model of what the exchange of a card and the host is for, in which everything wrong shows: slots hold copies of the
// number of their expert, an expert's output says which expert, layer and token it is of, and the host's policy takes
// slots away and fills them at random.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "exchange.h"

// What might be wrong: a slot is overwritten while it may be read, or named before its expert is in it, or an answer is
// announced before it is there.  The tests have to see it.
enum Mistake { kNone, kOverwritesAtOnce, kNamesTooEarly, kAnnouncesTooEarly };

constexpr int32_t kLayers = 2, kExperts = 5, kChosen = 3, kRows = 3, kHidden = 4, kSlots = 4, kWords = 3;
constexpr int64_t kNoLimit = int64_t{1} << 62;

[[noreturn]] inline void fail(const char *what, uint64_t token, int64_t more = 0) {
    std::fprintf(stderr, "exchange: %s in token %llu (%lld)\n", what, static_cast<unsigned long long>(token),
                 static_cast<long long>(more));
    std::exit(1);
}

inline float output_of(int32_t layer, int32_t expert, uint16_t row) {
    return static_cast<float>(layer * 100000 + expert * 10000 + row % 10000);
}

struct Model {
    explicit Model(uint64_t seed, Mistake mistake)
        : shape{kLayers, kExperts, kHidden, kChosen, kRows, 2},
          block(static_cast<size_t>(ExchangeMemory::bytes(shape)) + 128),
          memory(shape, reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(block.data()) + 127) & ~uintptr_t{127})),
          host(memory), worker(memory), mistake(mistake), drawn(seed), policy(seed ^ 0x9e3779b9), taken(kSlots, -1) {
        for (auto &slot : slots) for (auto &word : slot) word = -1;
        copying.word.store(0);
        copied.word.store(0);
    }

    // The card: one token, layer by layer.  Pauses are those of `pause`.
    template <class Pause> void run_card(Pause pause, int64_t limit_ns = kNoLimit) {
        ExchangeCard card(memory, limit_ns);
        const uint64_t token = memory.flags->started.load() / 2;
        bool is_whole = true;
        for (int32_t layer = 0; layer < kLayers; ++layer) {
            int64_t chosen[kRows * kChosen];
            const auto rows = static_cast<int32_t>(1 + drawn() % kRows);
            uint16_t x[kRows * kHidden];
            for (int32_t row = 0; row < rows; ++row) {
                choose(chosen + row * kChosen);
                for (int32_t at = 0; at < kHidden; ++at)
                    x[row * kHidden + at] =
                        static_cast<uint16_t>((token * kLayers + static_cast<uint64_t>(layer)) * kRows + static_cast<uint64_t>(row));
            }
            const int32_t missed = card.look_up(layer, rows, kChosen, chosen);
            if (missed > 0) card.post(layer, x);
            const SwitchyardCardLayer &record = card.record(layer);
            for (int32_t i = 0; i < rows * kChosen; ++i) {
                if (record.slots[i] < 0) continue;
                for (const int32_t &word : slots[record.slots[i]]) {
                    SWITCHYARD_TURN();
                    if (word != layer * kExperts + chosen[i]) fail("a slot holds another expert", token, word);
                }
                ++hits;
            }
            if (missed == 0) continue;
            const float *answer = card.wait(layer, pause);
            is_whole = is_whole && answer != nullptr;
            if (answer != nullptr) check(record, token, layer, x, answer);
        }
        whole += is_whole;
        card.finish();
    }

    // What the worker computes.
    int32_t compute(int32_t layer, int32_t count, const int32_t *experts, const int32_t *row_of, const uint16_t *rows,
                    float *outputs) {
        for (int32_t i = 0; i < count; ++i)
            for (int32_t at = 0; at < kHidden; ++at) {
                SWITCHYARD_TURN();
                outputs[i * kHidden + at] = output_of(layer, experts[i], rows[row_of[i] * kHidden + at]);
            }
        return 0;
    }

    // The host's policy: takes an expert's slot, or has an expert copied into one, as often as there is room.
    void change_slots() {
        settle();
        if (under_way >= 0) return;
        const auto slot = static_cast<int32_t>(policy() % kSlots);
        if (taken[slot] >= 0) {
            ticket = host.change(taken[slot] / kExperts, taken[slot] % kExperts, kMissed);
            taken[slot] = -1;
        }
        const auto key = static_cast<int32_t>(policy() % (kLayers * kExperts));
        for (int32_t other : taken) if (other == key) return;
        taken[slot] = key;
        under_way = slot;
        is_copying = false;
        settle();
    }
    // Starts the copy under way once nobody reads the slot, and names the expert when it is there.
    void settle() {
        if (under_way < 0) return;
        const int32_t key = taken[under_way];
        if (!is_copying) {
            if (mistake != kOverwritesAtOnce && !host.has_finished(ticket)) return;
            is_copying = true;
            target = under_way;
            brought = key;
            copying.store(++copies);
            if (mistake == kNamesTooEarly) host.change(key / kExperts, key % kExperts, under_way);
        }
        if (copied.load() < copies) return;
        host.change(key / kExperts, key % kExperts, under_way);
        under_way = -1;
    }
    // The copy engine: whether there was anything to copy.
    bool copy() {
        const uint64_t wanted = copying.load();
        if (wanted == done) return false;
        for (int32_t &word : slots[target]) {
            SWITCHYARD_TURN();
            word = brought;
        }
        copied.store(done = wanted);
        return true;
    }

    // Of a token that is quiet.
    void check_records(bool is_asked) {
        for (int32_t layer = 0; layer < kLayers; ++layer) {
            const SwitchyardCardLayer &record = memory.record(host.token(), layer);
            if (record.token != host.token()) fail("a record is of another token", host.token(), layer);
            if (is_asked && (record.missed > 0) != (record.answered_ns > 0)) fail("an answer without need", host.token());
        }
    }

    const SwitchyardExchangeShape shape;
    std::vector<uint8_t> block;
    const ExchangeMemory memory;
    ExchangeHost host;
    ExchangeWorker worker;
    const Mistake mistake;
    int64_t hits = 0, misses = 0, whole = 0;
    uint64_t copies = 0, done = 0;

    void choose(int64_t *chosen) {
        const auto first = static_cast<int32_t>(drawn() % kExperts), step = static_cast<int32_t>(1 + drawn() % 2);
        for (int32_t i = 0; i < kChosen; ++i) chosen[i] = (first + i * step) % kExperts;
    }

  private:
    void check(const SwitchyardCardLayer &record, uint64_t token, int32_t layer, const uint16_t *x, const float *answer) {
        int32_t at = 0;
        for (int32_t expert = 0; expert < kExperts; ++expert)
            for (int32_t i = 0; i < record.rows * kChosen; ++i) {
                if (record.experts[i] != expert || record.slots[i] >= 0) continue;
                for (int32_t number = 0; number < kHidden; ++number) {
                    SWITCHYARD_TURN();
                    const float wanted = output_of(layer, expert, x[i / kChosen * kHidden + number]);
                    if (answer[at * kHidden + number] != wanted) fail("a wrong answer", token, expert);
                }
                ++at;
                ++misses;
            }
        if (at != record.missed) fail("not all misses are answered", token, at);
    }

  public:
    std::mt19937_64 drawn, policy;
    int32_t slots[kSlots][kWords];

  private:
    std::vector<int32_t> taken;  // the expert that each slot has or gets
    int32_t under_way = -1;      // a slot that is being filled
    bool is_copying = false;
    uint64_t ticket = 0;
    Flag copying, copied;  // orders to the copy engine, and those carried out
    int32_t target = 0, brought = 0;
};
