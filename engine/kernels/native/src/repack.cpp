// Blocks of GGUF files, and codes of quantised safetensors, straight to tiles, codes kept where the format has them; blocks
// also to numbers.
//
// Scales and zeros are those of engine/formats/coded.py, bit by bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "dispatch.h"
#include "ggml_blocks.h"
#include "matrix.h"
#include "thread_pool.h"
#include "word_codes.h"

namespace {

constexpr int kLanes = kHalfRows;
constexpr int64_t kMostElements = 256;           // of a block
constexpr int64_t kChunk = 2 * kMostElements;    // columns that are unpacked at once
constexpr float kClamped = 0.25f, kHighestZero = 255.0f, kTiny = 0x1p-120f;
constexpr uint16_t kNaN = 0x7fc0, kHalfNaN = 0x7e00;

inline float whole(float value) { return (value + 12582912.0f) - 12582912.0f; }  // |value| < 2^22, ties to even
inline float sixteenths(float value) {
    value = value > 0.0f ? value : 0.0f;
    return whole(value < kHighestZero ? value : kHighestZero);
}

// One half of a tile, 16 rows x 32 columns, to be written.
struct HalfTarget {
    uint8_t *weights;
    uint16_t *scales;
    uint8_t *zeros;
    const int8_t *table;
};

// 16 rows of a half; null for rows beyond the matrix.
using Rows = const uint8_t *[kLanes];

// What a half takes besides its codes.
struct Lanes {
    float scale[kLanes], zero[kLanes], total[kLanes], squares[kLanes];
    uint16_t stored[kLanes];
    uint8_t stored_zero[kLanes];
    bool kept[kLanes];
};

// Squares of both codes of a byte.
struct PairSquares {
    uint16_t of[256];
    constexpr PairSquares() : of() {
        for (int pair = 0; pair < 256; ++pair) of[pair] = static_cast<uint16_t>((pair & 15) * (pair & 15) + (pair >> 4) * (pair >> 4));
    }
};
constexpr PairSquares kPairSquares;

void sums_of(const CodedGroup &group, float *total, float *squares) {
    uint64_t pairs[2];
    uint8_t bytes[16];
    std::memcpy(pairs, group.words, 16);
    std::memcpy(bytes, group.words, 16);
    constexpr uint64_t low = 0x0f0f0f0f0f0f0f0f;
    const uint64_t four = (pairs[0] & low) + (pairs[0] >> 4 & low) + (pairs[1] & low) + (pairs[1] >> 4 & low);  // each <= 60
    *total = static_cast<float>(((four & 0x00ff00ff00ff00ff) + (four >> 8 & 0x00ff00ff00ff00ff)) * 0x0001000100010001 >> 48);
    uint32_t sum = 0;
    for (const uint8_t pair : bytes) sum += kPairSquares.of[pair];
    *squares = static_cast<float>(sum);
}

// Of the two scales in bf16 around each lane's, with the best zero for it, that with the least squared error.
void choose_zeros(Lanes &lanes) {
    for (int i = 0; i < kLanes; ++i) {
        const float scale = lanes.scale[i], zero = lanes.zero[i], total = lanes.total[i], squares = lanes.squares[i];
        const bool strange = !std::isfinite(scale) || !std::isfinite(zero);
        const float offset = scale * zero, values = scale * total - 32.0f * offset;
        const auto below = static_cast<uint16_t>(bits_of(scale) >> 16);
        float zeros[2], errors[2];
        for (int step = 0; step < 2; ++step) {
            const float candidate = from_bf16(static_cast<uint16_t>(below + step));
            zeros[step] = sixteenths((total - values / candidate) * 0.5f);
            const float a = scale - candidate, b = candidate * (zeros[step] * 0.0625f) - offset;
            errors[step] = a * a * squares + 2.0f * a * b * total + 32.0f * (b * b);
        }
        const bool above = errors[1] < errors[0];
        const float settled = sixteenths(zero * 16.0f);
        const bool is_settled = settled == zero * 16.0f || std::fabs(scale) < kTiny;
        const auto chosen = static_cast<uint16_t>(below + above);
        const float chosen_zero = is_settled ? settled : zeros[above];
        lanes.kept[i] = strange || (zero >= -kClamped && zero <= kHighestZero / 16.0f + kClamped);
        lanes.stored[i] = strange ? kNaN : is_settled ? to_bf16(scale) : chosen;
        lanes.stored_zero[i] = strange ? 0 : static_cast<uint8_t>(static_cast<int32_t>(chosen_zero));
    }
}

// Types that are kept in a format with scales in fp16 have such themselves.
template <int of_format> void choose_scales(Lanes &lanes, uint8_t zero) {
    constexpr Format format = kFormats[of_format];
    for (int i = 0; i < kLanes; ++i) {
        const bool finite = std::fabs(lanes.scale[i]) <= std::numeric_limits<float>::max();
        lanes.stored[i] = finite ? scale_to(format, lanes.scale[i]) : format.half_scales ? kHalfNaN : kNaN;
        lanes.stored_zero[i] = finite ? zero : 0;
    }
}

// A record's signed codes are from -127.
bool has_lowest(const CodedGroup &group) {
    uint32_t found = 0;
    for (const uint32_t word : group.words) {
        const uint32_t flipped = word ^ 0x80808080;
        found |= (flipped - 0x01010101) & ~flipped & 0x80808080;
    }
    return found != 0;
}

using Fit = void (*)(const float *w, const FitTarget &target);

// Fits the lanes that the format cannot hold as they are.
template <class Type>
void fit_lanes(const CodedGroup *groups, int64_t stride, const Lanes &lanes, const Rows &rows, Fit fit, int rounds,
               const HalfTarget &target) {
    constexpr bool nibbles = Type::kFormat != SWITCHYARD_INT8;
    float w[kGroup * kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
        if (!rows[i] || lanes.kept[i]) continue;
        uint8_t bytes[32];
        std::memcpy(bytes, groups[i * stride].words, 32);
        for (int c = 0; c < kGroup; ++c) {
            const float code = nibbles ? static_cast<float>(bytes[c % 16] >> (c / 16 * 4) & 15)
                                       : static_cast<float>(static_cast<int8_t>(bytes[c]));
            w[c * kLanes + i] = (Type::kZero == Zero::kNone ? code : code - lanes.zero[i]) * lanes.scale[i];
        }
    }
    uint8_t q[kGroup * kLanes], zeros[kLanes], codes[kGroup * kLanes];
    uint16_t scales[kLanes];
    fit(w, {q, scales, target.zeros ? zeros : nullptr, target.table, rounds});
    put_codes(codes, nibbles, q);
    for (int i = 0; i < kLanes; ++i) {
        if (!rows[i] || lanes.kept[i]) continue;
        for (int j = 0; j < (nibbles ? 4 : 8); ++j) std::memcpy(target.weights + j * 64 + i * 4, codes + j * 64 + i * 4, 4);
        target.scales[i] = scales[i];
        if (target.zeros) target.zeros[i] = zeros[i];
    }
}

// One group of 16 rows: groups[i * stride] of the i-th.
template <class Type>
void keep_group(const CodedGroup *groups, int64_t stride, const Rows &rows, Fit fit, int rounds, const HalfTarget &target) {
    constexpr int words = Type::kFormat == SWITCHYARD_INT8 ? 8 : 4;
    Lanes lanes = {};
    bool all_kept = true;
    for (int i = 0; i < kLanes; ++i) {
        lanes.kept[i] = true;
        if (!rows[i]) continue;
        const CodedGroup &group = groups[i * stride];
        lanes.scale[i] = group.scale;
        if constexpr (Type::kZero == Zero::kAny) {
            lanes.zero[i] = group.zero;
            sums_of(group, &lanes.total[i], &lanes.squares[i]);
        }
        if constexpr (words == 8) lanes.kept[i] = !has_lowest(group) || !std::isfinite(group.scale);
        for (int j = 0; j < words; ++j) std::memcpy(target.weights + j * 64 + i * 4, &group.words[j], 4);
    }
    if constexpr (Type::kZero == Zero::kAny)
        choose_zeros(lanes);
    else
        choose_scales<Type::kFormat>(lanes, Type::kZero == Zero::kEight ? 128 : 0);
    for (int i = 0; i < kLanes; ++i) {
        if (!rows[i]) continue;
        target.scales[i] = lanes.stored[i];
        if (target.zeros) target.zeros[i] = lanes.stored_zero[i];
        all_kept &= lanes.kept[i];
    }
    if (!all_kept) fit_lanes<Type>(groups, stride, lanes, rows, fit, rounds, target);
}

struct Half {
    const SwitchyardMatrix &matrix;
    int64_t block, half;
    Rows rows;
    Fit fit;
    int rounds;

