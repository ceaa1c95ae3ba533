// Products of rounded rows of x with matrices in records, for prompts: visits sorted by expert, in blocks.
//
// A warp multiplies 32 rows of a matrix with all visits of a block, 32 columns at a time: a lane reads of each half of the
// rows just the codes that matrix units take of it, so that nothing goes through shared memory.  Where gates and ups are
// paired, the halves are 16 gates and their ups, and a thread has both.
#include "activation.h"
#include "blocks.h"
#include "groups.h"

// Distances are in bytes from a record's begin, -1 for what is not there.
struct GroupProductArguments {
    u8* out;  // [visits, outputs]
    Groups groups;
    RoundedRows x;
    const i64* records;  // [experts] distances from `base`
    const u8* base;
    i64 weights_at, scales_at, zeros_at, bias_at, table_at, up_at;
    int columns, rows;
    int pairing;  // as in products.cu
    Activation activation;
};

// Which of a run's 16 columns are multiplied; the others are taken for zeros.
struct Half { bool first, last; };

// 16 x 32 codes times 32 x 8 codes, by matrix units.  Lane 4 r + c has of the left words c and 4 + c of rows r and 8 + r,
// of the right those of row r, and of the sums columns 2 c and 2 c + 1 of rows r and 8 + r.
struct MatrixUnits {
    struct Left { u32 words[4]; };
    struct Right { uint2 words; };
    static __device__ __forceinline__ Left left(const u32* words, Half taken) {
        return Left{{taken.first ? words[0] : 0, taken.first ? words[1] : 0, taken.last ? words[2] : 0, taken.last ? words[3] : 0}};
    }
    static __device__ __forceinline__ Left ones(Half taken) {
        const u32 words[4] = {ONES, ONES, ONES, ONES};
        return left(words, taken);
    }
    static __device__ __forceinline__ Right right(const u32* codes) {
        return Right{reinterpret_cast<const uint2*>(codes)[lane_number()]};
    }
    static __device__ __forceinline__ void multiply(const Left& left, const Right& right, int* sums) {
#if defined(SWITCHYARD_EMULATED)
        emulated::multiply_codes(left.words, right.words.x, right.words.y, sums);
#elif __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
            : "r"(left.words[0]), "r"(left.words[1]), "r"(left.words[2]), "r"(left.words[3]), "r"(right.words.x), "r"(right.words.y), "r"(0));
#elif __CUDA_ARCH__ >= 750
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            int* of = sums + 2 * lower;
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %4};"
                : "=r"(of[0]), "=r"(of[1]) : "r"(left.words[lower]), "r"(right.words.x), "r"(0));
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(of[0]), "+r"(of[1]) : "r"(left.words[2 + lower]), "r"(right.words.y));
        }
#endif
    }
};

// The same without them: a lane reads whole rows.
struct Dp4a {
    struct Left { int upper[8], lower[8]; };
    struct Right { uint4 words[4]; };  // of rows 2 c and 2 c + 1
    static __device__ __forceinline__ Left left(const u32* words, Half taken) {
        Left result;
        const int first = lane_number() & ~3;
#pragma unroll
        for (int part = 0; part < 4; part++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool is_taken = half == 0 ? taken.first : taken.last;
                result.upper[2 * part + half] = is_taken ? static_cast<int>(__shfl_sync(ALL_LANES, words[2 * half], first + part)) : 0;
                result.lower[2 * part + half] = is_taken ? static_cast<int>(__shfl_sync(ALL_LANES, words[2 * half + 1], first + part)) : 0;
            }
        }
        return result;
    }
    static __device__ __forceinline__ Left ones(Half taken) {
        Left result;
#pragma unroll
        for (int word = 0; word < 8; word++) result.upper[word] = result.lower[word] = (word % 2 == 0 ? taken.first : taken.last) ? ONES : 0;
        return result;
    }
    static __device__ __forceinline__ Right right(const u32* codes) {
#ifdef __HIP__
        __syncwarp();  // or AMD's compiler reads ahead further than registers reach
#endif
        const uint4* rows = reinterpret_cast<const uint4*>(codes) + lane_number() % 4 * 4;
        return Right{{rows[0], rows[1], rows[2], rows[3]}};
    }
    static __device__ __forceinline__ void multiply(const Left& left, const Right& right, int* sums) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            int upper = 0, lower = 0;
