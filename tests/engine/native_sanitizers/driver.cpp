// Goes through all cases with several threads at once: for sanitizers to watch.
//
// Usage: driver SEED ROUNDS ISA...
#include <chrono>
#include <thread>

#include "own_memory.h"

namespace {
void record(const char *, const std::vector<uint16_t> &) {}
}  // namespace

#include "cases.h"

int main(int argc, char **argv) {
    const auto seed = static_cast<uint32_t>(std::atoi(argv[1]));
    const int rounds = std::atoi(argv[2]);
    require(switchyard_abi() > 0 && (switchyard_advertised_isas() & 1) != 0, "the portable kernels are not there");
    for (int argument = 3; argument < argc; ++argument) {
        const int32_t isa = std::atoi(argv[argument]);
        require(switchyard_self_test(isa) == 0, "the self-test fails");
        switchyard_use_isa(isa);
        {
            const OwnPool shared(3), own(2);
            std::thread first(go_through, shared.pool, seed, rounds);
            std::thread second(go_through, shared.pool, seed + 1, rounds);  // two callers of one pool take turns
            std::thread third(go_through, own.pool, seed + 2, rounds);
            first.join(), second.join(), third.join();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the workers fall asleep, and wake again
            go_through(shared.pool, seed + 3, 1);
        }
        for (int32_t threads = 0; threads < 5; ++threads) const OwnPool unused(threads);
    }
    return 0;
}