    HalfTarget target(int64_t group) const {
        const HalfTile tile = half_tile(tile_row(matrix, block), kFormats[matrix.format], group, half);
        return {const_cast<uint8_t *>(tile.weights), const_cast<uint16_t *>(tile.scales),
                const_cast<uint8_t *>(tile.zeros), tile.table};
    }
};

template <class Type> void keep_half(const Half &half) {
    constexpr int64_t groups = Type::kElements / kGroup;
    CodedGroup unpacked[kLanes * groups];
    for (int64_t block = 0; block * Type::kElements < half.matrix.columns; ++block) {
        for (int i = 0; i < kLanes; ++i)
            if (half.rows[i]) Type::codes(half.rows[i] + block * Type::kBytes, unpacked + i * groups);
        for (int64_t group = 0; group < groups; ++group)
            keep_group<Type>(unpacked + group, groups, half.rows, half.fit, half.rounds, half.target(block * groups + group));
    }
}

// Codes that lie in words: rows[i] is not null where the half has a row, from[i] its number.
template <class Type> void keep_codes(const Half &half, const SwitchyardCodes &codes, const int64_t *from) {
    for (int64_t group = 0; group * kGroup < half.matrix.columns; ++group) {
        CodedGroup groups[kLanes];
        for (int i = 0; i < kLanes; ++i)
            if (half.rows[i]) read_codes(codes, half.matrix.columns, from[i], group, groups + i);
        keep_group<Type>(groups, 1, half.rows, half.fit, half.rounds, half.target(group));
    }
}

template <class Type> void values_of(const uint8_t *blocks, int64_t count, float *out) {
    for (int64_t block = 0; block < count; ++block) Type::values(blocks + block * Type::kBytes, out + block * Type::kElements);
}

struct BlockType {
    int number;
    int64_t elements, bytes;
    void (*values)(const uint8_t *blocks, int64_t count, float *out);
    int keeps;  // the format that keeps its codes, or bf16
    void (*keep)(const Half &half);
};

template <class Type> constexpr BlockType kept() {
    return {Type::kNumber, Type::kElements, Type::kBytes, values_of<Type>, Type::kFormat, keep_half<Type>};
}
template <class Type> constexpr BlockType unpacked() {
    return {Type::kNumber, Type::kElements, Type::kBytes, values_of<Type>, SWITCHYARD_BF16, nullptr};
}

constexpr BlockType kTypes[] = {
    unpacked<F32>(), unpacked<F16>(), unpacked<Bf16>(), kept<Q4_0>(), kept<Q4_1>(),  kept<Q5_0>(),  unpacked<Q5_1>(), kept<Q8_0>(),
    unpacked<Q2K>(), unpacked<Q3K>(), kept<Q4K>(),      unpacked<Q5K>(), unpacked<Q6K>(), kept<Iq4Nl>(), kept<Iq4Xs>(),    kept<Mxfp4>(),
};

const BlockType *type_of(const SwitchyardBlocks &blocks) {
    for (const BlockType &type : kTypes)
        if (type.number == blocks.type) return &type;
    return nullptr;
}

// The `index`-th row of a matrix of `columns`.
const uint8_t *row_of(const SwitchyardBlocks &blocks, const BlockType &type, int64_t columns, int64_t index) {
    return blocks.blocks + (blocks.order ? blocks.order[index] : index) * (columns / type.elements * type.bytes);
}

void fit_half(const Half &half, const BlockType &type) {
    float values[kLanes][kChunk] = {};  // zeros for rows beyond the matrix
    const bool nibbles = kFormats[half.matrix.format].code_bits == 4;
    for (int64_t begin = 0; begin < half.matrix.columns; begin += kChunk) {
        const int64_t columns = std::min(kChunk, half.matrix.columns - begin);
        for (int i = 0; i < kLanes; ++i)
            if (half.rows[i])
                type.values(half.rows[i] + begin / type.elements * type.bytes, columns / type.elements, values[i]);
        for (int64_t from = 0; from < columns; from += kGroup) {
            float w[kGroup * kLanes] = {};
            const int64_t width = std::min(kGroup, columns - from);
            for (int64_t c = 0; c < width; ++c)
                for (int i = 0; i < kLanes; ++i) w[c * kLanes + i] = values[i][from + c];
            uint8_t q[kGroup * kLanes];
            const HalfTarget target = half.target((begin + from) / kGroup);
            half.fit(w, {q, target.scales, target.zeros, target.table, half.rounds});
            put_codes(target.weights, nibbles, q);
        }
    }
}

void clear_half(const Half &half) {
    const Format &format = kFormats[half.matrix.format];
    for (int64_t group = 0; group < groups_of(half.matrix.columns); ++group) {
        const HalfTarget target = half.target(group);
        std::memset(target.weights, 0, static_cast<size_t>(format.half_bytes()));
        std::memset(target.scales, 0, kLanes * sizeof *target.scales);
        if (target.zeros) std::memset(target.zeros, 0, kLanes);
    }
}

bool is_there(const SwitchyardBlocks &source) { return source.blocks || source.codes; }

void repack_half(const SwitchyardRepack &matrix, int64_t block, int64_t at, const TileKernels &tiles, int rounds) {
    const SwitchyardMatrix &target = matrix.target;
    const bool apart = is_there(matrix.second);
    const SwitchyardBlocks &source = apart && at == 1 ? matrix.second : matrix.first;
    const BlockType *type = source.codes ? nullptr : type_of(source);
    Half half = {target, block, at, {}, tiles.formats[target.format].fit, rounds};
    int64_t from[kLanes];
    bool full = true;
    for (int64_t i = 0; i < kLanes; ++i) {
        int64_t row = source_row(target, block, at, i);
        if (apart && row >= 0) row = block * kHalfRows + i;
        from[i] = row;
        half.rows[i] = row < 0 ? nullptr : type ? row_of(source, *type, target.columns, row) : source.codes->words;
        full &= row >= 0;
    }
    const bool keeps = !type || (type->keeps == target.format && type->keep);
    if (keeps && !full) clear_half(half);
    if (!type && source.codes->bits == 8)
        keep_codes<EightBits>(half, *source.codes, from);
    else if (!type)
        keep_codes<FourBits>(half, *source.codes, from);
    else if (keeps)
        type->keep(half);
    else
        fit_half(half, *type);
}

struct RepackCall {
    Kernels kernels;
    const SwitchyardRepack *matrices;
    int64_t most_blocks;  // of one of them
    int rounds;
    Phase pieces;
};

void repack_work(void *argument) {
    auto &call = *static_cast<RepackCall *>(argument);
    call.pieces.run([&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
            const SwitchyardRepack &matrix = call.matrices[piece / call.most_blocks];
            const int64_t block = piece % call.most_blocks;
            for (int64_t half = 0; half < 2 && block < blocks_of(matrix.target); ++half)
                repack_half(matrix, block, half, *call.kernels.tiles, call.rounds);
        }
    });
}

