// Keys and values of a context, in pages of PAGE tokens.
//
// A table says where they lie: for keys, values and, where the type has them, the scales of both, the bytes from one head
// to the next, and then the address of each page's first head.  A page of one head has its tokens one after the other.
#pragma once
#include "states.h"

constexpr int PAGE = 32;  // tokens
constexpr int PIECE = 8;  // elements of a key or value that a lane reads

struct KvBf16 {
    typedef uint4 Piece;
    static constexpr int BYTES = 2;
    static constexpr bool HAS_SCALES = false;
    static __device__ __forceinline__ float value(const Piece& piece, int at) { return Bf16{half_at(piece, at)}.value(); }
    static __device__ __forceinline__ float element(const u8* row, int at) { return reinterpret_cast<const Bf16*>(row)[at].value(); }
    static __device__ __forceinline__ void set(u8* to, int at, float value, float) { reinterpret_cast<Bf16*>(to)[at] = Bf16::of(value); }
};

struct KvFp16 {
    typedef uint4 Piece;
    static constexpr int BYTES = 2;
    static constexpr bool HAS_SCALES = false;
    static __device__ __forceinline__ float value(const Piece& piece, int at) { return Fp16{half_at(piece, at)}.value(); }
    static __device__ __forceinline__ float element(const u8* row, int at) { return reinterpret_cast<const Fp16*>(row)[at].value(); }
    // Comparisons, as minimum and maximum would lose what is no number.
    static __device__ __forceinline__ void set(u8* to, int at, float value, float) {
        value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
        reinterpret_cast<Fp16*>(to)[at] = Fp16::of(value);
    }
};

struct KvFp32 {
    struct alignas(16) Piece { float numbers[PIECE]; };
    static constexpr int BYTES = 4;
    static constexpr bool HAS_SCALES = false;
    static __device__ __forceinline__ float value(const Piece& piece, int at) { return piece.numbers[at]; }
    static __device__ __forceinline__ float element(const u8* row, int at) { return reinterpret_cast<const float*>(row)[at]; }
    static __device__ __forceinline__ void set(u8* to, int at, float value, float) { reinterpret_cast<float*>(to)[at] = value; }
};

// 8 bits with a scale for each head and token: the largest is 127.
struct KvInt8 {
    typedef uint2 Piece;
    static constexpr int BYTES = 1;
    static constexpr bool HAS_SCALES = true;
    static __device__ __forceinline__ float value(const Piece& piece, int at) {
        return static_cast<float>(static_cast<i8>((at < 4 ? piece.x : piece.y) >> (8 * (at & 3)) & 255u));
    }
    static __device__ __forceinline__ void set(u8* to, int at, float value, float largest) {
        const float code = value * (127.0f / (largest > 1e-30f ? largest : 1e-30f));
        reinterpret_cast<i8*>(to)[at] = static_cast<i8>(fabsf(code) <= 127.5f ? __float2int_rn(code) : 0);
    }
};

// A token's row of one head in a part of a sequence, by the part's entries in the table.
__device__ __forceinline__ u8* row_in_pages(const i64* entries, int head, int token, int bytes) {
    return reinterpret_cast<u8*>(entries[1 + token / PAGE]) + head * entries[0] + static_cast<i64>(token % PAGE) * bytes;
}

// One sequence's pages of one head.
template <class Kv>
struct Pages {
    const i64* table;
    i64 part_step;
    int head, key_dim, value_dim;

    __device__ __forceinline__ u8* row(int part, int token, int bytes) const {
        return row_in_pages(table + part * part_step, head, token, bytes);
    }
    __device__ __forceinline__ u8* row(int part, int token) const {
        return row(part, token, (part == 0 ? key_dim : value_dim) * Kv::BYTES);
    }
    // Part 0: keys, 1: values.
    __device__ __forceinline__ typename Kv::Piece piece(int part, int token, int at) const {
        return *reinterpret_cast<const typename Kv::Piece*>(row(part, token) + at * Kv::BYTES);
    }
    __device__ __forceinline__ float scale(int part, int token) const {
        return Kv::HAS_SCALES ? *reinterpret_cast<const float*>(row(2 + part, token, 4)) : 1.0f;
    }
    // A token's states, from their element `from` on.  By one warp.
    __device__ __forceinline__ void store(int part, int token, const u8* states, int type, i64 from) const {
        const int size = part == 0 ? key_dim : value_dim;
        float largest = 0;
        if (Kv::HAS_SCALES) {
            for (int i = lane_number(); i < size; i += LANES) {
                const float now = fabsf(state_at(states, type, from + i));
                largest = now <= largest ? largest : now;  // what is no number stays
            }
#pragma unroll
            for (int bit = 1; bit < LANES; bit *= 2) {
                const float other = __shfl_xor_sync(ALL_LANES, largest, bit);
                largest = other <= largest || largest != largest ? largest : other;
            }
            if (lane_number() == 0) *reinterpret_cast<float*>(row(2 + part, token, 4)) = largest * (1.0f / 127.0f);
        }
        for (int i = lane_number(); i < size; i += LANES) Kv::set(row(part, token), i, state_at(states, type, from + i), largest);
    }
};
