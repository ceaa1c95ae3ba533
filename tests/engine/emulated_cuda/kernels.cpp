// Every kernel for the emulated card, by what it is compiled for on a card.
#include "kernels.h"

extern "C" int emulate(const char* entry, const char* const* defines, const unsigned int* grid, std::uint64_t seed, const void* arguments) {
    const emulated::Index size{grid[0], grid[1], grid[2]};
    const auto is = [entry](const char* name) { return std::strcmp(entry, name) == 0; };
    bool is_known = false;
    if (is("product_kernel")) {
        is_known = emulate_product(defines[0], std::atoi(defines[1]), size, seed, *static_cast<const ProductArguments*>(arguments));
    } else if (is("unpack_kernel")) {
        is_known = emulate_unpack(defines[0], size, seed, *static_cast<const UnpackArguments*>(arguments));
    } else if (is("round_rows_kernel")) {
        is_known = emulate_round_rows(size, seed, *static_cast<const RoundArguments*>(arguments));
    } else if (is("group_product_kernel")) {
        const bool has_units = seed / 2 % 2 == 0;  // every other product; both give the same bits
        is_known = emulate_group_product(defines[0], std::atoi(defines[1]), has_units, size, seed, *static_cast<const GroupProductArguments*>(arguments));
    } else if (is("norm_kernel")) {
        is_known = emulate_norm(size, seed, *static_cast<const NormArguments*>(arguments));
    } else if (is("angles_kernel")) {
        is_known = emulate_angles(size, seed, *static_cast<const AngleArguments*>(arguments));
    } else if (is("rotary_kernel")) {
        is_known = emulate_rotary(size, seed, *static_cast<const RotaryArguments*>(arguments));
    } else if (is("router_kernel")) {
        is_known = emulate_router(defines[0], defines[1], size, seed, *static_cast<const RouterArguments*>(arguments));
    } else if (is("exchange_kernel")) {
        is_known = emulate_exchange<THREADS>(defines[0], size, seed, *static_cast<const ExchangeArguments*>(arguments));
    }
    return is_known ? 0 : 1;
}