struct UnpackCall {
    const SwitchyardBlocks &source;
    const BlockType &type;
    int64_t columns;
    void *out;
    bool floats;
    Phase rows;
};

void unpack_row(const UnpackCall &call, int64_t row) {
    const uint8_t *blocks = row_of(call.source, call.type, call.columns, row);
    if (call.floats) {
        call.type.values(blocks, call.columns / call.type.elements, static_cast<float *>(call.out) + row * call.columns);
        return;
    }
    float values[kChunk];
    auto *out = static_cast<uint16_t *>(call.out) + row * call.columns;
    for (int64_t begin = 0; begin < call.columns; begin += kChunk) {
        const int64_t columns = std::min(kChunk, call.columns - begin);
        call.type.values(blocks + begin / call.type.elements * call.type.bytes, columns / call.type.elements, values);
        for (int64_t i = 0; i < columns; ++i) out[begin + i] = to_bf16(values[i]);
    }
}

void unpack_work(void *argument) {
    auto &call = *static_cast<UnpackCall *>(argument);
    call.rows.run([&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) unpack_row(call, row);
    });
}

bool is_readable(const SwitchyardBlocks &blocks, int64_t columns) {
    const BlockType *type = type_of(blocks);
    return type && columns % type->elements == 0;
}

bool is_keepable(const SwitchyardCodes &codes, const SwitchyardMatrix &target) {
    const bool known = codes.bits == 8 ? target.format == SWITCHYARD_INT8 && codes.arrangement != SWITCHYARD_AWQ
                                       : target.format == SWITCHYARD_INT4 && (codes.zeros || codes.added);
    return known && codes.group > 0 && codes.group % kGroup == 0 && target.columns % codes.group == 0;
}

