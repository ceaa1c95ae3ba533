// Kernels of latent attention as functions, as kernels.h has those of products.
#pragma once
#include "latent_attention.cu"
#include "latent_queries.cu"
#include "latent_values.cu"

template <class Format>
bool emulate_expansion(const char* part, emulated::Index grid, std::uint64_t seed, const void* arguments) {
    const bool is_first = std::strcmp(part, "latent_queries_kernel") == 0;
    if (!is_first && std::strcmp(part, "latent_values_kernel") != 0) return false;
    emulated::run(grid, THREADS, seed, [&] {
        if (is_first) find_latent_queries<Format>(*static_cast<const LatentQueries*>(arguments));
        else find_latent_values<Format>(*static_cast<const LatentValues*>(arguments));
    });
    return true;
}

// Each is compiled apart, see unit.cpp.
#define EXPANSIONS(Format) template bool emulate_expansion<Format>(const char*, emulated::Index, std::uint64_t, const void*)
extern EXPANSIONS(Int8);
extern EXPANSIONS(Int4);
extern EXPANSIONS(Lut4);
extern EXPANSIONS(PlainBf16);
extern EXPANSIONS(PlainFp16);
extern EXPANSIONS(PlainFp32);

template <class Kv>
bool emulate_over_latents(emulated::Index grid, std::uint64_t seed, const LatentAttention& arguments) {
    emulated::run(grid, THREADS, seed, [&] { attend_to_latents<Kv>(arguments); });
    return true;
}

#define LATENTS(Kv) template bool emulate_over_latents<Kv>(emulated::Index, std::uint64_t, const LatentAttention&)
extern LATENTS(KvBf16);
extern LATENTS(KvFp16);
extern LATENTS(KvFp32);

inline bool emulate_latents(const char* entry, const char* kind, emulated::Index grid, std::uint64_t seed, const void* arguments) {
    const auto is = [kind](const char* name) { return std::strcmp(kind, name) == 0; };
    if (std::strcmp(entry, "latent_attention_kernel") == 0) {
        const LatentAttention& attention = *static_cast<const LatentAttention*>(arguments);
        if (is("KvBf16")) return emulate_over_latents<KvBf16>(grid, seed, attention);
        if (is("KvFp16")) return emulate_over_latents<KvFp16>(grid, seed, attention);
        if (is("KvFp32")) return emulate_over_latents<KvFp32>(grid, seed, attention);
        return false;
    }
    if (is("Int8")) return emulate_expansion<Int8>(entry, grid, seed, arguments);
    if (is("Int4")) return emulate_expansion<Int4>(entry, grid, seed, arguments);
    if (is("Lut4")) return emulate_expansion<Lut4>(entry, grid, seed, arguments);
    if (is("PlainBf16")) return emulate_expansion<PlainBf16>(entry, grid, seed, arguments);
    if (is("PlainFp16")) return emulate_expansion<PlainFp16>(entry, grid, seed, arguments);
    if (is("PlainFp32")) return emulate_expansion<PlainFp32>(entry, grid, seed, arguments);
    return false;
}
