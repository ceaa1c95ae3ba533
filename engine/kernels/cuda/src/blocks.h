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

#define SWITCHYARD_GRID static __device__ const
#include "grids.h"
#undef SWITCHYARD_GRID

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

// A bit each as the lowest of a byte.
__device__ __forceinline__ u32 as_bytes(u32 bits) { return (bits & 1u) | (bits & 2u) << 7 | (bits & 4u) << 14 | (bits & 8u) << 21; }
// 4 codes, none of them 0, negated where a bit is set.
__device__ __forceinline__ u32 negated(u32 codes, u32 bits) {
    const u32 set = as_bytes(bits);
    return (codes ^ set * 255u) + set;
}
// Of the signs of four eights, 7 bits each, so that an even number is set, those of 4 codes.
__device__ __forceinline__ u32 odd_signs(u32 seven, int number) {
    seven &= 127u;
    u32 parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return (seven | (parity & 1u) << 7) >> (number % 2 * 4);
}
// What 4 of a word's codes of 2 bits stand for.
__device__ __forceinline__ u32 eights(u32 word, int number, u32 values) {
    const u32 four = word >> (number % 2 * 8);
    return __byte_perm(values, 0, (four & 3u) | (four & 12u) << 2 | (four & 48u) << 4 | (four & 192u) << 6);
}
// The same of its 4 codes of 3 bits.
__device__ __forceinline__ u32 fours(u32 word, u32 low, u32 high) {
    return __byte_perm(low, high, (word & 7u) | (word & 56u) << 1 | (word & 448u) << 2 | (word & 3584u) << 3);
}
// 2 * step + 1, of a part of the whole.
__device__ __forceinline__ float odd_steps_of(const u8* of_block, int step, float part) { return product_of(steps_of(of_block, 2 * step + 1), part); }
constexpr u32 IQ2_VALUES = 0x2b1908u;

struct IQ2_XXS : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 66, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u8* at = block + 2 + 8 * run;
        const u32 codes = eights(GRID_IQ2_XXS[at[number / 2]], number, IQ2_VALUES);
        return negated(codes, odd_signs(read_word<2>(at + 4) >> (number / 2 * 7), number));
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int) { return odd_steps_of(block, block[9 + 8 * run] >> 4, 0.125f); }
};

struct IQ2_XS : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 74, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 both = *reinterpret_cast<const u16*>(block + 2 + 8 * run + number / 2 * 2);
        return negated(eights(GRID_IQ2_XS[both & 511u], number, IQ2_VALUES), odd_signs(both >> 9, number));
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) { return odd_steps_of(block, block[66 + run] >> (4 * part) & 15, 0.125f); }
};

struct IQ2_S : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 82, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const int eight = 4 * run + number / 2;
        const u32 position = block[2 + eight] | (block[66 + run] >> (number / 2 * 2) & 3u) << 8;
        return negated(eights(GRID_IQ2_S[position], number, IQ2_VALUES), block[34 + eight] >> (number % 2 * 4));
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) { return odd_steps_of(block, block[74 + run] >> (4 * part) & 15, 0.125f); }
};

struct IQ3_XXS : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 98, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 codes = fours(GRID_IQ3_XXS[block[2 + 8 * run + number]], 0x1c140c04u, 0x3e342c24u);
        return negated(codes, odd_signs(read_word<2>(block + 66 + 4 * run) >> (number / 2 * 7), number));
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int) { return odd_steps_of(block, block[69 + 4 * run] >> 4, 0.25f); }
};

struct IQ3_S : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 110, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 position = block[2 + 8 * run + number] | (block[66 + run] >> number & 1u) << 8;
        const u32 codes = fours(GRID_IQ3_S[position], 0x07050301u, 0x0f0d0b09u);
        return negated(codes, block[74 + 4 * run + number / 2] >> (number % 2 * 4));
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int) { return odd_steps_of(block, block[106 + run / 2] >> (run % 2 * 4) & 15, 1.0f); }
};

struct IQ1_S : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 50, PARTS = 1;
    // Eight times -1, 0 or 1, and one less or more.
    static __device__ __forceinline__ u32 shifted(u32 position, int number, bool is_less) {
        return eights(GRID_IQ1[position], number, is_less ? 0x07fff7u : 0x0901f9u);
    }
    static __device__ __forceinline__ u32 of_run(const u8* block, int run) { return *reinterpret_cast<const u16*>(block + 34 + 2 * run); }
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 more = of_run(block, run);
        return shifted(block[2 + 4 * run + number / 2] | (more >> (number / 2 * 3) & 7u) << 8, number, more >> 15 != 0);
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int) {
        return odd_steps_of(block, static_cast<int>(of_run(block, run) >> 12 & 7u), 0.125f);
    }
};

