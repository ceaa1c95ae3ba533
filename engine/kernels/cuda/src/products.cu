// Products of rows of x with matrices that lie in records: experts of a layer by the slots they are in, or one linear
// layer.  A visit is a pair of a row of x and an expert.
//
// A block of threads serves all visits of one expert (the first of them leads; the others have nothing to do), one block
// of the matrix's rows, and one of `splits` parts of the columns.  Weights are read once for up to ROWS visits.  Parts
// are added by the block that ends last, in their order, so results do not depend on it.
//
// x is rounded to 8 bits per 32 columns for tiles and blocks, as the CPU's kernels do: four products are one instruction.
#include "activation.h"
#include "blocks.h"
#include "card.h"
#include "rounding.h"

constexpr int MOST_VISITS = 1024;
constexpr int STAGE = 64;  // groups of x that are held in shared memory at a time
constexpr int NOBODY = -2, ABSENT = -1;

// Distances are in bytes from a record's begin, -1 for what is not there.
struct ProductArguments {
    const u8* x;         // [tokens, columns]
    u8* out;             // [visits, outputs], or [tokens, rows] if there are shares; of x's type, or floats
    const i64* ids;      // [visits] experts; null: one matrix for all visits
    const int* slot_of;  // [experts] -> slot or -1; null: experts are slots
    const i64* records;  // [slots] distances from `base`
    const u8* base;
    const float* shares;  // [visits]: sums each token's experts with them; null: visits stay apart
    float* parts;         // [visits, splits, blocks x BLOCK], where parts or visits are summed
    u32* arrived;         // counters, 0 before and after: one per block, or one per visit and block
    int* absent;          // [visits] <- 1 where an expert has no slot, else 0; null: nobody asks
    i64 weights_at, scales_at, zeros_at, bias_at, table_at, up_at;
    int experts, slots, visits;
    int width;     // visits per row of x
    int together;  // visits per row of out, if there are shares
    int columns, rows, splits;
    int pairing;  // 0: outputs are rows; 1: gates above ups, which for blocks are from up_at on; 2: gates and ups in turn
    int floats;   // whether products, which nothing adds up, are written unrounded
    Activation activation;
};

__device__ __forceinline__ int slot_of_visit(const ProductArguments& a, int visit) {
    const i64 id = a.ids == nullptr ? 0 : a.ids[visit];
    if (id < 0 || id >= a.experts) return NOBODY;
    const i64 slot = a.slot_of == nullptr ? id : a.slot_of[id];
    return slot < 0 || slot >= a.slots ? ABSENT : static_cast<int>(slot);
}

__device__ __forceinline__ const u8* record_of(const ProductArguments& a, int slot) { return a.base + a.records[slot]; }

// The visits of this block's expert in their order; none if an earlier one leads.  By one warp.
static __device__ __forceinline__ int collect(const ProductArguments& a, int visit, int* visits) {
    const i64 id = a.ids == nullptr ? 0 : a.ids[visit];
    int count = 0;
    for (int begin = 0; begin < a.visits; begin += LANES) {
        const int other = begin + lane_number();
        const bool is_same = other < a.visits && (a.ids == nullptr || a.ids[other] == id);
        const u32 same = __ballot_sync(ALL_LANES, is_same);
        if (count == 0 && same != 0 && begin + __ffs(same) - 1 != visit) return 0;
        if (is_same) visits[count + __popc(same & ((1u << lane_number()) - 1))] = other;
        count += __popc(same);
    }
    return count;
}

template <int ROWS>
struct Quantised {
    int codes[ROWS][STAGE * GROUP_WORDS];
    float scales[ROWS][STAGE];
};

// The groups [begin, end) of the visits' rows of x; rows that are not there are zeros.
template <int ROWS>
__device__ __forceinline__ void quantise(const ProductArguments& a, const int* visits, int count, int begin, int end, Quantised<ROWS>& to) {
    const int words = (end - begin) * GROUP_WORDS;
    for (int first = 0; first < words; first += THREADS) {
        const int word = first + static_cast<int>(threadIdx.x);
        const int column = begin * GROUP + word * 4;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float values[4] = {0, 0, 0, 0}, scale;
            if (row < count && word < words && column < a.columns) {
                const Bf16* x = reinterpret_cast<const Bf16*>(a.x) + static_cast<i64>(visits[row] / a.width) * a.columns;
                if (a.columns % 4 == 0) {
                    const uint2 four = *reinterpret_cast<const uint2*>(x + column);
#pragma unroll
                    for (int i = 0; i < 4; i++) values[i] = Bf16{half_word(four, i)}.value();
                } else {
                    for (int i = 0; i < 4 && column + i < a.columns; i++) values[i] = x[column + i].value();
                }
            }
            int codes;
            round_to_codes<1>(values, &codes, &scale);
            if (word < words) {
                to.codes[row][word] = codes;
                if (word % GROUP_WORDS == 0) to.scales[row][word / GROUP_WORDS] = scale;
            }
        }
    }
}

