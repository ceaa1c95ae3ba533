// A matrix in tiles or blocks as rows of bf16: for products with many rows, which the card's libraries compute.
#include "blocks.h"
#include "card.h"

struct UnpackArguments {
    TileRows matrix;
    u8* out;  // [rows, columns]
    int columns, rows;
    int pairing;  // as in products.cu
};

// Grid: tiles of a block of rows, WARPS at a time; blocks of rows.
template <class Format>
__device__ __forceinline__ void unpack(const UnpackArguments& a) {
    const int lane = lane_number(), groups = (a.columns + GROUP - 1) / GROUP;
    const int group = static_cast<int>(blockIdx.x) * WARPS + warp_number(), block = static_cast<int>(blockIdx.y);
    if (group >= groups) return;
    const i64 tile_number = static_cast<i64>(block) * groups + group;
    const typename Format::Decoded tile = Format::decode(Format::load(a.matrix, tile_number, lane), Format::table(a.matrix));
#pragma unroll
    for (int i = 0; i < Format::TOTALS; i++) {
        const int row = row_of(block, TILE_ROWS, Format::row(lane, i), a.pairing, a.rows);
        if (row >= a.rows) continue;
        Bf16* out = reinterpret_cast<Bf16*>(a.out) + static_cast<i64>(row) * a.columns;
#pragma unroll
        for (int half = 0; half < Format::HALVES; half++) {
            const int column = group * GROUP + 4 * (half ? Format::high_word(lane) : Format::low_word(lane));
            u32 bits[4];
#pragma unroll
            for (int at = 0; at < 4; at++) bits[at] = Bf16::of(Format::weight(tile, i, half, at)).bits;
            if (a.columns % 4 == 0 && column < a.columns) {
                *reinterpret_cast<uint2*>(out + column) = uint2{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
            } else {
                for (int at = 0; at < 4 && column + at < a.columns; at++) out[column + at] = Bf16{static_cast<u16>(bits[at])};
            }
        }
    }
}

// Grid: runs of all rows, THREADS at a time.
template <class Type>
__device__ __forceinline__ void unpack_blocks(const UnpackArguments& a) {
    const int groups = a.columns / GROUP;
    const i64 number = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, row = number / groups;
    if (row >= a.rows) return;
    const Place<Type> place(a.matrix.weights + row * bytes_of_row<Type>(a.columns), static_cast<int>(number % groups));
    float scales[Type::PARTS], minima[Type::PARTS];
#pragma unroll
    for (int part = 0; part < Type::PARTS; part++) {
        scales[part] = place.scale(part);
        minima[part] = place.minimum(part);
    }
    uint4* out = reinterpret_cast<uint4*>(a.out + number * GROUP * 2);
#pragma unroll
    for (int eight = 0; eight < GROUP / 8; eight++) {
        const int part = eight * Type::PARTS / (GROUP / 8);
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int codes = place.word(2 * eight + i / 2);
            u32 bits[2];
#pragma unroll
            for (int at = 0; at < 2; at++) {
                float value = product_of(static_cast<float>(signed_byte(codes, i % 2 * 2 + at)), scales[part]);
                if (Type::HAS_MINIMA) value = __fsub_rn(value, minima[part]);
                bits[at] = Bf16::of(value).bits;
            }
            words[i] = bits[0] | bits[1] << 16;
        }
        out[eight] = uint4{words[0], words[1], words[2], words[3]};
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) unpack_kernel(const UnpackArguments arguments) {
#ifdef SWITCHYARD_BLOCKS
    unpack_blocks<SWITCHYARD_BLOCKS>(arguments);
#else
    unpack<SWITCHYARD_FORMAT>(arguments);
#endif
}
#endif