bool can_repack(const SwitchyardBlocks &source, const SwitchyardMatrix &target) {
    return source.codes ? is_keepable(*source.codes, target) : is_readable(source, target.columns);
}

}  // namespace

SWITCHYARD_API int32_t switchyard_repack(SwitchyardPool *pool, const SwitchyardRepack *matrices, int64_t count,
                                         int32_t rounds) {
    int64_t most_blocks = 1, weights = 0;
    for (int64_t i = 0; i < count; ++i) {
        const SwitchyardRepack &matrix = matrices[i];
        const bool apart = is_there(matrix.second);
        if (!can_repack(matrix.first, matrix.target)) return 2;
        if (apart && (matrix.target.pairing == SWITCHYARD_PLAIN || !can_repack(matrix.second, matrix.target))) return 2;
        most_blocks = std::max(most_blocks, blocks_of(matrix.target));
        weights += matrix.target.rows * matrix.target.columns;
    }
    RepackCall call = {kernels_in_use(), matrices, most_blocks, rounds, Phase(count * most_blocks, pool->threads(), 1)};
    pool->run_long(repack_work, &call, weights);
    return 0;
}

SWITCHYARD_API int32_t switchyard_unpack(SwitchyardPool *pool, const SwitchyardBlocks *source, int64_t rows,
                                         int64_t columns, int32_t floats, void *out) {
    if (source->codes || !is_readable(*source, columns)) return 2;
    UnpackCall call = {*source, *type_of(*source), columns, out, floats != 0, Phase(rows, pool->threads(), 1)};
    pool->run_long(unpack_work, &call, rows * columns);
    return 0;
}
