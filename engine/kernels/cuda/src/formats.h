// How a warp reads a tile of 32 rows x 32 columns (`engine/formats/tiles.py`): 16 bytes per lane, whole lines per warp.
//
// The 4 bytes of a row within a vector form a word, and a lane's 4 words are those of 4 neighbouring rows in the same
// columns.  So a lane needs 4 (8 of 4-bit codes) codes of x, whatever the rows, and multiplies 4 at a time.
#pragma once
#include "card.h"

constexpr int TILE_ROWS = 32;
constexpr int GROUP = 32;        // columns that share a scale
constexpr int GROUP_WORDS = 8;   // words of 4 codes of x per group
constexpr int ONES = 0x01010101;

// A record's matrix, as far as one block of 32 rows needs it.
struct TileRows {
    const u8* weights;
    const u8* scales;
    const u8* zeros;
    const u8* table;
};

// The row of the matrix that is entry `entry` of a block of `size` rows; `rows` if there is none.  Where gates and ups are
// paired (1: gates above ups, 2: in turn), a block has its gates first, then their ups.
__device__ __forceinline__ int row_of(int block, int size, int entry, int pairing, int rows) {
    if (pairing == 0) return min(block * size + entry, rows);
    const int half = size / 2, pair = block * half + entry % half, is_up = entry / half;
    if (pair >= rows / 2) return rows;
    return pairing == 1 ? pair + is_up * (rows / 2) : 2 * pair + is_up;
}

template <class T>
__device__ __forceinline__ T streamed(const u8* at) {  // read once: it need not stay in a cache
    return __ldcs(reinterpret_cast<const T*>(at));
}

__device__ __forceinline__ u16 half_word(const uint2& words, int at) {
    return static_cast<u16>((at < 2 ? words.x : words.y) >> (16 * (at & 1)));
}

__device__ __forceinline__ int signed_byte(int word, int at) {
    return static_cast<i8>(static_cast<u32>(word) >> (8 * at) & 255u);
}

// A word of a tile's codes, of 4 columns of one row: several warps read it, and find it in a cache.
__device__ __forceinline__ u32 word_at(const u8* at) { return *reinterpret_cast<const u32*>(at); }

// 8 bits: vectors 0 to 7 of both halves, 16 rows each.
struct Int8 {
    typedef Bf16 Element;
    static constexpr int BLOCK = TILE_ROWS, TOTALS = 8, DEPTH = 2, LAST_LANE_BIT = 16, HALVES = 1;

    struct Tile { uint4 upper, lower; uint2 upper_scales, lower_scales; };
    struct Table {};
    struct Decoded { int codes[8]; float scales[8]; };

    static __device__ __forceinline__ Table table(const TileRows&) { return Table{}; }
    static __device__ __forceinline__ int low_word(int lane) { return lane / 4; }
    static __device__ __forceinline__ int high_word(int lane) { return lane / 4; }
    static __device__ __forceinline__ bool holds_sums(int lane) { return lane < 4; }
    static __device__ __forceinline__ int row(int lane, int total) { return total / 4 * 16 + lane % 4 * 4 + total % 4; }

    static __device__ __forceinline__ Tile load(const TileRows& rows, i64 tile, int lane) {
        const u8* weights = rows.weights + tile * 1024 + lane * 16;
        const u8* scales = rows.scales + tile * 64 + lane % 4 * 8;
        return Tile{streamed<uint4>(weights), streamed<uint4>(weights + 512), streamed<uint2>(scales),
                    streamed<uint2>(scales + 32)};
    }
    static __device__ __forceinline__ Decoded decode(const Tile& tile, const Table&) {
        Decoded result;
#pragma unroll
        for (int row = 0; row < 4; row++) {
            result.codes[row] = static_cast<int>(word_of(tile.upper, row));
            result.codes[row + 4] = static_cast<int>(word_of(tile.lower, row));
            result.scales[row] = Fp16{half_word(tile.upper_scales, row)}.value();
            result.scales[row + 4] = Fp16{half_word(tile.lower_scales, row)}.value();
        }
        return result;
    }
    // A weight: of one of the lane's rows, byte `at` of its low or high columns.
    static __device__ __forceinline__ float weight(const Decoded& tile, int row, bool, int at) {
        return static_cast<float>(signed_byte(tile.codes[row], at)) * tile.scales[row];
    }
    // Codes of a half as matrix units take them: words c and 4 + c of rows r and 8 + r, where the lane is 4 r + c.
    static __device__ __forceinline__ void left(const TileRows& rows, i64 tile, int half, int lane, const Table&, u32* words) {
        const u8* at = rows.weights + tile * 1024 + half * 512 + lane % 4 * 64 + lane / 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = word_at(at + i / 2 * 256 + i % 2 * 32);
    }
    static constexpr bool HAS_ZEROS = false;
    static __device__ __forceinline__ float scale(const TileRows& rows, i64 tile, int row) {
        return reinterpret_cast<const Fp16*>(rows.scales)[tile * TILE_ROWS + row].value();
    }
    static __device__ __forceinline__ float zero(const TileRows&, i64, int) { return 0; }
    static __device__ __forceinline__ void add(const Decoded& tile, int low, int, float scale, float* totals) {
#pragma unroll
        for (int row = 0; row < 8; row++) {
            totals[row] += static_cast<float>(__dp4a(tile.codes[row], low, 0)) * (tile.scales[row] * scale);
        }
    }
};

