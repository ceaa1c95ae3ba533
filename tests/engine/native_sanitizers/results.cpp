// Prints what every exported kernel gives for random cases, in turn, so that processors can be compared.
//
// Usage: results SEED ROUNDS ISA: a line for each result, its name and its bf16 numbers in hexadecimal digits.
#include "own_memory.h"

namespace {
void record(const char *name, const std::vector<uint16_t> &numbers) {
    std::printf("%s ", name);
    for (const uint16_t number : numbers) std::printf("%04x", number);
    std::printf("\n");
}
}  // namespace

#include "cases.h"

int main(int, char **argv) {
    const int32_t isa = std::atoi(argv[3]);
    require((switchyard_advertised_isas() >> isa & 1) != 0, "the processor does not have these instructions");
    require(switchyard_self_test(isa) == 0, "the self-test fails");
    switchyard_use_isa(isa);
    const OwnPool shared(3);
    go_through(shared.pool, static_cast<uint32_t>(std::atoi(argv[1])), std::atoi(argv[2]));
    return 0;
}