#pragma unroll
            for (int word = 0; word < 8; word++) {
                const int codes = static_cast<int>(word_of(right.words[2 * row + word / 4], word % 4));
                upper = __dp4a(left.upper[word], codes, upper);
                lower = __dp4a(left.lower[word], codes, lower);
            }
            sums[row] = upper;
            sums[2 + row] = lower;
        }
    }
};

// What a lane reads of a warp's 32 rows: for a half of them words c and 4 + c of rows r and 8 + r, and what the codes of
// rows r, 8 + r, 16 + r and 24 + r stand for, their entries 0 to 3, where the lane is 4 r + c.
template <class Format>
struct Operand {
    static constexpr int PARTS = 1;
    static constexpr bool HAS_MINIMA = Format::HAS_ZEROS;
    TileRows matrix;
    typename Format::Table table;
    i64 first;
    __device__ __forceinline__ Operand(const GroupProductArguments& a, const u8* record, int rows_block)
        : matrix{record + a.weights_at, record + a.scales_at, record + a.zeros_at, record + a.table_at},
          table(Format::table(matrix)),
          first(static_cast<i64>(rows_block) * ((a.columns + GROUP - 1) / GROUP)) {}
    __device__ __forceinline__ void read(int group, int half, u32* words) const { Format::left(matrix, first + group, half, lane_number(), table, words); }
    __device__ __forceinline__ float scale(int group, int entry, int) const { return Format::scale(matrix, first + group, entry * 8 + lane_number() / 4); }
    __device__ __forceinline__ float minimum(int group, int entry, int) const {
        return scale(group, entry, 0) * Format::zero(matrix, first + group, entry * 8 + lane_number() / 4);
    }
};

template <class Gate, class Up>
struct Operand<Blocks<Gate, Up>> {
    static constexpr int PARTS = Gate::PARTS > Up::PARTS ? Gate::PARTS : Up::PARTS;
    static constexpr bool HAS_MINIMA = Gate::HAS_MINIMA || Up::HAS_MINIMA;
    const u8* rows[4];
    bool has_ups;  // the second half
    __device__ __forceinline__ Operand(const GroupProductArguments& a, const u8* record, int rows_block) : has_ups(a.pairing != 0) {
#pragma unroll
        for (int entry = 0; entry < 4; entry++) {
            const int row = row_of(rows_block, TILE_ROWS, entry * 8 + lane_number() / 4, a.pairing, a.rows);
            rows[entry] = row_of_blocks<Blocks<Gate, Up>>(record + a.weights_at, record + a.up_at, has_ups && entry >= 2, row, a.rows, a.columns);
        }
    }
    template <class Type>
    __device__ __forceinline__ void read_of(int group, int half, u32* words) const {
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const Place<Type> place(rows[2 * half + lower], group);
            words[lower] = static_cast<u32>(place.word(lane_number() % 4));
            words[2 + lower] = static_cast<u32>(place.word(4 + lane_number() % 4));
        }
    }
    __device__ __forceinline__ void read(int group, int half, u32* words) const {
        if (Are<Gate, Up>::SAME || half == 0 || !has_ups) read_of<Gate>(group, half, words);
        else read_of<Up>(group, half, words);
    }
    __device__ __forceinline__ float scale(int group, int entry, int part) const {
        if (Are<Gate, Up>::SAME || entry < 2 || !has_ups) return Place<Gate>(rows[entry], group).scale(part);
        return Place<Up>(rows[entry], group).scale(part);
    }
    __device__ __forceinline__ float minimum(int group, int entry, int part) const {
        if (Are<Gate, Up>::SAME || entry < 2 || !has_ups) return Place<Gate>(rows[entry], group).minimum(part);
        return Place<Up>(rows[entry], group).minimum(part);
    }
};

