// The rows of x of sorted visits, rounded once for all of a matrix's rows.
#include "groups.h"

struct RoundArguments {
    const u8* x;  // [tokens, columns], bf16
    Groups groups;
    RoundedRows to;
    int columns, width;  // width: visits per row of x
    int tiles;           // neighbourhoods of a block
};

// Grid: blocks of visits; neighbourhoods.  A lane has 8 columns of one visit: words t and 4 + t of its group.
static __device__ __forceinline__ void round_rows(const RoundArguments& a) {
    const int block = blockIdx.x, tile = blockIdx.y, lane = lane_number();
    if (a.groups.block_expert[block] >= a.groups.experts) return;
    const int visit = lane / 4, part = lane % 4, groups = (a.columns + GROUP - 1) / GROUP;
    const i64 place = place_of(a.groups, block, tile * NEIGHBOURS + visit);
    const Bf16* x = nullptr;
    if (place >= 0) x = reinterpret_cast<const Bf16*>(a.x) + a.groups.order[place] / a.width * a.columns;
    for (int group = warp_number(); group < groups; group += WARPS) {
        float values[8] = {}, scale;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = group * GROUP + half * 16 + part * 4;
            if (x == nullptr || column >= a.columns) continue;
            if (a.columns % 4 == 0) {
                const uint2 four = *reinterpret_cast<const uint2*>(x + column);
#pragma unroll
                for (int i = 0; i < 4; i++) values[half * 4 + i] = Bf16{half_word(four, i)}.value();
            } else {
                for (int i = 0; i < 4 && column + i < a.columns; i++) values[half * 4 + i] = x[column + i].value();
            }
        }
        int codes[2];
        round_to_codes<2>(values, codes, &scale);
        int sum = __dp4a(ONES, codes[0], __dp4a(ONES, codes[1], 0));
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bit);
        const i64 at = (static_cast<i64>(block) * groups + group) * a.tiles + tile;
        reinterpret_cast<uint2*>(a.to.codes + at * NEIGHBOURS_WORDS)[lane] = uint2{static_cast<u32>(codes[0]), static_cast<u32>(codes[1])};
        if (part == 0) {
            float* scales = a.to.scales + (at * NEIGHBOURS + visit) * 2;
            scales[0] = scale;
            scales[1] = scale * static_cast<float>(sum);
        }
    }
}

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS) round_rows_kernel(const RoundArguments arguments) {
    round_rows(arguments);
}
#endif
