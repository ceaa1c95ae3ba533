// What differs between instruction sets.
#pragma once
#include <cstdint>
#include <cstring>

// Dot products of bf16 rows.
struct KernelSet {
    // Spreads a bf16 vector of n into `out`, in the order that `dot_pair` reads: room for n rounded up to 32.
    void (*spread)(const uint16_t *x, int64_t n, float *out);
    // The same from floats.
    void (*spread_floats)(const float *x, int64_t n, float *out);
    // Dot products of two bf16 rows of n with a spread vector.
    void (*dot_pair)(const uint16_t *a, const uint16_t *b, const float *spread, int64_t n, float *a_out, float *b_out);
    // out[i] = sum over rows r of shares[r] * x[r, i]: x bf16 [rows, n].
    void (*mix_rows)(const uint16_t *x, int64_t rows, int64_t n, const float *shares, float *out);
    // The sum of whole 8-byte numbers, and of what bytes remain: reads memory as fast as this instruction set can.
    uint64_t (*sum_bytes)(const uint8_t *from, int64_t bytes);
};

constexpr int64_t kTileRows = 32, kHalfRows = 16, kGroup = 32;
constexpr int kMostVectors = 6;  // that any tile kernel takes at once

// A vector in groups of 32: a value is scales[group] * q.  Those that are multiplied together have their scales as far from
// their q, and their sums.
struct QuantisedVector {
    int8_t *q;       // [groups * 32], -127 to 127, padded with zeros
    float *scales;   // [groups]
    int32_t *sums;   // [groups]: of q
};

// A block of 32 rows in tiles: see switchyard_kernels.h.
struct TileRow {
    const uint8_t *weights;
    const uint16_t *scales;
    const uint8_t *zeros;
    const int8_t *table;
    int64_t groups;
};

// 16 rows of a tile.
struct HalfTile {
    const uint8_t *weights;
    const uint16_t *scales;
    const uint8_t *zeros;
    const int8_t *table;
};

// Where a fit of 16 rows x 32 columns goes: codes[column * 16 + row], scales and zeros [16].
struct FitTarget {
    uint8_t *codes;
    uint16_t *scales;
    uint8_t *zeros;       // null where the format has none
    const int8_t *table;  // to fit to, where the format has one
    int rounds;           // of the optimisation, where the format has one
};

// What a tile of 32 x 32 weights takes in each format, with scales in fp16 or in bf16, in the order of switchyard_kernels.h.
struct Format {
    int64_t code_bits;
    bool has_zeros, has_table, half_scales;
    constexpr int64_t half_bytes() const { return kHalfRows * kGroup * code_bits / 8; }
};
constexpr Format kFormats[] = {
    {16, false, false, false},  // bf16: not in tiles
    {8, false, false, true},    // int8
    {4, true, false, false},    // int4
    {4, false, true, false},    // lut4
    {0, false, false, false},   // blocks: not in tiles
};
constexpr int kSmallTable = 16;  // 16 products of such values with x fit 16 bits
constexpr int kFormatCount = sizeof kFormats / sizeof *kFormats;
constexpr int kTiledFormats = 4;  // those before it, but for bf16

// 16 rows and 32 columns of a block.
static inline HalfTile half_tile(const TileRow &row, const Format &format, int64_t group, int64_t half) {
    const int64_t at = group * kTileRows + half * kHalfRows;
    return {row.weights + (2 * group + half) * format.half_bytes(), row.scales + at,
            row.zeros ? row.zeros + at : nullptr, row.table};
}
// Writes the codes of a half, q[column * 16 + row].
static inline void put_codes(uint8_t *weights, bool nibbles, const uint8_t *q) {
    constexpr int rows = static_cast<int>(kHalfRows);
    uint8_t pairs[16 * rows];
    if (nibbles) {
        for (int i = 0; i < 16 * rows; ++i) pairs[i] = static_cast<uint8_t>(q[i] | q[16 * rows + i] << 4);
        q = pairs;
    }
    for (int j = 0; j < (nibbles ? 4 : 8); ++j, q += 4 * rows) {
        uint32_t words[rows];
        for (int i = 0; i < rows; ++i)
            words[i] = q[i] | uint32_t{q[rows + i]} << 8 | uint32_t{q[2 * rows + i]} << 16 | uint32_t{q[3 * rows + i]} << 24;
        std::memcpy(weights + j * 64, words, sizeof words);
    }
}