// Grid: blocks of visits; blocks of 32 rows of the matrix, WARPS at a time.
template <class Format, int TILES, class Units>
__device__ __forceinline__ void multiply_groups(const GroupProductArguments& a) {
    typedef Operand<Format> Matrix;
    constexpr int PARTS = Matrix::PARTS;
    const int block = blockIdx.x, lane = lane_number();
    const i64 expert = a.groups.block_expert[block];
    const int rows_block = static_cast<int>(blockIdx.y) * WARPS + warp_number();
    // A whole warp with nothing to do, for which none waits.
    if (expert >= a.groups.experts || rows_block >= (a.rows + TILE_ROWS - 1) / TILE_ROWS) return;
    const u8* record = a.base + a.records[expert];
    const Matrix matrix(a, record, rows_block);
    const int groups = (a.columns + GROUP - 1) / GROUP, row = lane / 4;
    float totals[2][TILES][4] = {};
    for (int group = 0; group < groups; group++) {
        const i64 x = static_cast<i64>(block) * groups + group;
        u32 words[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) matrix.read(group, half, words[half]);
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {  // one after the other: registers would not do for both
            const Half taken{PARTS == 1 || part == 0, PARTS == 1 || part == 1};
            const typename Units::Left left[2] = {Units::left(words[0], taken), Units::left(words[1], taken)};
            float scales[4], minima[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scales[i] = matrix.scale(group, i, part);
                minima[i] = Matrix::HAS_MINIMA ? matrix.minimum(group, i, part) : 0.0f;
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const i64 at = x * TILES + tile;
                const typename Units::Right right = Units::right(a.x.codes + at * NEIGHBOURS_WORDS);
                const float* of_visits = a.x.scales + (at * NEIGHBOURS + lane % 4 * 2) * 2;  // of two: scale, scale x sum
                const float2 first = reinterpret_cast<const float2*>(of_visits)[0], second = reinterpret_cast<const float2*>(of_visits)[1];
                float of_x[2] = {first.y, second.y};
                if (Matrix::HAS_MINIMA && PARTS == 2) {
                    int sums[4];
                    Units::multiply(Units::ones(taken), right, sums);
                    of_x[0] = first.x * static_cast<float>(sums[0]);
                    of_x[1] = second.x * static_cast<float>(sums[1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int sums[4];
                    Units::multiply(left[half], right, sums);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int entry = 2 * half + i / 2;
                        float& total = totals[half][tile][i];
                        total += static_cast<float>(sums[i]) * (scales[entry] * (i % 2 == 0 ? first.x : second.x));
                        if (Matrix::HAS_MINIMA) total -= minima[entry] * of_x[i % 2];
                    }
                }
            }
        }
    }
    const bool is_paired = a.pairing != 0;
    const int outputs = is_paired ? a.rows / 2 : a.rows;
    const auto bias = [&](int entry) {
        const int at = row_of(rows_block, TILE_ROWS, entry, a.pairing, a.rows);
        return a.bias_at < 0 || at >= a.rows ? 0.0f : reinterpret_cast<const Bf16*>(record + a.bias_at)[at].value();
    };
    float biases[4];
#pragma unroll
    for (int i = 0; i < 4; i++) biases[i] = bias(i * 8 + row);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int visit = 0; visit < 2; visit++) {
            const i64 place = place_of(a.groups, block, tile * NEIGHBOURS + lane % 4 * 2 + visit);
            if (place < 0) continue;
            Bf16* out = reinterpret_cast<Bf16*>(a.out) + a.groups.order[place] * outputs;
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                const float upper_half = totals[0][tile][2 * lower + visit] + biases[lower];
                const float lower_half = totals[1][tile][2 * lower + visit] + biases[2 + lower];
                const int output = rows_block * (is_paired ? TILE_ROWS / 2 : TILE_ROWS) + lower * 8 + row;
                if (is_paired) {
                    if (output < outputs) out[output] = Bf16::of(activate(a.activation, upper_half, lower_half, true));
                } else {
                    if (output < outputs) out[output] = Bf16::of(activate(a.activation, upper_half, 0, false));
                    if (output + 16 < outputs) out[output + 16] = Bf16::of(activate(a.activation, lower_half, 0, false));
                }
            }
        }
    }
}

#ifndef SWITCHYARD_EMULATED
#if __CUDA_ARCH__ >= 750
typedef MatrixUnits Units;
#else
typedef Dp4a Units;
#endif
#ifdef SWITCHYARD_RESIDENT  // blocks of threads that a multiprocessor has at least: else some registers would not suffice
#define SWITCHYARD_BOUNDS __launch_bounds__(THREADS, SWITCHYARD_RESIDENT)
#else
#define SWITCHYARD_BOUNDS __launch_bounds__(THREADS)
#endif
extern "C" __global__ void SWITCHYARD_BOUNDS group_product_kernel(const GroupProductArguments arguments) {
    multiply_groups<SWITCHYARD_FORMAT, SWITCHYARD_TILES, Units>(arguments);
}
#endif