// The sums of up to ROWS visits with this block's 32 rows, over its part of the columns.
template <class Format, int ROWS>
__device__ __forceinline__ void multiply_tiles(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Format::BLOCK]) {
    __shared__ Quantised<ROWS> x;
    __shared__ float of_warps[WARPS][ROWS][TILE_ROWS];
    constexpr int DEPTH = Format::DEPTH, TOTALS = Format::TOTALS;
    static_assert(STAGE % (DEPTH * WARPS) == 0, "a stage begins where a round of tiles does");
    const int lane = lane_number(), warp = warp_number();
    const int groups = (a.columns + GROUP - 1) / GROUP, share = (groups + a.splits - 1) / a.splits;
    const int begin = static_cast<int>(blockIdx.z) * share, end = min(groups, begin + share);
    const i64 first_tile = static_cast<i64>(blockIdx.y) * groups;
    const TileRows rows{record + a.weights_at, record + a.scales_at, record + a.zeros_at, record + a.table_at};
    const typename Format::Table table = Format::table(rows);
    const int low = Format::low_word(lane), high = Format::high_word(lane);

    // Tiles on their way, the first of them before x is looked at.
    typename Format::Tile tiles[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int group = begin + warp + i * WARPS;
        if (group < end) tiles[i] = Format::load(rows, first_tile + group, lane);
    }
    float totals[ROWS][TOTALS] = {};
    for (int stage = begin; stage < end; stage += STAGE) {
        const int stop = min(end, stage + STAGE);
        __syncthreads();
        quantise<ROWS>(a, visits, count, stage, stop, x);
        __syncthreads();
        for (int round = stage + warp; round < stop; round += DEPTH * WARPS) {
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int group = round + i * WARPS;
                if (group < stop) {
                    const typename Format::Decoded decoded = Format::decode(tiles[i], table);
                    const int next = group + DEPTH * WARPS, at = group - stage;
                    if (next < end) tiles[i] = Format::load(rows, first_tile + next, lane);
#pragma unroll
                    for (int row = 0; row < ROWS; row++) {
                        const int* codes = x.codes[row] + at * GROUP_WORDS;
                        Format::add(decoded, codes[low], codes[high], x.scales[row][at], totals[row]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int i = 0; i < TOTALS; i++) {
            const float sum = sum_over_lanes<4, Format::LAST_LANE_BIT>(totals[row][i]);
            if (Format::holds_sums(lane)) of_warps[warp][row][Format::row(lane, i)] = sum;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * TILE_ROWS; at += THREADS) {
        float sum = 0;
#pragma unroll
        for (int from = 0; from < WARPS; from++) sum += of_warps[from][at / TILE_ROWS][at % TILE_ROWS];
        sums[at / TILE_ROWS][at % TILE_ROWS] = sum;
    }
    __syncthreads();
}

template <class Format>
__device__ __forceinline__ int row_of_entry(const ProductArguments& a, int entry) {
    return row_of(static_cast<int>(blockIdx.y), Format::BLOCK, entry, a.pairing, a.rows);
}

// The first elements from an address on that is no multiple of 16, and zeros from `left` on.
template <class Element>
__device__ __forceinline__ uint4 first_elements(const Element* from, int left) {
    u32 words[4] = {};
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
        for (int at = 0; at < 4; at++) words[at] = at < left ? __float_as_uint(from[at].value()) : 0;
    } else {
#pragma unroll
        for (int at = 0; at < 8; at++) words[at / 2] |= (at < left ? static_cast<u32>(from[at].bits) : 0u) << (16 * (at & 1));
    }
    return uint4{words[0], words[1], words[2], words[3]};
}

// What all lanes of a warp have found of each of its rows, 0 where there is none.
template <int BLOCK, int ROWS, int PER_WARP>
__device__ __forceinline__ void sum_rows(const float (*totals)[PER_WARP], const bool* is_row, float (*sums)[BLOCK]) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            const float sum = sum_over_lanes<1, LANES / 2>(totals[row][i]);
            if (lane_number() == 0) sums[row][warp_number() * PER_WARP + i] = is_row[i] ? sum : 0;
        }
    }
    __syncthreads();
}

