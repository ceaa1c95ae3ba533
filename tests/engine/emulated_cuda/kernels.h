// The kernels as functions: a template of a card's program is called by the names that it would be compiled for.
#pragma once
#include "angles.cu"
#include "exchange.cu"
#include "group_products.cu"
#include "norm.cu"
#include "products.cu"
#include "rotary.cu"
#include "round_rows.cu"
#include "router.cu"
#include "unpack.cu"

template <class Format>
bool emulate_rows(int rows, emulated::Index grid, std::uint64_t seed, const ProductArguments& arguments) {
    const auto run = [&](void (*kernel)(const ProductArguments&)) {
        emulated::run(grid, THREADS, seed, [&] { kernel(arguments); });
        return true;
    };
    switch (rows) {
        case 1: return run(product<Format, 1>);
        case 2: return run(product<Format, 2>);
        case 4: return run(product<Format, 4>);
        case 8: return run(product<Format, 8>);
        default: return false;
    }
}

// What compiles longest is compiled apart, see unit.cpp.
#define PRODUCTS(Format) template bool emulate_rows<Format>(int, emulated::Index, std::uint64_t, const ProductArguments&)
extern PRODUCTS(Int8);
extern PRODUCTS(Int4);
extern PRODUCTS(Lut4);
extern PRODUCTS(PlainBf16);
extern PRODUCTS(PlainFp16);
extern PRODUCTS(PlainFp32);

// Those whose runs have one scale or two, minima or none, blocks of several sizes, grids or none; the others' blocks are only
// unpacked, see emulate_unpack.
#define MULTIPLIED(DO) DO(Q8_0) DO(Q4_K) DO(Q6_K) DO(Q2_K) DO(IQ2_XXS) DO(IQ1_M) DO(NVFP4)
typedef Blocks<Q4_K, Q6_K> MixedBlocks;
#define OF_BLOCKS(Type) extern PRODUCTS(Blocks<Type>);
MULTIPLIED(OF_BLOCKS)
#undef OF_BLOCKS
extern PRODUCTS(MixedBlocks);

inline bool emulate_product(const char* format, int rows, emulated::Index grid, std::uint64_t seed, const ProductArguments& arguments) {
    const auto is = [format](const char* name) { return std::strcmp(format, name) == 0; };
    if (is("Int8")) return emulate_rows<Int8>(rows, grid, seed, arguments);
    if (is("Int4")) return emulate_rows<Int4>(rows, grid, seed, arguments);
    if (is("Lut4")) return emulate_rows<Lut4>(rows, grid, seed, arguments);
    if (is("PlainBf16")) return emulate_rows<PlainBf16>(rows, grid, seed, arguments);
    if (is("PlainFp16")) return emulate_rows<PlainFp16>(rows, grid, seed, arguments);
    if (is("PlainFp32")) return emulate_rows<PlainFp32>(rows, grid, seed, arguments);
#define OF_BLOCKS(Type) if (is("Blocks<" #Type ">")) return emulate_rows<Blocks<Type>>(rows, grid, seed, arguments);
    MULTIPLIED(OF_BLOCKS)
#undef OF_BLOCKS
    if (is("Blocks<Q4_K,Q6_K>")) return emulate_rows<MixedBlocks>(rows, grid, seed, arguments);
    return false;
}

inline bool emulate_unpack(const char* format, emulated::Index grid, std::uint64_t seed, const UnpackArguments& arguments) {
    const auto run = [&](void (*kernel)(const UnpackArguments&)) {
        emulated::run(grid, THREADS, seed, [&] { kernel(arguments); });
        return true;
    };
    const auto is = [format](const char* name) { return std::strcmp(format, name) == 0; };
    if (is("Int8")) return run(unpack<Int8>);
    if (is("Int4")) return run(unpack<Int4>);
    if (is("Lut4")) return run(unpack<Lut4>);
#define OF_BLOCKS(Type, number) if (is(#Type)) return run(unpack_blocks<Type>);
    BLOCK_TYPES(OF_BLOCKS)
#undef OF_BLOCKS
    return false;
}

inline bool emulate_norm(emulated::Index grid, std::uint64_t seed, const NormArguments& arguments) {
    emulated::run(grid, THREADS, seed, [&] { norm(arguments); });
    return true;
}

