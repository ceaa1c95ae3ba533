#include "exchange.h"

#include <new>

#include "clock.h"
#include "emulated_card.h"
#include "experts_call.h"

SwitchyardExchange::SwitchyardExchange(const SwitchyardExchangeShape &shape, void *block, SwitchyardPool *pool,
                                       const SwitchyardExperts *const *of_layers, int64_t limit)
    : memory(shape, block),
      host(memory),
      limit_ns(limit),
      layers(of_layers, of_layers + shape.layers),
      thread(memory, *pool, [this, pool](int32_t layer, int32_t count, const int32_t *experts, const int32_t *row_of,
                                         const uint16_t *x, float *outputs) {
          return experts_apart(pool, *layers[static_cast<size_t>(layer)], count, experts, row_of, x, outputs);
      }) {}

SWITCHYARD_API int64_t switchyard_exchange_bytes(const SwitchyardExchangeShape *shape) {
    return ExchangeMemory::bytes(*shape);
}

SWITCHYARD_API SwitchyardExchange *switchyard_exchange_create(const SwitchyardExchangeShape *shape, void *memory,
                                                              SwitchyardPool *pool,
                                                              const SwitchyardExperts *const *layers,
                                                              int64_t limit_ns) try {
    return new SwitchyardExchange(*shape, memory, pool, layers, limit_ns);
} catch (const std::exception &) {  // no memory, or no thread
    return nullptr;
}

SWITCHYARD_API void switchyard_exchange_layout(const SwitchyardExchange *exchange, SwitchyardExchangeLayout *layout) {
    const ExchangeMemory &memory = exchange->memory;
    const auto *begin = reinterpret_cast<const uint8_t *>(memory.flags);
    const auto distance = [begin](const void *to) { return static_cast<const uint8_t *>(to) - begin; };
    *layout = {distance(memory.rows), distance(memory.answer), distance(memory.records),
               {distance(memory.tables[0]), distance(memory.tables[1])}};
}

SWITCHYARD_API void switchyard_exchange_destroy(SwitchyardExchange *exchange) {
    exchange->host.stop();
    delete exchange;
}

SWITCHYARD_API void switchyard_exchange_in_turn(SwitchyardExchange *exchange) { exchange->in_turn = true; }

SWITCHYARD_API void switchyard_exchange_change(SwitchyardExchange *exchange, int32_t layer, int32_t expert, int32_t slot) {
    exchange->host.change(layer, expert, slot);
}

SWITCHYARD_API uint64_t switchyard_exchange_start(SwitchyardExchange *exchange) {
    uint64_t token = 0;
    // What a cancelled token has asked for is still being computed.
    spin_until([&] { return (token = exchange->host.start()) != 0; });
    exchange->thread.wake();
    exchange->card.emplace(exchange->memory, exchange->limit_ns);
    return token;
}

SWITCHYARD_API int32_t switchyard_exchange_end(SwitchyardExchange *exchange) {
    exchange->card->finish();
    spin_until([&] { return exchange->host.is_quiet(); });
    return exchange->host.result();
}

SWITCHYARD_API int32_t switchyard_exchange_wait(SwitchyardExchange *exchange, int64_t timeout_ns) {
    const int64_t begun_ns = clock_ns();
    Pause pause;
    while (!exchange->host.is_quiet()) {
        if (exchange->thread.help(exchange->seen)) continue;
        if (clock_ns() - begun_ns > timeout_ns) return SWITCHYARD_TOKEN_RUNS;
        pause();
    }
    return exchange->host.result();
}

SWITCHYARD_API void switchyard_exchange_cancel(SwitchyardExchange *exchange) { exchange->host.cancel(); }

SWITCHYARD_API const SwitchyardCardLayer *switchyard_exchange_records(const SwitchyardExchange *exchange) {
    return &exchange->memory.record(exchange->host.token(), 0);
}
