// Every kernel for the emulated card, by what it is compiled for on a card.
#include "kernels.h"

extern "C" int emulate(const char* entry, const char* const* defines, const unsigned int* grid, std::uint64_t seed, const void* arguments) {
    const emulated::Index size{grid[0], grid[1], grid[2]};
    if (std::strcmp(entry, "product_kernel") != 0) return 1;
    return emulate_product(defines[0], std::atoi(defines[1]), size, seed, *static_cast<const ProductArguments*>(arguments)) ? 0 : 1;
}
