// Plain C interface of tokens that a card runs by itself while a thread of the host computes the experts that have no
// slot on it; exchange.h says how the two understand each other.
#pragma once
#include "switchyard_kernels.h"

// A token here is a step: of one token of a model, or of a few rows that are computed together.
enum { SWITCHYARD_MOST_CHOSEN = 32, SWITCHYARD_MOST_VISITS = 128 };  // experts of a row and layer; of all rows

// What became of a token.
enum {
    SWITCHYARD_TOKEN_RUNS = -1,
    SWITCHYARD_TOKEN_CANCELLED = 1,
    SWITCHYARD_TOKEN_FAILED = 2,
    SWITCHYARD_TOKEN_OVERDUE = 3
};

// layers: with experts.  experts: most of a layer.  hidden: of a row.  most: experts that a row chooses in a layer, up to
// SWITCHYARD_MOST_CHOSEN.  rows: most of a token; these choose up to SWITCHYARD_MOST_VISITS.  depth: tokens whose records are
// kept.
typedef struct {
    int32_t layers, experts, hidden, most, rows, depth;
} SwitchyardExchangeShape;

// What a layer did in a token, by the clock of Python's time.perf_counter_ns: when it looked up its experts, asked for
// the missed ones, had computed those with slots, and had all; when the host's thread began and ended to answer.  0: it
// did not ask.
typedef struct {
    uint64_t token;
    int64_t begun_ns, posted_ns, computed_ns, joined_ns;
    int64_t taken_ns, answered_ns;
    int64_t rows;
    int32_t count, missed;                   // experts of each row; visits of all rows to experts that have no slot
    int32_t experts[SWITCHYARD_MOST_VISITS];  // [rows, count]
    int32_t slots[SWITCHYARD_MOST_VISITS];    // -1: missed; -2: no expert
} SwitchyardCardLayer;

// Where everything lies in the memory of an exchange, in bytes from its begin: for a real card's kernels, which get these as
// numbers.
typedef struct {
    int64_t rows, answer, records, tables[2];
} SwitchyardExchangeLayout;

typedef struct SwitchyardExchange SwitchyardExchange;

SWITCHYARD_API int64_t switchyard_exchange_bytes(const SwitchyardExchangeShape *shape);
// memory: of so many bytes, a multiple of 128, pinned for a real card; it is the exchange's until that is destroyed.  layers:
// [layers] the experts in RAM, from which the pool computes missed ones; it serves one exchange at a time, and lives longer.  limit_ns: how long
// the card waits for an answer.  Null: out of memory.
SWITCHYARD_API SwitchyardExchange *switchyard_exchange_create(const SwitchyardExchangeShape *shape, void *memory,
                                                              SwitchyardPool *pool,
                                                              const SwitchyardExperts *const *layers,
                                                              int64_t limit_ns);
SWITCHYARD_API void switchyard_exchange_layout(const SwitchyardExchange *exchange, SwitchyardExchangeLayout *layout);
// No token may be under way.
SWITCHYARD_API void switchyard_exchange_destroy(SwitchyardExchange *exchange);

// From the next token on the emulated card computes its experts before it asks for those it missed: the two take the time
// that each would take alone, for who models a card's time.
SWITCHYARD_API void switchyard_exchange_in_turn(SwitchyardExchange *exchange);
// From the next token on an expert is in this slot, or, with -1, in none.  No slot of which an expert was told to have
// gone is overwritten before the token under way has ended.
SWITCHYARD_API void switchyard_exchange_change(SwitchyardExchange *exchange, int32_t layer, int32_t expert, int32_t slot);
// Begins a token of the emulated card, which the caller computes: its number.
SWITCHYARD_API uint64_t switchyard_exchange_start(SwitchyardExchange *exchange);
// Ends it: 0, or SWITCHYARD_TOKEN_*.
SWITCHYARD_API int32_t switchyard_exchange_end(SwitchyardExchange *exchange);
// Waits up to timeout_ns for the end of a real card's token, which its last kernel tells, and meanwhile computes what is
// missed, as the pool's worker does: 0, or SWITCHYARD_TOKEN_*.
SWITCHYARD_API int32_t switchyard_exchange_wait(SwitchyardExchange *exchange, int64_t timeout_ns);
// The token under way waits for nothing any more.  On any thread.
SWITCHYARD_API void switchyard_exchange_cancel(SwitchyardExchange *exchange);
// [layers] of the last token, which has ended.
SWITCHYARD_API const SwitchyardCardLayer *switchyard_exchange_records(const SwitchyardExchange *exchange);
