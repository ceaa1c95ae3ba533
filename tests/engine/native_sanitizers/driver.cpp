// Goes through all cases with several threads at once: for sanitizers to watch.
//
// Usage: driver SEED ROUNDS ISA for one set of instructions, or several of them to have them beside each other.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "own_memory.h"

namespace {
void record(const char *, const std::vector<uint16_t> &) {}
}  // namespace

#include "cases.h"

namespace {

// Takes the stamps of steps that run meanwhile, and switches them off and on.
void take_stamps(const std::atomic<bool> &ending) {
    constexpr int64_t most = 16, most_chosen = 1 << 12;
    SwitchyardStamp stamps[most];
    std::vector<int32_t> chosen(most_chosen);
    int64_t last_ns = 0;
    for (int round = 0; !ending.load(); ++round) {
        require(switchyard_stamps(round % 8 != 0) != nullptr, "no memory for stamps");
        const int64_t taken = switchyard_take_stamps(most, stamps, most_chosen, chosen.data());
        const int32_t *expert = chosen.data();
        for (int64_t i = 0; i < taken; ++i) {
            require(stamps[i].begun_ns <= stamps[i].ended_ns && last_ns <= stamps[i].ended_ns, "a stamp out of order");
            last_ns = stamps[i].ended_ns;
            for (int64_t end = stamps[i].count; end; --end) require(*expert++ >= 0, "a stamp of nobody");
        }
        if (taken < most) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    switchyard_stamps(0);
}

// One set does everything, for three callers at once.
void go_through_one(int32_t isa, uint32_t seed, int rounds) {
    switchyard_use_isa(isa);
    {
        const OwnPool shared(3), own(2);
        std::atomic<bool> ending{false};
        std::thread reader(take_stamps, std::cref(ending));
        std::thread first(go_through, shared.pool, seed, rounds);
        std::thread second(go_through, shared.pool, seed + 1, rounds);  // two callers of one pool take turns
        std::thread third(go_through, own.pool, seed + 2, rounds);
        first.join(), second.join(), third.join();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the workers fall asleep, and wake again
        go_through(shared.pool, seed + 3, 1);
        ending = true;
        reader.join();
    }
    for (int32_t threads = 0; threads < 5; ++threads) const OwnPool unused(threads);
}

// Sets beside each other, as they are where each kind of work has the one that is fastest for it.
void go_through_mixed(const std::vector<int32_t> &isas, uint32_t seed, int rounds) {
    Random random(seed);
    for (int round = 0; round < rounds; ++round) {
        for (const int32_t use : {SWITCHYARD_FEW, SWITCHYARD_MANY, SWITCHYARD_ATTENTION})
            for (const int32_t format : {SWITCHYARD_BF16, SWITCHYARD_INT8, SWITCHYARD_INT4, SWITCHYARD_LUT4, SWITCHYARD_BLOCKS})
                switchyard_use_isa_for(use, format, isas[static_cast<size_t>(draw(random, 0, isas.size() - 1))]);
        const OwnPool pool(3);
        go_through(pool.pool, seed + static_cast<uint32_t>(round), 1);
    }
}

}  // namespace

int main(int argc, char **argv) {
    const auto seed = static_cast<uint32_t>(std::atoi(argv[1]));
    const int rounds = std::atoi(argv[2]);
    require(switchyard_abi() > 0 && (switchyard_advertised_isas() & 1) != 0, "the portable kernels are not there");
    std::vector<int32_t> isas;
    for (int argument = 3; argument < argc; ++argument) isas.push_back(std::atoi(argv[argument]));
    for (const int32_t isa : isas) require(switchyard_self_test(isa) == 0, "the self-test fails");
    if (isas.size() == 1)
        go_through_one(isas[0], seed, rounds);
    else
        go_through_mixed(isas, seed, rounds);
    return 0;
}
