// The kernels of latent attention for the emulated card: a library of their own, as few tests ask for them.
#include "latent_kernels.h"

extern "C" int emulate(const char* entry, const char* const* defines, const unsigned int* grid, std::uint64_t seed, const void* arguments) {
    return emulate_latents(entry, defines[0], emulated::Index{grid[0], grid[1], grid[2]}, seed, arguments) ? 0 : 1;
}
