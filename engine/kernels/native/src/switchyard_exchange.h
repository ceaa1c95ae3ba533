// Plain C interface of tokens that a card runs by itself while a thread of the host computes the experts that have no
// slot on it; exchange.h says how the two understand each other.
#pragma once
#include "switchyard_kernels.h"

enum { SWITCHYARD_MOST_CHOSEN = 32 };  // experts of a token and layer

// What became of a token.
enum { SWITCHYARD_TOKEN_CANCELLED = 1, SWITCHYARD_TOKEN_FAILED = 2, SWITCHYARD_TOKEN_OVERDUE = 3 };

// layers: with experts.  experts: most of a layer.  hidden: of a row.  most: experts that a token chooses in a layer, up
// to SWITCHYARD_MOST_CHOSEN.  depth: tokens whose records are kept.
typedef struct {
    int32_t layers, experts, hidden, most, depth;
} SwitchyardExchangeShape;

// What a layer did in a token, by the clock of Python's time.perf_counter_ns: when it looked up its experts, asked for
// the missed ones, had computed those with slots, and had all; when the host's thread began and ended to answer.  0: it
// did not ask.
typedef struct {
    uint64_t token;
    int64_t begun_ns, posted_ns, computed_ns, joined_ns;
    int64_t taken_ns, answered_ns;
    int32_t count, missed;
    int32_t experts[SWITCHYARD_MOST_CHOSEN];
    int32_t slots[SWITCHYARD_MOST_CHOSEN];  // -1: missed; -2: no expert
} SwitchyardCardLayer;
