// Visits sorted by expert, as `ExpertGroups` in stored.py has them, and how their rows of x lie between the kernel that
// rounds them and the one that multiplies them.
#pragma once
#include "rounding.h"

constexpr int NEIGHBOURS = 8;                     // visits that matrix units take at a time
constexpr int NEIGHBOURS_WORDS = 2 * LANES;       // of their codes in a group of columns: two for each lane

struct Groups {
    const i64* order;         // [visits], sorted by expert
    const i64* ends;          // [experts], end of each expert's visits in `order`
    const i64* block_expert;  // [blocks]; `experts` and more where there is nothing to do
    const i64* block_begin;   // [blocks], begin of a block's visits in `order`
    int experts;
};

// Rounded rows: codes as lanes take them, [blocks, groups, neighbourhoods, lanes, 2 words], and for each visit its scale
// and that times the sum of its codes, [blocks, groups, neighbourhoods, 8, 2].
struct RoundedRows {
    u32* codes;
    float* scales;
};

// Place in `order` of a block's visit; -1 beyond its expert's last.
__device__ __forceinline__ i64 place_of(const Groups& groups, int block, int visit) {
    const i64 place = groups.block_begin[block] + visit;
    return place < groups.ends[groups.block_expert[block]] ? place : -1;
}
