// The kernels of attention for the emulated card: a library of their own, as they take long to compile.
#include "attention_kernels.h"

extern "C" int emulate(const char*, const char* const* defines, const unsigned int* grid, std::uint64_t seed, const void* arguments) {
    const emulated::Index size{grid[0], grid[1], grid[2]};
    return emulate_attention(defines[0], std::atoi(defines[1]), std::atoi(defines[2]), size, seed, *static_cast<const AttentionArguments*>(arguments)) ? 0 : 1;
}