// Each weight format in tiles: one file format_*.h.
struct FormatKernels {
    // out: [count, 32] of the 32 rows with each of `count` <= `most` vectors.
    void (*dot)(const TileRow &row, const QuantisedVector *x, int count, float *out);
    // Half a tile as bf16, [16, 32].
    void (*expand)(const HalfTile &half, uint16_t *out);
    // Quantises w[column * 16 + row].
    void (*fit)(const float *w, const FitTarget &target);
};

// What reads and writes tiles.
struct TileKernels {
    // A group with an infinity keeps only the signs of its infinities; one with a NaN is NaN.
    void (*quantise_floats)(const float *x, int64_t n, const QuantisedVector &out);
    void (*quantise_bf16)(const uint16_t *x, int64_t n, const QuantisedVector &out);
    FormatKernels formats[kFormatCount];
    int most;  // vectors that `dot` takes at once, up to kMostVectors
};

struct ManyKernels;   // many_kernels.h
struct BlockKernels;  // block_kernels.h
struct RowKernels;    // row_kernels.h
struct AttendKernels;  // attend.h

// What is in use.  Each may be of another instruction set: the newest one is not the fastest everywhere.
struct Kernels {
    const KernelSet *rows;                   // bf16 rows with few vectors
    const AttendKernels *attention;          // attend.h
    const BlockKernels *blocks;
    const RowKernels *types;                 // rows in blocks, with few vectors
    int64_t alone;                           // vectors up to which rows of types without `multiply_few` are multiplied by themselves, as for one
    const TileKernels *tiles[kFormatCount];  // by format: with few vectors
    const ManyKernels *many[kFormatCount];   // by format
    const ManyKernels *exact;                // of numbers that bf16 would round
};

extern const KernelSet kPortableKernels;
extern const TileKernels kPortableTiles;
#if defined(__x86_64__) || defined(_M_X64)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const TileKernels kAvx2Tiles;
extern const TileKernels *const kAvxVnniTiles;  // null if the compiler does not know the instructions
extern const TileKernels kAvx512Tiles;
extern const TileKernels kAvx512VnniTiles;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const KernelSet kNeonKernels;
extern const TileKernels kNeonTiles;
extern const TileKernels kNeonDotTiles;
#endif

static inline float from_bf16(uint16_t value) {
    union {
        uint32_t bits;
        float number;
    } cast = {static_cast<uint32_t>(value) << 16};
    return cast.number;
}

// Round to nearest, ties to even, as torch does; a NaN stays one.
static inline uint16_t to_bf16(float value) {
    union {
        float number;
        uint32_t bits;
    } cast = {value};
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((cast.bits + 0x7fff + ((cast.bits >> 16) & 1)) >> 16);
}

// One of the outputs of a product, in bf16 or as a float.
static inline void set_output(void *out, bool floats, int64_t at, float value) {
    if (floats)
        static_cast<float *>(out)[at] = value;
    else
        static_cast<uint16_t *>(out)[at] = to_bf16(value);
}
static inline float round_bf16(float value) { return from_bf16(to_bf16(value)); }

// Without branches, so that compilers make vectors of loops with them.
static inline float from_half(uint16_t value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, rest = value & 0x7fff;
    union {
        uint32_t bits;
        float number;
    } normal = {(rest << 13) + (rest < 0x7c00 ? 0x38000000u : 0x70000000u)}, cast;
    cast.number = rest < 0x400 ? static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f : normal.number;
    cast.bits |= sign;
    return cast.number;
}

// As to_bf16.
static inline uint16_t to_half(float value) {
    union {
        float number;
        uint32_t bits;
    } cast = {value}, subnormal;
    const uint32_t sign = cast.bits >> 16 & 0x8000;
    cast.bits &= 0x7fffffff;
    subnormal.number = cast.number + 0.5f;  // the sum's last bit is worth 2^-24
    const uint32_t normal = (cast.bits - 0x38000000 + 0xfff + (cast.bits >> 13 & 1)) >> 13;
    uint32_t half = cast.bits < 0x38800000 ? subnormal.bits - 0x3f000000 : normal;
    half = cast.bits < 0x477ff000 ? half : 0x7c00;
    return static_cast<uint16_t>(cast.bits > 0x7f800000 ? 0x7e00 : sign | half);
}

// Scales of 32 weights, as a format stores them.
static inline float scale_from(const Format &format, uint16_t stored) {
    return format.half_scales ? from_half(stored) : from_bf16(stored);
}
static inline uint16_t scale_to(const Format &format, float scale) {
    return format.half_scales ? to_half(scale) : to_bf16(scale);
}
