// Halves of tiles of blocks of GGUF files and of codes of quantised safetensors, codes kept where the format has them, for the instruction set of the including
// file: everything is local to it, so that the linker never mixes them.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "block_kernels.h"
#include "block_lanes.h"
#include "ggml_blocks.h"
#include "row_kernels.h"
#include "word_codes.h"

namespace {

constexpr int64_t kChunk = 512;  // columns that are unpacked at once: whole blocks

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

// A record's signed codes are from -127.
bool has_lowest(const CodedGroup &group) {
    uint32_t found = 0;
    for (const uint32_t word : group.words) {
        const uint32_t flipped = word ^ 0x80808080;
        found |= (flipped - 0x01010101) & ~flipped & 0x80808080;
    }
    return found != 0;
}

uint8_t *weights_of(const HalfTile &tile) { return const_cast<uint8_t *>(tile.weights); }

// Fits the rows of a group that the format cannot hold as they are.
template <class Type>
void fit_strays(const CodedGroup *groups, int64_t stride, const GroupScales &scales, const BlockHalf &half, int64_t group) {
    constexpr bool nibbles = Type::kFormat != SWITCHYARD_INT8;
    float w[kGroup * kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
        if (!half.rows[i] || scales.kept[i]) continue;
        uint8_t bytes[32];
        std::memcpy(bytes, groups[i * stride].words, 32);
        for (int c = 0; c < kGroup; ++c) {
            const float code = nibbles ? static_cast<float>(bytes[c % 16] >> (c / 16 * 4) & 15)
                                       : static_cast<float>(static_cast<int8_t>(bytes[c]));
            w[c * kLanes + i] = (Type::kZero == Zero::kNone ? code : code - scales.zero[i]) * scales.scale[i];
        }
    }
    const FitTarget target = half.fit_target(group, nullptr);
    uint8_t q[kGroup * kLanes], zeros[kLanes], codes[kGroup * kLanes];
    uint16_t found[kLanes];
    half.fit(w, {q, found, target.zeros ? zeros : nullptr, target.table, half.rounds});
    put_codes(codes, nibbles, q);
    for (int i = 0; i < kLanes; ++i) {
        if (!half.rows[i] || scales.kept[i]) continue;
        for (int j = 0; j < (nibbles ? 4 : 8); ++j)
            std::memcpy(weights_of(half.tile(group)) + j * 64 + i * 4, codes + j * 64 + i * 4, 4);
        target.scales[i] = found[i];
        if (target.zeros) target.zeros[i] = zeros[i];
    }
}

// Whether fp16 holds a scale so nearly that no code of int8 moves by half a step.
inline bool is_near_half(float scale) { return std::fabs(from_half(to_half(scale)) - scale) * 254.0f <= std::fabs(scale); }

// One group of 16 rows: groups[i * stride] of the i-th.
template <class Type> void keep_group(const CodedGroup *groups, int64_t stride, const BlockHalf &half, int64_t group) {
    constexpr int words = Type::kFormat == SWITCHYARD_INT8 ? 8 : 4;
    const FitTarget target = half.fit_target(group, nullptr);
    uint8_t *weights = weights_of(half.tile(group));
    GroupScales scales = {};
    bool all_kept = true;
    int32_t kept[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        kept[i] = 1;
        if (!half.rows[i]) continue;
        const CodedGroup &own = groups[i * stride];
        scales.scale[i] = own.scale;
        if constexpr (Type::kZero == Zero::kAny) {
            scales.zero[i] = own.zero;
            sums_of(own, &scales.total[i], &scales.squares[i]);
        }
        if constexpr (words == 8) kept[i] = !has_lowest(own) || !std::isfinite(own.scale);
        if constexpr (std::is_same_v<Type, EightBits>) kept[i] &= is_near_half(own.scale) || !std::isfinite(own.scale);
        for (int j = 0; j < words; ++j) std::memcpy(weights + j * 64 + i * 4, &own.words[j], 4);
    }
    std::memcpy(scales.kept, kept, sizeof kept);
    if constexpr (Type::kZero == Zero::kAny)
        choose_zeros(scales);
    else
        choose_scales<Type::kFormat>(scales, Type::kZero == Zero::kEight ? 128 : 0);
    for (int i = 0; i < kLanes; ++i) {
        if (!half.rows[i]) continue;
        target.scales[i] = scales.stored[i];
        if (target.zeros) target.zeros[i] = scales.stored_zero[i];
        all_kept &= scales.kept[i] != 0;
    }
    if (!all_kept) fit_strays<Type>(groups, stride, scales, half, group);
}

template <class Type> void keep_block(const BlockHalf &half, int64_t block) {
    constexpr int64_t groups = Type::kElements / kGroup;
    CodedGroup unpacked[kLanes * groups];
    for (int i = 0; i < kLanes; ++i)
        if (half.rows[i]) Type::codes(half.rows[i] + block * Type::kBytes, unpacked + i * groups);
    for (int64_t group = 0; group < groups; ++group)
        keep_group<Type>(unpacked + group, groups, half, block * groups + group);
}

void clear_half(const BlockHalf &half) {
    for (int64_t group = 0; group < half.target.groups; ++group) {
        const FitTarget target = half.fit_target(group, nullptr);
        std::memset(weights_of(half.tile(group)), 0, static_cast<size_t>(kFormats[half.format].half_bytes()));
        std::memset(target.scales, 0, kLanes * sizeof *target.scales);
        if (target.zeros) std::memset(target.zeros, 0, kLanes);
    }
}

bool is_full(const BlockHalf &half) {
    bool full = true;
    for (const uint8_t *row : half.rows) full &= row != nullptr;
    return full;
}

template <class Type> void keep_half(const BlockHalf &half) {
    if (!is_full(half)) clear_half(half);
    for (int64_t block = 0; block * Type::kElements < half.columns; ++block) keep_block<Type>(half, block);
}

template <class Type> void keep_words(const BlockHalf &half, const SwitchyardCodes &codes, const int64_t *from) {
    for (int64_t group = 0; group * kGroup < half.columns; ++group) {
        CodedGroup groups[kLanes];
        for (int i = 0; i < kLanes; ++i)
            if (half.rows[i]) read_codes(codes, half.columns, from[i], group, groups + i);
        keep_group<Type>(groups, 1, half, group);
    }
}

void keep_codes(const BlockHalf &half, const SwitchyardCodes &codes, const int64_t *from) {
    if (!is_full(half)) clear_half(half);
    (codes.bits == 8 ? keep_words<EightBits> : keep_words<FourBits>)(half, codes, from);
}

// As keep_half, with all rows side by side; `Side` is the type in block_lanes.h.
template <class Type, class Side> void keep_side_by_side(const BlockHalf &half) {
    if (!is_full(half)) return keep_half<Type>(half);
    constexpr int64_t groups = Type::kElements / kGroup;
    alignas(64) uint32_t words[(Type::kBytes + 3) / 4 * kLanes];
    for (int64_t block = 0; block * Type::kElements < half.columns; ++block) {
        side_by_side<Type::kBytes>(half.rows, block * Type::kBytes, words);
        int32_t kept = -1;
        for (int group = 0; group < groups; ++group) {
            const int64_t at = block * groups + group;
            const FitTarget target = half.fit_target(at, nullptr);
            GroupScales scales;
            for (int from = 0; from < kLanes; from += kLanesAtOnce)
                Side::codes(words, group, from, weights_of(half.tile(at)), scales);
            choose_zeros(scales);
            std::memcpy(target.scales, scales.stored, sizeof scales.stored);
            std::memcpy(target.zeros, scales.stored_zero, sizeof scales.stored_zero);
            for (const int32_t each : scales.kept) kept &= each;
        }
        if (!kept) keep_block<Type>(half, block);  // to fit the strays
    }
}

template <class Type> void values_of(const uint8_t *blocks, int64_t count, float *out) {
    for (int64_t block = 0; block < count; ++block) Type::values(blocks + block * Type::kBytes, out + block * Type::kElements);
}

void fit_group(const BlockHalf &half, const float *w, int64_t group) {
    uint8_t q[kGroup * kLanes];
    half.fit(w, half.fit_target(group, q));
    put_codes(weights_of(half.tile(group)), kFormats[half.format].code_bits == 4, q);
}

// `unpack` makes numbers of the blocks of some columns.
template <class Unpack> void fit_by(const BlockHalf &half, int64_t elements, int64_t bytes, Unpack unpack) {
    float values[kLanes][kChunk] = {};  // zeros for rows beyond the matrix
    for (int64_t begin = 0; begin < half.columns; begin += kChunk) {
        const int64_t columns = half.columns - begin < kChunk ? half.columns - begin : kChunk;
        for (int i = 0; i < kLanes; ++i)
            if (half.rows[i]) unpack(half.rows[i] + begin / elements * bytes, columns, values[i]);
        for (int64_t from = 0; from < columns; from += kGroup) {
            float w[kGroup * kLanes] = {};
            const int64_t width = columns - from < kGroup ? columns - from : kGroup;
            for (int64_t c = 0; c < width; ++c)
                for (int i = 0; i < kLanes; ++i) w[c * kLanes + i] = values[i][from + c];
            fit_group(half, w, (begin + from) / kGroup);
        }
    }
}

template <class Type> void unpack_values(const uint8_t *blocks, int64_t columns, float *out) {
    values_of<Type>(blocks, columns / Type::kElements, out);
}
template <class Type> void fit_half(const BlockHalf &half) {
    fit_by(half, Type::kElements, Type::kBytes, unpack_values<Type>);
}
void fit_rows(const BlockHalf &half, const RowType &type) { fit_by(half, type.elements, type.bytes, type.unpack); }

template <class Type, class Side> void fit_side_by_side(const BlockHalf &half) {
    if (!is_full(half)) return fit_half<Type>(half);
    constexpr int64_t groups = Type::kElements / kGroup;
    alignas(64) uint32_t words[(Type::kBytes + 3) / 4 * kLanes];
    alignas(64) float w[kGroup * kLanes];
    for (int64_t block = 0; block * Type::kElements < half.columns; ++block) {
        side_by_side<Type::kBytes>(half.rows, block * Type::kBytes, words);
        for (int group = 0; group < groups; ++group) {
            for (int from = 0; from < kLanes; from += kLanesAtOnce) Side::values(words, group, from, w);
            fit_group(half, w, block * groups + group);
        }
    }
}

template <class Unpack>
void unpack_by(const uint8_t *blocks, int64_t columns, int64_t elements, int64_t bytes, bool floats, void *out, Unpack unpack) {
    if (floats) return unpack(blocks, columns, static_cast<float *>(out));
    float values[kChunk];
    for (int64_t begin = 0; begin < columns; begin += kChunk) {
        const int64_t width = columns - begin < kChunk ? columns - begin : kChunk;
        unpack(blocks + begin / elements * bytes, width, values);
        auto *to = static_cast<uint16_t *>(out) + begin;
        for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(values[i]);
    }
}
template <class Type> void unpack_row(const uint8_t *blocks, int64_t columns, bool floats, void *out) {
    unpack_by(blocks, columns, Type::kElements, Type::kBytes, floats, out, unpack_values<Type>);
}
void unpack_rows(const uint8_t *blocks, int64_t columns, const RowType &type, bool floats, void *out) {
    unpack_by(blocks, columns, type.elements, type.bytes, floats, out, type.unpack);
}

template <class Type> constexpr BlockType kept(void (*keep)(const BlockHalf &) = keep_half<Type>) {
    return {Type::kNumber, Type::kElements, Type::kBytes, Type::kFormat, keep, fit_half<Type>, unpack_row<Type>};
}
template <class Type> constexpr BlockType fitted(void (*fit)(const BlockHalf &) = fit_half<Type>) {
    return {Type::kNumber, Type::kElements, Type::kBytes, SWITCHYARD_BF16, nullptr, fit, unpack_row<Type>};
}

constexpr BlockKernels block_kernels() {
    return {{fitted<F32>(), fitted<F16>(), fitted<Bf16>(), kept<Q4_0>(), kept<Q4_1>(), kept<Q5_0>(), fitted<Q5_1>(),
             kept<Q8_0>(), fitted<Q2K>(), fitted<Q3K>(), kept<Q4K>(keep_side_by_side<Q4K, Q4KLanes>),
             fitted<Q5K>(fit_side_by_side<Q5K, Q5KLanes>), fitted<Q6K>(fit_side_by_side<Q6K, Q6KLanes>), kept<Iq4Nl>(),
             kept<Iq4Xs>(), kept<Mxfp4>()},
            keep_codes, fit_rows, unpack_rows};
}

}  // namespace