// 4 bits: a byte's low nibble is a code of the first 16 columns, its high one of the others.
struct Nibbles {
    typedef Bf16 Element;
    static constexpr int BLOCK = TILE_ROWS, TOTALS = 4, DEPTH = 4, LAST_LANE_BIT = 8, HALVES = 2;

    static __device__ __forceinline__ int low_word(int lane) { return lane / 4 % 4; }
    static __device__ __forceinline__ int high_word(int lane) { return lane / 4 % 4 + 4; }
    static __device__ __forceinline__ bool holds_sums(int lane) { return lane / 4 % 4 == 0; }
    static __device__ __forceinline__ int row(int lane, int total) { return lane / 16 * 16 + lane % 4 * 4 + total; }
    // Both words of the codes that matrix units take of a row lie in one: see Int8::left.
    static __device__ __forceinline__ u32 word_of_half(const TileRows& rows, i64 tile, int half, int lane, int lower) {
        return word_at(rows.weights + tile * 512 + half * 256 + lane % 4 * 64 + lane / 4 * 4 + lower * 32);
    }
    static __device__ __forceinline__ float scale(const TileRows& rows, i64 tile, int row) {
        return reinterpret_cast<const Bf16*>(rows.scales)[tile * TILE_ROWS + row].value();
    }
};

struct Int4 : Nibbles {
    static constexpr bool HAS_ZEROS = true;
    struct Tile { uint4 words; uint2 scales; u32 zeros; };
    struct Table {};
    struct Decoded { int low[4], high[4], zeros[4]; float scales[4]; };

    static __device__ __forceinline__ Table table(const TileRows&) { return Table{}; }
    static __device__ __forceinline__ Tile load(const TileRows& rows, i64 tile, int lane) {
        const int first = row(lane, 0);
        return Tile{streamed<uint4>(rows.weights + tile * 512 + lane * 16),
                    streamed<uint2>(rows.scales + tile * 64 + first * 2), streamed<u32>(rows.zeros + tile * 32 + first)};
    }
    static __device__ __forceinline__ Decoded decode(const Tile& tile, const Table&) {
        Decoded result;
#pragma unroll
        for (int row = 0; row < 4; row++) {
            const u32 word = word_of(tile.words, row);
            result.low[row] = static_cast<int>(word & 0x0f0f0f0fu);
            result.high[row] = static_cast<int>(word >> 4 & 0x0f0f0f0fu);
            result.zeros[row] = static_cast<int>(tile.zeros >> (8 * row) & 255u);
            result.scales[row] = Bf16{half_word(tile.scales, row)}.value() * 0.0625f;
        }
        return result;
    }
    static __device__ __forceinline__ void left(const TileRows& rows, i64 tile, int half, int lane, const Table&, u32* words) {
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const u32 both = word_of_half(rows, tile, half, lane, lower);
            words[lower] = both & 0x0f0f0f0fu;
            words[2 + lower] = both >> 4 & 0x0f0f0f0fu;
        }
    }
    static __device__ __forceinline__ float zero(const TileRows& rows, i64 tile, int row) {
        return static_cast<float>(rows.zeros[tile * TILE_ROWS + row]) * 0.0625f;
    }
    // Zero points are in sixteenths: whole numbers until the scale.
    static __device__ __forceinline__ float weight(const Decoded& tile, int row, bool is_high, int at) {
        const int code = signed_byte(is_high ? tile.high[row] : tile.low[row], at);
        return static_cast<float>(16 * code - tile.zeros[row]) * tile.scales[row];
    }
    static __device__ __forceinline__ void add(const Decoded& tile, int low, int high, float scale, float* totals) {
        const int sum = __dp4a(ONES, low, __dp4a(ONES, high, 0));
#pragma unroll
        for (int row = 0; row < 4; row++) {
            const int dot = __dp4a(tile.low[row], low, __dp4a(tile.high[row], high, 0));
            totals[row] += static_cast<float>(16 * dot - tile.zeros[row] * sum) * (tile.scales[row] * scale);
        }
    }
};

