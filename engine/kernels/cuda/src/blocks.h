// The types of GGUF files, read as they lie.  Layouts: ggml-common.h of llama.cpp.
//
// A row is runs of 32 columns.  A type has
//   COLUMNS, BYTES            of a block
//   PARTS                     of a run, each with a scale of its own: 1 or 2
//   word(block, run, number)  4 codes of 8 bits, of the columns from 4 x number on
//   scale(block, run, part)
//   minimum(block, run, part) if HAS_MINIMA: a weight is then scale x code - minimum, and else scale x code
#pragma once
#include "formats.h"

// 4 bytes from an address that is a multiple of ALIGNED: 4, 2, or 1.
template <int ALIGNED>
__device__ __forceinline__ u32 read_word(const u8* at) {
    if constexpr (ALIGNED >= 4) {
        return word_at(at);
    } else if constexpr (ALIGNED == 2) {
        const u16* halves = reinterpret_cast<const u16*>(at);
        return static_cast<u32>(halves[0]) | static_cast<u32>(halves[1]) << 16;
    } else {
        const u32 skip = static_cast<u32>(reinterpret_cast<u64>(at) & 3);
        const u8* from = at - skip;
        return __byte_perm(word_at(from), word_at(skip != 0 ? from + 4 : from), 0x3210u + 0x1111u * skip);  // no word beyond is touched
    }
}

__device__ __forceinline__ float half_value(const u8* at) { return Fp16{*reinterpret_cast<const u16*>(at)}.value(); }

// Rounded by itself, as the reference's products are, whatever is done with it.
__device__ __forceinline__ float product_of(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float steps_of(const u8* of_block, int steps) { return product_of(half_value(of_block), static_cast<float>(steps)); }

// Each of 4 codes, of 7 bits at most, less a zero point.
__device__ __forceinline__ u32 less(u32 codes, u32 zero) { return ((codes | 0x80808080u) - zero * 0x01010101u) ^ 0x80808080u; }

// The lowest 4 bits, each as bit 4 of a byte.
__device__ __forceinline__ u32 as_fifth(u32 bits) { return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 4u) << 18 | (bits & 8u) << 25; }

// Of 16 bytes, whose low halves are codes 0 to 15, and whose high ones are 16 to 31.
template <int ALIGNED>
__device__ __forceinline__ u32 nibbles(const u8* at, int number) {
    return read_word<ALIGNED>(at + number % 4 * 4) >> (number / 4 * 4) & 0x0f0f0f0fu;
}

// The same as positions in a table.
template <int ALIGNED>
__device__ __forceinline__ u32 from_table(const u8* at, int number, const uint4& values) {
    const u32 word = read_word<ALIGNED>(at + number % 4 * 4);
    const u32 first = Lut4::look_up(values, word & 0xffffu), second = Lut4::look_up(values, word >> 16);
    return __byte_perm(first, second, number < 4 ? 0x6420u : 0x7531u);
}

// What all but a few have none of.
struct NoMinima {
    static constexpr bool HAS_MINIMA = false;
    static __device__ __forceinline__ float minimum(const u8*, int, int) { return 0; }
};

struct Q4_0 : NoMinima {
    static constexpr int COLUMNS = 32, BYTES = 18, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) { return less(nibbles<2>(block + 2, number), 8); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

struct Q4_1 {
    static constexpr int COLUMNS = 32, BYTES = 20, PARTS = 1;
    static constexpr bool HAS_MINIMA = true;
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) { return nibbles<4>(block + 4, number); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
    static __device__ __forceinline__ float minimum(const u8* block, int, int) { return -half_value(block + 2); }
};

struct Q5_0 : NoMinima {
    static constexpr int COLUMNS = 32, BYTES = 22, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) {
        return less(nibbles<2>(block + 6, number) | as_fifth(read_word<2>(block + 2) >> (4 * number)), 16);
    }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

struct Q5_1 {
    static constexpr int COLUMNS = 32, BYTES = 24, PARTS = 1;
    static constexpr bool HAS_MINIMA = true;
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) {
        return nibbles<4>(block + 8, number) | as_fifth(word_at(block + 4) >> (4 * number));
    }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
    static __device__ __forceinline__ float minimum(const u8* block, int, int) { return -half_value(block + 2); }
};

struct Q8_0 : NoMinima {
    static constexpr int COLUMNS = 32, BYTES = 34, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) { return read_word<2>(block + 2 + number * 4); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

struct Q2_K {
    static constexpr int COLUMNS = 256, BYTES = 84, PARTS = 2;
    static constexpr bool HAS_MINIMA = true;
    // Of 64 bytes of four pairs of bits each: four runs share 32 bytes.
    template <int ALIGNED>
    static __device__ __forceinline__ u32 pairs(const u8* at, int run, int number) {
        return read_word<ALIGNED>(at + run / 4 * 32 + number * 4) >> (run % 4 * 2) & 0x03030303u;
    }
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) { return pairs<4>(block + 16, run, number); }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) { return steps_of(block + 80, block[2 * run + part] & 15); }
    static __device__ __forceinline__ float minimum(const u8* block, int run, int part) { return steps_of(block + 82, block[2 * run + part] >> 4); }
};