// As `multiply_tiles` for rows of numbers: a warp multiplies two rows of the matrix.
template <class Format, int ROWS>
__device__ __forceinline__ void multiply_rows(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Format::BLOCK]) {
    typedef typename Format::Element Element;
    constexpr int VECTOR = Format::VECTOR, STEP = VECTOR * LANES, PER_WARP = Format::BLOCK / WARPS;
    const int steps = (a.columns + STEP - 1) / STEP, share = (steps + a.splits - 1) / a.splits * STEP;
    const int begin = static_cast<int>(blockIdx.z) * share, end = min(a.columns, begin + share);
    const bool in_vectors = a.columns % VECTOR == 0;
    const Element* weights[PER_WARP];
    const Element* x[ROWS];
    bool is_row[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int row = row_of_entry<Format>(a, warp_number() * PER_WARP + i);
        is_row[i] = row < a.rows;
        weights[i] = reinterpret_cast<const Element*>(record + a.weights_at) + static_cast<i64>(is_row[i] ? row : 0) * a.columns;
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        x[row] = reinterpret_cast<const Element*>(a.x) + static_cast<i64>(visits[row < count ? row : 0] / a.width) * a.columns;
    }
    float totals[ROWS][PER_WARP] = {};
#pragma unroll 2
    for (int column = begin + lane_number() * VECTOR; column < end; column += STEP) {
        uint4 w[PER_WARP];
        if (in_vectors) {
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) w[i] = __ldcs(reinterpret_cast<const uint4*>(weights[i] + column));
        } else {
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) w[i] = first_elements(weights[i] + column, end - column);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const uint4 v = in_vectors ? *reinterpret_cast<const uint4*>(x[row] + column) : first_elements(x[row] + column, end - column);
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
#pragma unroll
                for (int at = 0; at < VECTOR; at++) totals[row][i] += element_of<Element>(w[i], at).value() * element_of<Element>(v, at).value();
            }
        }
    }
    sum_rows<Format::BLOCK, ROWS, PER_WARP>(totals, is_row, sums);
}

// Rows of blocks times the groups of x from `stage` to `end`, as far as they are staged: a lane has whole runs.
template <class Type, int ROWS, int PER_WARP>
__device__ __forceinline__ void add_runs(const u8* const* rows, const Quantised<ROWS>& x, int stage, int end, float (*totals)[PER_WARP]) {
    constexpr int WORDS = GROUP_WORDS / Type::PARTS;  // of a part
    for (int group = stage + lane_number(); group < end; group += LANES) {
        int codes[PER_WARP][GROUP_WORDS];
        float scales[PER_WARP][Type::PARTS], minima[PER_WARP][Type::PARTS];
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            const Place<Type> place(rows[i], group);
#pragma unroll
            for (int word = 0; word < GROUP_WORDS; word++) codes[i][word] = place.word(word);
#pragma unroll
            for (int part = 0; part < Type::PARTS; part++) {
                scales[i][part] = place.scale(part);
                minima[i][part] = place.minimum(part);
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const int* of_x = x.codes[row] + (group - stage) * GROUP_WORDS;
            const float scale = x.scales[row][group - stage];
#pragma unroll
            for (int part = 0; part < Type::PARTS; part++) {
                int dots[PER_WARP] = {}, sum = 0;
#pragma unroll
                for (int word = part * WORDS; word < (part + 1) * WORDS; word++) {
                    const int four = of_x[word];
                    if (Type::HAS_MINIMA) sum = __dp4a(ONES, four, sum);
#pragma unroll
                    for (int i = 0; i < PER_WARP; i++) dots[i] = __dp4a(codes[i][word], four, dots[i]);
                }
#pragma unroll
                for (int i = 0; i < PER_WARP; i++) {
                    float total = static_cast<float>(dots[i]) * scales[i][part];
                    if (Type::HAS_MINIMA) total -= static_cast<float>(sum) * minima[i][part];
                    totals[row][i] += total * scale;
                }
            }
        }
    }
}