inline bool emulate_angles(emulated::Index grid, std::uint64_t seed, const AngleArguments& arguments) {
    emulated::run(grid, THREADS, seed, [&] { find_angles(arguments); });
    return true;
}

inline bool emulate_rotary(emulated::Index grid, std::uint64_t seed, const RotaryArguments& arguments) {
    emulated::run(grid, THREADS, seed, [&] { rotate(arguments); });
    return true;
}

inline bool emulate_router(const char* states, const char* weights, emulated::Index grid, std::uint64_t seed, const RouterArguments& arguments) {
    const auto run = [&](void (*kernel)(const RouterArguments&)) {
        emulated::run(grid, THREADS, seed, [&] { kernel(arguments); });
        return true;
    };
    const auto are = [&](const char* first, const char* second) { return std::strcmp(states, first) == 0 && std::strcmp(weights, second) == 0; };
    if (are("Bf16", "Bf16")) return run(route<Bf16, Bf16>);
    if (are("Fp16", "Fp16")) return run(route<Fp16, Fp16>);
    if (are("Fp32", "Fp32")) return run(route<Fp32, Fp32>);
    if (are("Bf16", "Fp32")) return run(route<Bf16, Fp32>);
    if (are("Fp16", "Fp32")) return run(route<Fp16, Fp32>);
    return false;
}

inline bool emulate_round_rows(emulated::Index grid, std::uint64_t seed, const RoundArguments& arguments) {
    emulated::run(grid, THREADS, seed, [&] { round_rows(arguments); });
    return true;
}

template <class Format>
bool emulate_tiles(int tiles, bool has_units, emulated::Index grid, std::uint64_t seed, const GroupProductArguments& arguments) {
    const auto run = [&](void (*kernel)(const GroupProductArguments&)) {
        emulated::run(grid, THREADS, seed, [&] { kernel(arguments); });
        return true;
    };
    switch (tiles) {
        case 2: return run(has_units ? multiply_groups<Format, 2, MatrixUnits> : multiply_groups<Format, 2, Dp4a>);
        case 8: return run(has_units ? multiply_groups<Format, 8, MatrixUnits> : multiply_groups<Format, 8, Dp4a>);
        default: return false;
    }
}

#define GROUPS(Format) template bool emulate_tiles<Format>(int, bool, emulated::Index, std::uint64_t, const GroupProductArguments&)
extern GROUPS(Int8);
extern GROUPS(Int4);
extern GROUPS(Lut4);

#define OF_BLOCKS(Type) extern GROUPS(Blocks<Type>);
MULTIPLIED(OF_BLOCKS)
#undef OF_BLOCKS
extern GROUPS(MixedBlocks);

inline bool emulate_group_product(const char* format, int tiles, bool has_units, emulated::Index grid, std::uint64_t seed, const GroupProductArguments& arguments) {
    const auto is = [format](const char* name) { return std::strcmp(format, name) == 0; };
    if (is("Int8")) return emulate_tiles<Int8>(tiles, has_units, grid, seed, arguments);
    if (is("Int4")) return emulate_tiles<Int4>(tiles, has_units, grid, seed, arguments);
    if (is("Lut4")) return emulate_tiles<Lut4>(tiles, has_units, grid, seed, arguments);
#define OF_BLOCKS(Type) if (is("Blocks<" #Type ">")) return emulate_tiles<Blocks<Type>>(tiles, has_units, grid, seed, arguments);
    MULTIPLIED(OF_BLOCKS)
#undef OF_BLOCKS
    if (is("Blocks<Q4_K,Q6_K>")) return emulate_tiles<MixedBlocks>(tiles, has_units, grid, seed, arguments);
    return false;
}

template <int SIZE>
bool emulate_exchange(const char* part, emulated::Index grid, std::uint64_t seed, const ExchangeArguments& arguments) {
    const auto run = [&](void (*kernel)(const ExchangeArguments&)) {
        emulated::run(grid, SIZE, seed, [&] { kernel(arguments); });
        return true;
    };
    const auto is = [part](const char* name) { return std::strcmp(part, name) == 0; };
    if (is("begin")) return run(begin<SIZE>);
    if (is("post")) return run(post<SIZE>);
    if (is("join")) return run(join<SIZE>);
    if (is("finish")) return run(finish<SIZE>);
    return false;
}
