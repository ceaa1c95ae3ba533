// What a card and the host tell each other while the card runs a token: whom each layer chose, which of these had no
// slot, and what the host computed of those.  A token is one piece of work for the card; the host neither looks up nor
// launches anything inside it.
//
// Who writes what, in memory that both see (pinned and mapped where the card is a real one):
//   host    started: a token's number and which copy of the slot table it reads; cancelled; stopped; the other copy
//   card    the records of its layers, the rows that experts are asked about, posted, overdue, finished
//   worker  the outputs that it answers with, its stamps in a record, failed, answered
//
// Every flag has one writer, and a number in it that only grows: nothing is reset, so no reset can be late or lost.  A
// flag is stored with release after all that it announces, and loaded with acquire before any of that is read; a card
// does the same with .release.sys and .acquire.sys.  What is not a flag needs no order of its own:
//   - the rows, the record and its chosen experts are written before `posted`, and not again before `answered` has
//     reached it (one request at a time; after a cancel, the host starts no token before that);
//   - the answer is written after `posted` and before `answered`, and read after `answered`;
//   - a copy of the slot table is written by the host while no token reads it: the token under way reads the other one,
//     and the next one starts when that has finished;
//   - a slot is overwritten when `finished` has reached the ticket of the expert that left it: tokens up to that one may
//     find it in their table.  It is named in a table only after the new expert is in it.
//   - a record is written over when the host has started a token `depth` later, by which it says that it has read it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "clock.h"
#include "switchyard_exchange.h"

// Tests of interleavings let others go on here.
#ifndef SWITCHYARD_TURN
#define SWITCHYARD_TURN() ((void)0)
#endif

// Alone in its cache line and in the one that processors fetch along with it.
struct alignas(128) Flag {
    void store(uint64_t number) {
        SWITCHYARD_TURN();
        word.store(number, std::memory_order_release);
    }
    uint64_t load() const {
        SWITCHYARD_TURN();
        return word.load(std::memory_order_acquire);
    }
    std::atomic<uint64_t> word;
};

struct ExchangeFlags {
    // started: token * 2 + the copy of the table.  posted, answered, failed, overdue: sequence numbers of a token's layer.
    // finished, cancelled: tokens.  stopped: 1.
    Flag started, posted, answered, failed, overdue, finished, cancelled, stopped;
};

constexpr int32_t kMissed = -1, kNobody = -2;  // in place of a slot: an expert without one, an id that is no expert

// Where everything lies in the memory that both see.
class ExchangeMemory {
  public:
    ExchangeMemory(const SwitchyardExchangeShape &shape, void *memory)
        : shape(shape), flags(static_cast<ExchangeFlags *>(memory)) {
        auto *at = static_cast<uint8_t *>(memory) + sizeof(ExchangeFlags);
        rows = reinterpret_cast<uint16_t *>(take(at, row_bytes(shape)));
        answer = reinterpret_cast<float *>(take(at, answer_bytes(shape)));
        records = reinterpret_cast<SwitchyardCardLayer *>(take(at, record_bytes(shape)));
        for (auto &table : tables) table = reinterpret_cast<int32_t *>(take(at, table_bytes(shape)));
    }

    static int64_t bytes(const SwitchyardExchangeShape &shape) {
        return static_cast<int64_t>(sizeof(ExchangeFlags)) + padded(row_bytes(shape)) + padded(answer_bytes(shape)) +
               padded(record_bytes(shape)) + 2 * padded(table_bytes(shape));
    }

    SwitchyardCardLayer &record(uint64_t token, int32_t layer) const {
        return records[static_cast<int64_t>(token % static_cast<uint64_t>(shape.depth)) * shape.layers + layer];
    }
    // Layers of all tokens are numbered through from 1.
    uint64_t sequence(uint64_t token, int32_t layer) const {
        return (token - 1) * static_cast<uint64_t>(shape.layers) + static_cast<uint64_t>(layer) + 1;
    }
    uint64_t token_of(uint64_t sequence) const { return (sequence - 1) / static_cast<uint64_t>(shape.layers) + 1; }
    int32_t layer_of(uint64_t sequence) const {
        return static_cast<int32_t>((sequence - 1) % static_cast<uint64_t>(shape.layers));
    }

    const SwitchyardExchangeShape shape;
    ExchangeFlags *flags;
    uint16_t *rows;                // bf16 [rows, hidden]: the input of the missed experts
    float *answer;                 // [missed, hidden]: their outputs, by experts in ascending order, of each by rows
    SwitchyardCardLayer *records;  // [depth, layers]
    int32_t *tables[2];            // [layers, experts]: the slot of each, or kMissed

