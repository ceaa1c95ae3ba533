// Included before many_amx.cpp: tiles of AMX as plain arrays, for processors without them, but with the vectors beside them.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

constexpr int kRows = 16, kRowBytes = 64, kTiles = 8;
struct State {
    uint8_t tile[kTiles][kRows][kRowBytes];
    bool configured;
};
inline State &state() {
    static thread_local State own;
    return own;
}
inline uint8_t (&tile(int number))[kRows][kRowBytes] {
    if (!state().configured || number < 0 || number >= kTiles) {
        std::fprintf(stderr, "tiles: one is used that is not configured\n");
        std::abort();
    }
    return state().tile[number];
}

// What ldtilecfg reads: palette 1, eight full tiles.
inline void configure(const void *config) {
    const auto *bytes = static_cast<const uint8_t *>(config);
    bool whole = bytes[0] == 1 && bytes[1] == 0;
    for (int i = 0; i < kTiles; ++i) whole &= bytes[16 + 2 * i] == kRowBytes && bytes[17 + 2 * i] == 0 && bytes[48 + i] == kRows;
    state().configured = whole;
    std::memset(state().tile, 0xff, sizeof state().tile);  // no zeros by chance
}
inline void release() { state().configured = false; }
inline void zero(int to) { std::memset(tile(to), 0, sizeof tile(to)); }
inline void load(int to, const void *from, size_t stride) {
    for (int row = 0; row < kRows; ++row) std::memcpy(tile(to)[row], static_cast<const uint8_t *>(from) + row * stride, kRowBytes);
}
inline void store(int from, void *to, size_t stride) {
    for (int row = 0; row < kRows; ++row) std::memcpy(static_cast<uint8_t *>(to) + row * stride, tile(from)[row], kRowBytes);
}
inline float widened(const uint8_t *at) {
    const uint32_t bits = static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 24;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// to[m][n] += sum over k of a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1]
inline void multiply_bf16(int to, int a, int b) {
    for (int m = 0; m < kRows; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum;
            std::memcpy(&sum, tile(to)[m] + 4 * n, 4);
            for (int k = 0; k < 16; ++k)
                for (int i = 0; i < 2; ++i) sum += widened(tile(a)[m] + 4 * k + 2 * i) * widened(tile(b)[k] + 4 * n + 2 * i);
            std::memcpy(tile(to)[m] + 4 * n, &sum, 4);
        }
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_release emulated::release
#define SWITCHYARD_CONFIGURE_TILES(config) emulated::configure(&(config))
