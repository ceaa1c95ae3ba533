// Kernels of attention as functions, as kernels.h has those of products.
#pragma once
#include "attention.cu"

template <class Kv, int WIDTH>
bool emulate_heads(int rows, emulated::Index grid, std::uint64_t seed, const AttentionArguments& arguments) {
    const auto run = [&](void (*kernel)(const AttentionArguments&)) {
        emulated::run(grid, THREADS, seed, [&] { kernel(arguments); });
        return true;
    };
    switch (rows) {
        case 1: return run(attend<Kv, WIDTH, 1>);
        case 4: return run(attend<Kv, WIDTH, 4>);
        case 8: return run(attend<Kv, WIDTH, 8>);
        default: return false;
    }
}

// Each is compiled apart, see unit.cpp.
#define HEADS(Kv, WIDTH) template bool emulate_heads<Kv, WIDTH>(int, emulated::Index, std::uint64_t, const AttentionArguments&)
extern HEADS(KvBf16, 64);
extern HEADS(KvBf16, 128);
extern HEADS(KvBf16, 256);
extern HEADS(KvFp16, 64);
extern HEADS(KvFp16, 128);
extern HEADS(KvFp16, 256);
extern HEADS(KvFp32, 64);
extern HEADS(KvFp32, 128);
extern HEADS(KvFp32, 256);
extern HEADS(KvInt8, 64);
extern HEADS(KvInt8, 128);
extern HEADS(KvInt8, 256);

template <class Kv>
bool emulate_width(int width, int rows, emulated::Index grid, std::uint64_t seed, const AttentionArguments& arguments) {
    switch (width) {
        case 64: return emulate_heads<Kv, 64>(rows, grid, seed, arguments);
        case 128: return emulate_heads<Kv, 128>(rows, grid, seed, arguments);
        case 256: return emulate_heads<Kv, 256>(rows, grid, seed, arguments);
        default: return false;
    }
}

inline bool emulate_attention(const char* kv, int width, int rows, emulated::Index grid, std::uint64_t seed, const AttentionArguments& arguments) {
    const auto is = [kv](const char* name) { return std::strcmp(kv, name) == 0; };
    if (is("KvBf16")) return emulate_width<KvBf16>(width, rows, grid, seed, arguments);
    if (is("KvFp16")) return emulate_width<KvFp16>(width, rows, grid, seed, arguments);
    if (is("KvFp32")) return emulate_width<KvFp32>(width, rows, grid, seed, arguments);
    if (is("KvInt8")) return emulate_width<KvInt8>(width, rows, grid, seed, arguments);
    return false;
}