struct IQ1_M : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 56, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 more = static_cast<u32>(block[32 + 2 * run + number / 4] >> (number / 2 % 2 * 4));
        return IQ1_S::shifted(block[4 * run + number / 2] | (more & 7u) << 8, number, (more & 8u) != 0);
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) {
        const u32 low = word_at(block + 48), high = word_at(block + 52), group = static_cast<u32>(2 * run + part);
        const u32 half = (low >> 12 & 15u) | (low >> 24 & 240u) | (high >> 4 & 3840u) | (high >> 16 & 61440u);
        const int step = static_cast<int>((group < 8 ? low : high) >> (group / 4 % 2 * 16 + group % 4 * 3) & 7u);
        return product_of(product_of(Fp16{static_cast<u16>(half)}.value(), static_cast<float>(2 * step + 1)), 0.125f);
    }
};

struct TQ1_0 : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 54, PARTS = 1;
    // Of each byte, a fraction of 256, a digit of base 3.
    static __device__ __forceinline__ u32 digits(u32 bytes, int place) {
        const u32 power = static_cast<u32>(0x511b090301ull >> (8 * place)) & 255u;
        const u32 even = (bytes & 0x00ff00ffu) * power & 0x00ff00ffu, odd = (bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
        return (even * 3 >> 8 & 0x00ff00ffu) | (odd * 3 & 0xff00ff00u);
    }
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const int half = 2 * run + number / 4 - 10;
        const u8* at = run < 5 ? block + 4 * number : half < 5 ? block + 32 + number % 4 * 4 : block + 48;
        return less(digits(read_word<2>(at), run < 5 ? run : half < 5 ? half : number % 4), 1);
    }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block + 52); }
};

struct TQ2_0 : NoMinima {
    static constexpr int COLUMNS = 256, BYTES = 66, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) { return less(Q2_K::pairs<2>(block, run, number), 1); }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block + 64); }
};

struct NVFP4 : NoMinima {
    static constexpr int COLUMNS = 64, BYTES = 36, PARTS = 2;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 pairs = word_at(block + 4 + 16 * run + number / 4 * 8 + number % 2 * 4);
        const u32 first = Lut4::look_up(MXFP4::values(), pairs & 0xffffu), second = Lut4::look_up(MXFP4::values(), pairs >> 16);
        return __byte_perm(first, second, number % 4 < 2 ? 0x6420u : 0x7531u);
    }
    static __device__ __forceinline__ float scale(const u8* block, int run, int part) {  // half of E4M3's, without a sign
        const int byte = block[2 * run + part], exponent = byte >> 3 & 15;
        const int steps = exponent != 0 ? 8 + (byte & 7) : byte & 7;
        return byte == 127 ? 0.0f : product_of(static_cast<float>(steps << max(exponent, 1)), 1.0f / 2048);
    }
};

struct Q1_0 : NoMinima {
    static constexpr int COLUMNS = 128, BYTES = 18, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        return less(as_bytes(block[2 + 4 * run + number / 2] >> (number % 2 * 4)) << 1, 1);
    }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

struct Q2_0 : NoMinima {
    static constexpr int COLUMNS = 64, BYTES = 18, PARTS = 1;
    static __device__ __forceinline__ u32 word(const u8* block, int run, int number) {
        const u32 pairs = block[2 + 8 * run + number];
        return less((pairs | pairs << 6 | pairs << 12 | pairs << 18) & 0x03030303u, 1);
    }
    static __device__ __forceinline__ float scale(const u8* block, int, int) { return half_value(block); }
};

// Each with ggml's number.
#define BLOCK_TYPES(DO) \
    DO(Q4_0, 2) DO(Q4_1, 3) DO(Q5_0, 6) DO(Q5_1, 7) DO(Q8_0, 8) DO(Q2_K, 10) DO(Q3_K, 11) DO(Q4_K, 12) DO(Q5_K, 13) DO(Q6_K, 14) \
    DO(IQ2_XXS, 16) DO(IQ2_XS, 17) DO(IQ3_XXS, 18) DO(IQ1_S, 19) DO(IQ4_NL, 20) DO(IQ3_S, 21) DO(IQ2_S, 22) DO(IQ4_XS, 23) \
    DO(IQ1_M, 29) DO(TQ1_0, 34) DO(TQ2_0, 35) DO(MXFP4, 39) DO(NVFP4, 40) DO(Q1_0, 41) DO(Q2_0, 42)

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