// As `multiply_tiles` for rows of blocks: a warp multiplies two rows of the matrix.
template <class Format, int ROWS>
__device__ __forceinline__ void multiply_blocks(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Format::BLOCK]) {
    typedef typename Format::First First;
    typedef typename Format::Second Second;
    __shared__ Quantised<ROWS> x;
    constexpr int PER_WARP = Format::BLOCK / WARPS;
    const int groups = (a.columns + GROUP - 1) / GROUP, share = (groups + a.splits - 1) / a.splits;
    const int begin = static_cast<int>(blockIdx.z) * share, end = min(groups, begin + share);
    const bool is_up = a.pairing != 0 && warp_number() >= WARPS / 2;  // the whole warp
    const u8* rows[PER_WARP];
    bool is_row[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int row = row_of_entry<Format>(a, warp_number() * PER_WARP + i);
        is_row[i] = row < a.rows;
        rows[i] = row_of_blocks<Format>(record + a.weights_at, record + a.up_at, is_up, row, a.rows, a.columns);
    }
    float totals[ROWS][PER_WARP] = {};
    for (int stage = begin; stage < end; stage += STAGE) {
        const int stop = min(end, stage + STAGE);
        __syncthreads();
        quantise<ROWS>(a, visits, count, stage, stop, x);
        __syncthreads();
        if (is_up) add_runs<Second, ROWS, PER_WARP>(rows, x, stage, stop, totals);
        else add_runs<First, ROWS, PER_WARP>(rows, x, stage, stop, totals);
    }
    sum_rows<Format::BLOCK, ROWS, PER_WARP>(totals, is_row, sums);
}

// The one of the three that a format is for.
template <class Format, int ROWS>
struct Multiply {
    static __device__ __forceinline__ void now(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Format::BLOCK]) {
        multiply_tiles<Format, ROWS>(a, record, visits, count, sums);
    }
};
template <class T, int ROWS>
struct Multiply<Plain<T>, ROWS> {
    static __device__ __forceinline__ void now(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Plain<T>::BLOCK]) {
        multiply_rows<Plain<T>, ROWS>(a, record, visits, count, sums);
    }
};
template <class Gate, class Up, int ROWS>
struct Multiply<Blocks<Gate, Up>, ROWS> {
    static __device__ __forceinline__ void now(const ProductArguments& a, const u8* record, const int* visits, int count, float (*sums)[Blocks<Gate, Up>::BLOCK]) {
        multiply_blocks<Blocks<Gate, Up>, ROWS>(a, record, visits, count, sums);
    }
};

template <class Element>
__device__ __forceinline__ float bias_at(const ProductArguments& a, const u8* record, int row) {
    return a.bias_at < 0 ? 0.0f : reinterpret_cast<const Element*>(record + a.bias_at)[row].value();
}

// Biases, activation and rounding of whole sums.
template <class Format>
__device__ __forceinline__ void finish(const ProductArguments& a, const u8* record, const int* visits, int count, const float (*sums)[Format::BLOCK]) {
    typedef typename Format::Element Element;
    const bool is_paired = a.pairing != 0;
    const int mine = is_paired ? Format::BLOCK / 2 : Format::BLOCK, outputs = is_paired ? a.rows / 2 : a.rows;
    for (int at = threadIdx.x; at < count * mine; at += THREADS) {
        const int row = at / mine, entry = at % mine, output = static_cast<int>(blockIdx.y) * mine + entry;
        if (output >= outputs) continue;
        float gate = sums[row][entry] + bias_at<Element>(a, record, row_of_entry<Format>(a, entry));
        float up = 0;
        if (is_paired) up = sums[row][entry + mine] + bias_at<Element>(a, record, row_of_entry<Format>(a, entry + mine));
        const float result = activate(a.activation, gate, up, is_paired);
        const i64 place = static_cast<i64>(visits[row]) * outputs + output;
        if (a.floats)
            reinterpret_cast<float*>(a.out)[place] = result;
        else
            reinterpret_cast<Element*>(a.out)[place] = Element::of(result);
    }
}

// A visit without an expert or slot: zeros.
template <class Format>
__device__ __forceinline__ void finish_nobody(const ProductArguments& a, int visit) {
    typedef typename Format::Element Element;
    const int mine = a.pairing != 0 ? Format::BLOCK / 2 : Format::BLOCK, outputs = a.pairing != 0 ? a.rows / 2 : a.rows;
    const int entry = static_cast<int>(threadIdx.x), output = static_cast<int>(blockIdx.y) * mine + entry;
    if (entry < mine && output < outputs) {
        reinterpret_cast<Element*>(a.out)[static_cast<i64>(visit) * outputs + output] = Element::of(0);
    }
}

__device__ __forceinline__ float* parts_of(const ProductArguments& a, int visit, int split, int block_rows) {
    const i64 padded = static_cast<i64>(gridDim.y) * block_rows;
    return a.parts + (static_cast<i64>(visit) * a.splits + split) * padded + static_cast<i64>(blockIdx.y) * block_rows;
}

