// A card that is a thread of this machine: whoever computes a token's layers between switchyard_exchange_start and _end.
#pragma once
#include <optional>
#include <vector>

#include "exchange_thread.h"

struct SwitchyardExchange {
    SwitchyardExchange(const SwitchyardExchangeShape &shape, void *block, SwitchyardPool *pool,
                       const SwitchyardExperts *const *of_layers, int64_t limit);

    const ExchangeMemory memory;
    ExchangeHost host;
    std::optional<ExchangeCard> card;  // the token under way
    const int64_t limit_ns;
    bool in_turn = false;  // whether the card computes before it asks
    const std::vector<const SwitchyardExperts *> layers;
    uint64_t seen = 0;      // of the pool's work by who waits for a real card's token
    ExchangeThread thread;  // last: it ends first
};