struct Lut4 : Nibbles {
    static constexpr bool HAS_ZEROS = false;
    struct Tile { uint4 words; uint2 scales; };
    struct Table { uint4 values; };
    struct Decoded { int low[4], high[4]; float scales[4]; };

    static __device__ __forceinline__ Table table(const TileRows& rows) {
        return Table{*reinterpret_cast<const uint4*>(rows.table)};
    }
    static __device__ __forceinline__ Tile load(const TileRows& rows, i64 tile, int lane) {
        return Tile{streamed<uint4>(rows.weights + tile * 512 + lane * 16),
                    streamed<uint2>(rows.scales + tile * 64 + row(lane, 0) * 2)};
    }
    // What 4 codes stand for, one per nibble of the lower 16 bits: a permutation of bytes takes 3 bits of each to choose
    // among 8 values, so both halves of the table are asked, and the fourth bit chooses between the answers.
    static __device__ __forceinline__ u32 look_up(const uint4& values, u32 nibbles) {
        const u32 among_8 = nibbles & 0x7777u;
        const u32 lower = __byte_perm(values.x, values.y, among_8), upper = __byte_perm(values.z, values.w, among_8);
        return __byte_perm(lower, upper, 0x3210u | (nibbles & 0x8888u) >> 1);
    }
    static __device__ __forceinline__ Decoded decode(const Tile& tile, const Table& table) {
        Decoded result;
#pragma unroll
        for (int row = 0; row < 4; row++) {
            const u32 word = word_of(tile.words, row);
            const u32 first = look_up(table.values, word & 0xffffu), second = look_up(table.values, word >> 16);
            result.low[row] = static_cast<int>(__byte_perm(first, second, 0x6420u));
            result.high[row] = static_cast<int>(__byte_perm(first, second, 0x7531u));
            result.scales[row] = Bf16{half_word(tile.scales, row)}.value();
        }
        return result;
    }
    static __device__ __forceinline__ void left(const TileRows& rows, i64 tile, int half, int lane, const Table& table, u32* words) {
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const u32 both = word_of_half(rows, tile, half, lane, lower);
            const u32 first = look_up(table.values, both & 0xffffu), second = look_up(table.values, both >> 16);
            words[lower] = __byte_perm(first, second, 0x6420u);
            words[2 + lower] = __byte_perm(first, second, 0x7531u);
        }
    }
    static __device__ __forceinline__ float zero(const TileRows&, i64, int) { return 0; }
    static __device__ __forceinline__ float weight(const Decoded& tile, int row, bool is_high, int at) {
        return static_cast<float>(signed_byte(is_high ? tile.high[row] : tile.low[row], at)) * tile.scales[row];
    }
    static __device__ __forceinline__ void add(const Decoded& tile, int low, int high, float scale, float* totals) {
#pragma unroll
        for (int row = 0; row < 4; row++) {
            const int dot = __dp4a(tile.low[row], low, __dp4a(tile.high[row], high, 0));
            totals[row] += static_cast<float>(dot) * (tile.scales[row] * scale);
        }
    }
};

// Rows of numbers, one after the other.
template <class T>
struct Plain {
    typedef T Element;
    static constexpr int BLOCK = 8;
    static constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));  // elements that a lane reads at a time
};
typedef Plain<Bf16> PlainBf16;
typedef Plain<Fp16> PlainFp16;
typedef Plain<Fp32> PlainFp32;

// One of the elements in 16 bytes.  No union: some compilers would lay its elements out in memory.
template <class Element>
__device__ __forceinline__ Element element_of(const uint4& words, int at) {
    if constexpr (sizeof(Element) == 4) return Element{float_of_bits(word_of(words, at))};
    else return Element{half_at(words, at)};
}