  private:
    static int64_t padded(int64_t bytes) { return (bytes + 127) & ~int64_t{127}; }
    static uint8_t *take(uint8_t *&at, int64_t bytes) {
        uint8_t *begin = at;
        at += padded(bytes);
        return begin;
    }
    static int64_t row_bytes(const SwitchyardExchangeShape &shape) { return int64_t{2} * shape.rows * shape.hidden; }
    static int64_t answer_bytes(const SwitchyardExchangeShape &shape) {
        return int64_t{4} * shape.rows * shape.most * shape.hidden;
    }
    static int64_t record_bytes(const SwitchyardExchangeShape &shape) {
        return static_cast<int64_t>(sizeof(SwitchyardCardLayer)) * shape.depth * shape.layers;
    }
    static int64_t table_bytes(const SwitchyardExchangeShape &shape) {
        return int64_t{4} * shape.layers * shape.experts;
    }
};

// The host's side: one thread at a time.
class ExchangeHost {
  public:
    // The memory is made empty: no expert has a slot.
    explicit ExchangeHost(const ExchangeMemory &memory) : memory_(memory) {
        for (Flag *flag : {&flags().started, &flags().posted, &flags().answered, &flags().failed, &flags().overdue,
                           &flags().finished, &flags().cancelled, &flags().stopped})
            flag->word.store(0, std::memory_order_relaxed);
        std::memset(memory_.records, 0, sizeof(SwitchyardCardLayer) * memory_.shape.depth * memory_.shape.layers);
        for (int32_t *table : memory_.tables) std::memset(table, 0xff, table_bytes());
    }

    // The number of the last token started.
    uint64_t token() const { return token_; }
    // Whether the last token has ended and nobody works for it any more.  Its records may be read then.
    bool is_quiet() const {
        return flags().finished.load() == token_ && flags().answered.load() == flags().posted.load();
    }
    // The number of a new token, which reads all changes so far; 0 while it is not quiet.
    uint64_t start() {
        if (!is_quiet()) return 0;
        read_ = changed_;
        flags().started.store(++token_ * 2 + static_cast<uint64_t>(read_));
        return token_;
    }
    // The card stops waiting for this token's misses; it still ends, with a result of no use.  On any thread.
    void cancel() { flags().cancelled.store(flags().started.load() / 2); }
    // As cancel, for good; the worker ends.  On any thread.
    void stop() { flags().stopped.store(1); }

    // An expert is in its slot from the next token on, or, with kMissed, has none.  Returns a ticket: what it left may be
    // overwritten when `has_finished` says so.
    uint64_t change(int32_t layer, int32_t expert, int32_t slot) {
        if (changed_ == read_) {  // nobody reads the other copy: one token is under way, and reads this one
            changed_ = 1 - read_;
            std::memcpy(memory_.tables[changed_], memory_.tables[read_], table_bytes());
        }
        SWITCHYARD_TURN();
        memory_.tables[changed_][int64_t{layer} * memory_.shape.experts + expert] = slot;
        return token_;
    }
    bool has_finished(uint64_t ticket) const { return flags().finished.load() >= ticket; }

    // What became of the last token, which is quiet: 0, or SWITCHYARD_TOKEN_*.
    int32_t result() const {
        const uint64_t first = memory_.sequence(token_, 0);
        if (flags().failed.load() >= first) return SWITCHYARD_TOKEN_FAILED;
        if (flags().overdue.load() >= first) return SWITCHYARD_TOKEN_OVERDUE;
        return flags().cancelled.load() >= token_ || flags().stopped.load() ? SWITCHYARD_TOKEN_CANCELLED : 0;
    }

  private:
    ExchangeFlags &flags() const { return *memory_.flags; }
    size_t table_bytes() const { return sizeof(int32_t) * memory_.shape.layers * memory_.shape.experts; }

    const ExchangeMemory memory_;
    uint64_t token_ = 0;
    int32_t read_ = 0, changed_ = 0;  // copies of the table: that of the last token, that of the next
};

// The card's side, as the emulated one runs it; exchange.cu is the same for real ones.
class ExchangeCard {
  public:
    // For the token that the host has started last.
    ExchangeCard(const ExchangeMemory &memory, int64_t limit_ns) : memory_(memory), limit_ns_(limit_ns) {
        const uint64_t started = flags().started.load();
        token_ = started / 2;
        table_ = memory_.tables[started % 2];
    }