struct Q3_K : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 110, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 third = read_word<2>(block + number * 4) >> run & 0x01010101u;
        return less(Q2_K::pairs<2>(block + 32, run, number) | third << 2, 4);
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) {
        const int group = 2 * run + part;
        const int low = block[96 + group % 8] >> (group / 8 * 4) & 15, high = block[104 + group % 4] >> (group / 4 * 2) & 3;
        return steps_of(block + 108, (low | high << 4) - 32);
    }
};

struct Q4_K {
    static constexpr int COLUMNS = 256, BYTES = 144, PARTS = 1;
    static constexpr bool HAS_MINIMA = true;
    // Two runs share 32 bytes.
    static __device__ __forceinline__ u32 halves(const u8* at, int run, int number) {
        return word_at(at + run / 2 * 32 + number * 4) >> (run % 2 * 4) & 0x0f0f0f0fu;
    }
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) { return halves(block + 16, run, number); }
    // 6 bits of each, in 12 bytes.
    static __device__ __forceinline__ float scale(const u8* block, int run, int) {
        const u8* steps = block + 4 + (run & 3);
        return steps_of(block, run < 4 ? steps[0] & 63 : (steps[8] & 15) | (steps[0] >> 2 & 48));
    }
    static __device__ __forceinline__ float minimum(const u8* block, int run, int) {
        const u8* steps = block + 4 + (run & 3);
        return steps_of(block + 2, run < 4 ? steps[4] & 63 : steps[8] >> 4 | (steps[4] >> 2 & 48));
    }
};

struct Q5_K {
    static constexpr int COLUMNS = 256, BYTES = 176, PARTS = 1;
    static constexpr bool HAS_MINIMA = true;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        return Q4_K::halves(block + 48, run, number) | (word_at(block + 16 + number * 4) >> run & 0x01010101u) << 4;
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) { return Q4_K::scale(block, run, part); }
    static __device__ __forceinline__ float minimum(const u8* block, int run, int part) { return Q4_K::minimum(block, run, part); }
};

struct Q6_K : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 210, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const int half = run / 4, quarter = run % 4;
        const u32 low = read_word<2>(block + half * 64 + quarter % 2 * 32 + number * 4) >> (quarter / 2 * 4) & 0x0f0f0f0fu;
        const u32 high = read_word<2>(block + 128 + half * 32 + number * 4) >> (quarter * 2) & 0x03030303u;
        return less(low | high << 4, 32);
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) {
        return steps_of(block + 208, static_cast<i8>(block[192 + 2 * run + part]));
    }
};

struct IQ4_NL : NoMinima {
    static constexpr int COLUMNS = 32, BYTES = 18, PARTS = 1;
    static __device__ __forceinline__ uint4 values() { return uint4{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}; }
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) { return from_table<2>(block + 2, number, values()); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

struct IQ4_XS : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 136, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        return from_table<4>(block + 8 + run * 16, number, IQ4_NL::values());
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int) {
        const int low = block[4 + run / 2] >> (run % 2 * 4) & 15, high = block[2 + run / 4] >> (run % 4 * 2) & 3;
        return steps_of(block, (low | high << 4) - 32);
    }
};

struct MXFP4 : NoMinima {
    static constexpr int COLUMNS = 32, BYTES = 17, PARTS = 1;
    static __device__ __forceinline__ uint4 values() { return uint4{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}; }  // twice
    static __device__ __forceinline__ u32 word(const u8* block, int, int number) { return from_table<1>(block + 1, number, values()); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) {
        const u32 exponent = block[0];  // half of what it says; that of the two smallest is subnormal
        return float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
};

template <class A, class B>
struct Are { static constexpr bool SAME = false; };
template <class A>
struct Are<A, A> { static constexpr bool SAME = true; };

// Matrices in rows of blocks.  Gates and ups lie apart, and may be of different types.
template <class Gate, class Up = Gate>
struct Blocks {
    typedef Bf16 Element;
    typedef Gate First;
    typedef Up Second;
    static constexpr int BLOCK = 8;
};

template <class Type>
__device__ __forceinline__ i64 bytes_of_row(int columns) { return static_cast<i64>(columns / Type::COLUMNS) * Type::BYTES; }

// Where run `group` of a row is: its block, and its number there.
template <class Type>
struct Place {
    const u8* block;
    int run;
    __device__ __forceinline__ Place(const u8* row, int group) {
        constexpr int RUNS = Type::COLUMNS / GROUP;
        block = row + static_cast<i64>(group / RUNS) * Type::BYTES;
        run = group % RUNS;
    }
    __device__ __forceinline__ int word(int number) const { return static_cast<int>(Type::word(block, run, number)); }
    __device__ __forceinline__ float scale(int part) const { return Type::scale(block, run, part); }
    __device__ __forceinline__ float minimum(int part) const { return Type::minimum(block, run, part); }
};

// Row `row` of a matrix whose ups are from `up` on.
template <class Format>
__device__ __forceinline__ const u8* row_of_blocks(const u8* gate, const u8* up, bool is_up, int row, int rows, int columns) {
    if (row >= rows) row = is_up ? rows / 2 : 0;  // any that is there
    return is_up ? up + (row - rows / 2) * bytes_of_row<typename Format::Second>(columns) : gate + row * bytes_of_row<typename Format::First>(columns);
}
