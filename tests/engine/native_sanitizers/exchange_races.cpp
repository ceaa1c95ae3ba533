// The exchange of a card and the host as it runs: a thread each for the host, the card, the pool's worker and the copy
// engine, with random delays.  The card and the worker help each other.  exchange_races SEED STEPS: layers of tokens.
#include <atomic>
#include <thread>

namespace {
thread_local uint64_t delays = 1;
void random_delay() {
    delays = delays * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t drawn = delays >> 33;
    if (drawn % 61 == 0) std::this_thread::yield();
    for (uint64_t i = drawn % 7 == 0 ? drawn % 40 : 0; i > 0; --i) std::atomic_signal_fence(std::memory_order_seq_cst);
}
}  // namespace
#define SWITCHYARD_TURN() random_delay()
#include "exchange_model.h"
#include "exchange_thread.h"

int main(int count, char **arguments) {
    if (count != 3) return 2;
    const auto seed = static_cast<uint64_t>(std::strtoull(arguments[1], nullptr, 10));
    const auto steps = static_cast<uint64_t>(std::strtoull(arguments[2], nullptr, 10));
    Model model(seed, kNone);
    uint64_t cancelled = 0;
    std::mt19937_64 drawn(seed + 1);
    {
        std::atomic<bool> ends{false};
        SwitchyardPool pool(2);
        ExchangeThread worker(model.memory, pool, [&](auto... arguments) {
            Phase items(kLayers, 2, 1);
            pool.run_all([](void *phase) { static_cast<Phase *>(phase)->run([](int64_t, int64_t) { random_delay(); }); }, &items);
            return model.compute(arguments...);
        });
        std::thread copier([&] {
            delays = seed + 2;
            while (!ends.load()) if (!model.copy()) std::this_thread::yield();
        });
        std::thread card([&] {
            delays = seed + 3;
            uint64_t seen = 0, joined = 0;
            while (!ends.load()) {
                const uint64_t token = model.memory.flags->started.load() / 2;
                if (token == seen) { std::this_thread::yield(); continue; }
                seen = token;
                Phase items(kLayers, 2, 1);
                worker.beside.run([](void *phase) { static_cast<Phase *>(phase)->run([](int64_t, int64_t) { random_delay(); }); },
                                  &items, [] {});
                model.run_card([&] { if (!worker.help(joined)) std::this_thread::yield(); });
            }
        });
        delays = seed + 4;
        while (model.host.token() * kLayers < steps) {
            while (model.host.start() == 0) std::this_thread::yield();
            worker.wake();
            const uint64_t token = model.host.token();
            const bool cancels = drawn() % 50 == 0;
            for (auto changes = drawn() % 4; changes > 0; --changes) model.change_slots();
            if (cancels) model.host.cancel();
            cancelled += cancels;
            while (!model.host.is_quiet()) std::this_thread::yield();
            if ((model.host.result() != 0) != cancels) fail("a wrong result", token);
            model.check_records(!cancels);
            if (drawn() % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn() % 300));
        }
        // The end comes in the middle of a token, as when a window is closed.
        while (model.host.start() == 0) std::this_thread::yield();
        worker.wake();
        model.host.stop();
        while (!model.host.has_finished(model.host.token())) std::this_thread::yield();
        ends = true;
        card.join();
        copier.join();
    }
    if (model.hits == 0 || model.misses == 0 || model.copies == 0) fail("nothing happened", 0);
    if (static_cast<uint64_t>(model.whole) + cancelled + 1 < model.host.token()) fail("a token was given up", 0);
    std::printf("%lld hits, %lld misses, %llu copies, %llu cancelled\n", static_cast<long long>(model.hits),
                static_cast<long long>(model.misses), static_cast<unsigned long long>(model.copies),
                static_cast<unsigned long long>(cancelled));
    return 0;
}