    // Looks up a layer's experts, [rows, count], in the table.  How many of them are missed.
    int32_t look_up(int32_t layer, int32_t rows, int32_t count, const int64_t *experts) {
        SwitchyardCardLayer &record = memory_.record(token_, layer);
        record.token = token_;
        record.begun_ns = clock_ns();
        record.posted_ns = record.taken_ns = record.answered_ns = 0;
        record.rows = rows;
        record.count = count;
        record.missed = 0;
        for (int32_t i = 0; i < rows * count; ++i) {
            SWITCHYARD_TURN();
            const bool is_expert = experts[i] >= 0 && experts[i] < memory_.shape.experts;
            const int32_t slot = is_expert ? table_[int64_t{layer} * memory_.shape.experts + experts[i]] : kNobody;
            record.experts[i] = static_cast<int32_t>(experts[i]);
            record.slots[i] = slot;
            record.missed += slot == kMissed;
        }
        return record.missed;
    }
    // Asks for what was missed, of bf16 x [rows, hidden]; asks no more once the token is given up.
    void post(int32_t layer, const uint16_t *x) {
        if (is_given_up_ || flags().cancelled.load() >= token_ || flags().stopped.load()) {
            is_given_up_ = true;
            return;
        }
        SwitchyardCardLayer &record = memory_.record(token_, layer);
        record.posted_ns = clock_ns();
        SWITCHYARD_TURN();
        std::memcpy(memory_.rows, x, sizeof(uint16_t) * static_cast<size_t>(record.rows) * memory_.shape.hidden);
        flags().posted.store(memory_.sequence(token_, layer));
    }
    // Waits for what was asked for: [missed, hidden], by experts in ascending order, of each by rows.  Null: the token was
    // cancelled, or the answer took longer than the limit, after which nothing more is asked.
    template <class Pause> float *wait(int32_t layer, Pause pause) {
        const uint64_t sequence = memory_.sequence(token_, layer);
        int64_t begun_ns = 0;
        for (uint32_t round = 1; !is_given_up_; ++round) {
            if (flags().answered.load() >= sequence) return memory_.answer;
            pause();
            if (round % 64 != 0) continue;
            is_given_up_ = flags().cancelled.load() >= token_ || flags().stopped.load();
            const int64_t now_ns = clock_ns();
            if (begun_ns == 0) begun_ns = now_ns;
            if (is_given_up_ || now_ns - begun_ns < limit_ns_) continue;
            flags().overdue.store(sequence);
            is_given_up_ = true;
        }
        return nullptr;
    }
    // No slot and no answer is read after this.
    void finish() { flags().finished.store(token_); }

    SwitchyardCardLayer &record(int32_t layer) const { return memory_.record(token_, layer); }

  private:
    ExchangeFlags &flags() const { return *memory_.flags; }

    const ExchangeMemory memory_;
    const int64_t limit_ns_;
    uint64_t token_;
    const int32_t *table_;
    bool is_given_up_ = false;
};

// The worker's side: any thread that comes by, one at a time.
class ExchangeWorker {
  public:
    explicit ExchangeWorker(const ExchangeMemory &memory) : memory_(memory) {}

    // Computes what is asked for, if anything is and nobody does: compute(layer, count, experts in ascending order, the row
    // of each, rows, outputs) -> 0, or else the token has failed.
    template <class Compute> bool serve(Compute compute) {
        if (flags().posted.load() == flags().answered.load()) return false;
        SWITCHYARD_TURN();
        if (is_serving_.test_and_set(std::memory_order_acquire)) return false;
        const bool has_served = serve_alone(compute);
        SWITCHYARD_TURN();
        is_serving_.clear(std::memory_order_release);
        return has_served;
    }
    bool is_stopped() const { return flags().stopped.load() != 0; }
    // Whether a token is under way, so that something may be asked for at any moment, or one that was given up has asked and
    // ended before anybody looked.
    bool is_needed() const {
        return flags().started.load() / 2 != flags().finished.load() || flags().posted.load() != flags().answered.load();
    }

  private:
    template <class Compute> bool serve_alone(Compute compute) {
        const uint64_t sequence = flags().posted.load();
        if (sequence == served_) return false;
        const int32_t layer = memory_.layer_of(sequence);
        SwitchyardCardLayer &record = memory_.record(memory_.token_of(sequence), layer);
        record.taken_ns = clock_ns();
        int32_t experts[SWITCHYARD_MOST_VISITS], row_of[SWITCHYARD_MOST_VISITS], count = 0;
        for (int32_t i = 0; i < record.rows * record.count; ++i) {
            SWITCHYARD_TURN();
            if (record.slots[i] != kMissed) continue;
            int32_t at = count++;
            for (; at > 0 && experts[at - 1] > record.experts[i]; --at) {
                experts[at] = experts[at - 1];
                row_of[at] = row_of[at - 1];
            }
            experts[at] = record.experts[i];
            row_of[at] = i / record.count;
        }
        if (compute(layer, count, experts, row_of, memory_.rows, memory_.answer)) flags().failed.store(sequence);
        record.answered_ns = clock_ns();
        served_ = sequence;
        flags().answered.store(sequence);
        return true;
    }
    ExchangeFlags &flags() const { return *memory_.flags; }

    const ExchangeMemory memory_;
    std::atomic_flag is_serving_ = ATOMIC_FLAG_INIT;
    uint64_t served_ = 0;  // of whoever serves
};