// The parts of a visit's sum, in their order.
__device__ __forceinline__ float whole_sum(const ProductArguments& a, int visit, int entry, int block_rows) {
    float sum = 0;
    for (int split = 0; split < a.splits; split++) sum += __ldcg(parts_of(a, visit, split, block_rows) + entry);
    return sum;
}

// Each token's experts with their shares, from the parts of all visits; an expert's output is rounded before.
template <class Format>
__device__ __forceinline__ void finish_tokens(const ProductArguments& a) {
    typedef typename Format::Element Element;
    const int tokens = a.visits / a.together;
    for (int at = threadIdx.x; at < tokens * Format::BLOCK; at += THREADS) {
        const int token = at / Format::BLOCK, entry = at % Format::BLOCK;
        const int row = static_cast<int>(blockIdx.y) * Format::BLOCK + entry;
        if (row >= a.rows) continue;
        float sum = 0;
        for (int visit = token * a.together; visit < (token + 1) * a.together; visit++) {
            const int slot = slot_of_visit(a, visit);
            if (slot < 0) continue;
            const float whole = whole_sum(a, visit, entry, Format::BLOCK) + bias_at<Element>(a, record_of(a, slot), row);
            sum += Element::of(whole).value() * a.shares[visit];
        }
        reinterpret_cast<Element*>(a.out)[static_cast<i64>(token) * a.rows + row] = Element::of(sum);
    }
}

// Grid: visits (1 without ids), blocks of rows, parts of columns.
template <class Format, int ROWS>
__device__ __forceinline__ void product(const ProductArguments& a) {
    __shared__ int visits[MOST_VISITS];
    __shared__ int visits_found;
    __shared__ float sums[ROWS][Format::BLOCK];
    const int visit = blockIdx.x, slot = slot_of_visit(a, visit);
    if (warp_number() == 0) {
        const int count = slot < 0 ? 0 : collect(a, visit, visits);
        if (lane_number() == 0) visits_found = count;
    }
    if (a.absent != nullptr && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) a.absent[visit] = slot == ABSENT;
    __syncthreads();
    const int count = visits_found;
    const u8* record = slot < 0 ? a.base : record_of(a, slot);
    const bool is_whole = a.splits == 1 && a.shares == nullptr;
    if (slot < 0 && a.shares == nullptr) {
        if (blockIdx.z == 0) finish_nobody<Format>(a, visit);
        return;
    }
    for (int begin = 0; begin < count; begin += ROWS) {
        const int some = min(ROWS, count - begin);
        Multiply<Format, ROWS>::now(a, record, visits + begin, some, sums);
        if (is_whole) {
            finish<Format>(a, record, visits + begin, some, sums);
        } else {
            for (int at = threadIdx.x; at < some * Format::BLOCK; at += THREADS) {
                const int row = at / Format::BLOCK, entry = at % Format::BLOCK;
                parts_of(a, visits[begin + row], blockIdx.z, Format::BLOCK)[entry] = sums[row][entry];
            }
        }
        __syncthreads();
    }
    if (is_whole) return;
    if (a.shares != nullptr) {
        if (is_last_block(a.arrived + blockIdx.y, gridDim.x * gridDim.z)) finish_tokens<Format>(a);
        return;
    }
    if (count == 0) return;  // the visit that leads does it
    if (!is_last_block(a.arrived + blockIdx.x * gridDim.y + blockIdx.y, gridDim.z)) return;
    for (int begin = 0; begin < count; begin += ROWS) {
        const int some = min(ROWS, count - begin);
        for (int at = threadIdx.x; at < some * Format::BLOCK; at += THREADS) {
            const int row = at / Format::BLOCK, entry = at % Format::BLOCK;
            sums[row][entry] = whole_sum(a, visits[begin + row], entry, Format::BLOCK);
        }
        __syncthreads();
        finish<Format>(a, record, visits + begin, some, sums);
        __syncthreads();
    }
}

// Blocks of threads that a multiprocessor has at least: registers limit them.
template <class Format>
struct Resident {
    static __device__ constexpr int blocks(int rows) { return rows < 4 ? 4 : rows < 8 ? 3 : 2; }
};
template <class Gate, class Up>
struct Resident<Blocks<Gate, Up>> {
    static __device__ constexpr int blocks(int rows) { return rows < 4 ? 3 : 2; }
};

#ifndef SWITCHYARD_EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, (Resident<SWITCHYARD_FORMAT>::blocks(SWITCHYARD_ROWS))) product_kernel(const ProductArguments arguments) {
    product<SWITCHYARD_FORMAT, SWITCHYARD_ROWS>(arguments);
}
#endif
