// What is done with 16 rows of blocks side by side: the scales and zeros of a record, and the commonest types word by word,
// each of which does in a vector what ggml_blocks.h does for a row.
//
// Scales and zeros are those of engine/formats/coded.py, bit by bit.
#pragma once
#include <cmath>
#include <limits>

#include "block_kernels.h"
#include "lanes.h"

namespace {

constexpr float kClamped = 0.25f, kHighestZero = 255.0f, kTiny = 0x1p-120f;
constexpr uint16_t kNaN = 0x7fc0, kHalfNaN = 0x7e00;
constexpr uint32_t kLowNibbles = 0x0f0f0f0f;

// What a group of 16 rows takes besides its codes: as the file has it, and as it is stored.
struct GroupScales {
    alignas(64) float scale[kLanes], zero[kLanes];     // zero: of types that have any
    alignas(64) float total[kLanes], squares[kLanes];  // sums of codes and of their squares: likewise
    alignas(64) uint16_t stored[kLanes];
    alignas(64) uint8_t stored_zero[kLanes];
    alignas(64) int32_t kept[kLanes];  // 0 where the format cannot hold them
};

inline Lanes sixteenths(Lanes values) {
    const Lanes highest = Lanes{} + kHighestZero;
    values = values > 0.0f ? values : Lanes{};
    return whole(values < highest ? values : highest);
}
inline WholeLanes is_strange(Lanes values) { return ((BitLanes)values & 0x7f800000) == 0x7f800000; }
inline Lanes size_of(Lanes values) { return (Lanes)((BitLanes)values & 0x7fffffff); }

// Of the two scales in bf16 around each, with the best zero for it, that with the least squared error.
void choose_zeros(GroupScales &group) {
    for (int from = 0; from < kLanes; from += kLanesAtOnce) {
        const Lanes scale = read<Lanes>(group.scale + from), zero = read<Lanes>(group.zero + from);
        const Lanes total = read<Lanes>(group.total + from), squares = read<Lanes>(group.squares + from);
        const WholeLanes strange = is_strange(scale) | is_strange(zero);
        const Lanes offset = scale * zero, values = scale * total - 32.0f * offset;
        const BitLanes below = (BitLanes)scale >> 16;
        Lanes zeros[2], errors[2];
        for (uint32_t step = 0; step < 2; ++step) {
            const Lanes candidate = (Lanes)((below + step) << 16);
            zeros[step] = sixteenths((total - values / candidate) * 0.5f);
            const Lanes a = scale - candidate, b = candidate * (zeros[step] * 0.0625f) - offset;
            errors[step] = a * a * squares + 2.0f * a * b * total + 32.0f * (b * b);
        }
        const WholeLanes above = errors[1] < errors[0];
        const Lanes exact = zero * 16.0f, settled = sixteenths(exact);
        const WholeLanes is_settled = (settled == exact) | (size_of(scale) < kTiny);
        const BitLanes chosen = is_settled ? nearest_bf16((BitLanes)scale) : below - (BitLanes)above;
        const Lanes chosen_zero = is_settled ? settled : above ? zeros[1] : zeros[0];
        const WholeLanes stored_zero = strange ? WholeLanes{} : __builtin_convertvector(chosen_zero, WholeLanes);
        const WholeLanes held = (zero >= -kClamped) & (zero <= kHighestZero / 16.0f + kClamped);
        write(group.kept + from, strange | held);
        write(group.stored + from, __builtin_convertvector(strange ? BitLanes{} + kNaN : chosen, ShortLanes));
        write(group.stored_zero + from, __builtin_convertvector(stored_zero, ByteLanes));
    }
}

// GGUF's types that are kept in a format with scales in fp16 have such themselves.
template <int of_format> void choose_scales(GroupScales &group, uint8_t zero) {
    constexpr Format format = kFormats[of_format];
    for (int i = 0; i < kLanes; ++i) {
        const bool finite = std::fabs(group.scale[i]) <= std::numeric_limits<float>::max();
        group.stored[i] = finite ? scale_to(format, group.scale[i]) : format.half_scales ? kHalfNaN : kNaN;
        group.stored_zero[i] = finite ? zero : 0;
    }
}

// words[j * 16 + i]: the j-th word of a block of row i, `skip` bytes into the row; the last one may be half a word.
template <int64_t bytes> void side_by_side(const uint8_t *const *rows, int64_t skip, uint32_t *words) {
    for (int i = 0; i < kLanes; ++i) {
        const uint8_t *from = rows[i] + skip;
        for (int j = 0; j < bytes / 4; ++j) std::memcpy(words + j * kLanes + i, from + 4 * j, 4);
        if constexpr (bytes % 4 != 0) {
            words[bytes / 4 * kLanes + i] = 0;
            std::memcpy(words + bytes / 4 * kLanes + i, from + bytes / 4 * 4, bytes % 4);
        }
    }
}

inline Lanes halves_of(BitLanes bits) {
    const BitLanes sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    const BitLanes tiny = (BitLanes)(floats_of(rest) * 0x1p-24f), normal = (rest << 13) + 0x38000000;
    const BitLanes strange = 0x7f800000 | (rest & 0x3ff) << 13;
    return (Lanes)(sign | (rest >= 0x7c00 ? strange : rest < 0x400 ? tiny : normal));
}

// A byte of the words of a block.
inline BitLanes byte_at(const uint32_t *words, int at) { return read<BitLanes>(words + at / 4 * kLanes) >> (at % 4 * 8) & 255; }

// See steps_at; `words` begin with the block's scales.
inline void k_steps(const uint32_t *words, int group, Lanes *step, Lanes *lowest) {
    const BitLanes head = read<BitLanes>(words), first = byte_at(words, 4 + group % 4);
    const BitLanes second = byte_at(words, 8 + group % 4), third = byte_at(words, 12 + group % 4);
    const bool early = group < 4;
    *step = halves_of(head & 0xffff) * floats_of(early ? first & 63 : (third & 15) | (first >> 2 & 48));
    *lowest = halves_of(head >> 16) * floats_of(early ? second & 63 : third >> 4 | (second >> 2 & 48));
}

// Sums of codes of four words of nibbles, and of their squares.
inline void nibble_sums(const BitLanes *words, Lanes *total, Lanes *squares) {
    BitLanes sum = {};
    HalfLanes square = {};
    for (int j = 0; j < 4; ++j) {
        sum += (words[j] & kLowNibbles) + (words[j] >> 4 & kLowNibbles);  // bytes up to 120
        for (int nibble = 0; nibble < 16; nibble += 4) {
            const HalfLanes codes = (HalfLanes)(words[j] >> nibble & 0x000f000f);
            square += codes * codes;
        }
    }
    sum = (sum & 0x00ff00ff) + (sum >> 8 & 0x00ff00ff);
    *total = floats_of((sum + (sum >> 16)) & 0xffff);
    *squares = floats_of(((BitLanes)square & 0xffff) + ((BitLanes)square >> 16));
}

struct Q4KLanes {
    static constexpr int64_t kElements = 256, kBytes = 144;

    // The codes of a group to its tile, and the rest to `out`; see set_scale.
    static void codes(const uint32_t *words, int group, int from, uint8_t *weights, GroupScales &out) {
        Lanes step, lowest;
        k_steps(words + from, group, &step, &lowest);
        const Lanes size = size_of(lowest), eighth = Lanes{} + 8.0f;
        const WholeLanes flat = (step == 0.0f) | (size > 1048576.0f * size_of(step));
        write(out.scale + from, flat ? size * 0.125f : step);
        write(out.zero + from, !flat ? lowest / step : lowest < 0.0f ? -eighth : eighth);
        const uint32_t *pairs = words + (4 + group / 2 * 8) * kLanes + from;
        const int shift = group % 2 * 4;
        BitLanes codes[4];
        for (int j = 0; j < 4; ++j) {
            const BitLanes first = read<BitLanes>(pairs + j * kLanes) >> shift & kLowNibbles;
            const BitLanes second = read<BitLanes>(pairs + (4 + j) * kLanes) >> shift & kLowNibbles;
            codes[j] = flat ? BitLanes{} : first | second << 4;
            write(weights + j * 64 + from * 4, codes[j]);
        }
        Lanes total, squares;
        nibble_sums(codes, &total, &squares);
        write(out.total + from, total);
        write(out.squares + from, squares);
    }
};

struct Q5KLanes {
    static constexpr int64_t kElements = 256, kBytes = 176;

    // The weights of a group, w[column * 16 + row].
    static void values(const uint32_t *words, int group, int from, float *w) {
        Lanes step, lowest;
        k_steps(words + from, group, &step, &lowest);
        const uint32_t *high = words + 4 * kLanes + from, *pairs = words + (12 + group / 2 * 8) * kLanes + from;
        for (int j = 0; j < 8; ++j) {
            const BitLanes fifth = (read<BitLanes>(high + j * kLanes) >> group & 0x01010101) << 4;
            const BitLanes q = (read<BitLanes>(pairs + j * kLanes) >> (group % 2 * 4) & kLowNibbles) | fifth;
            for (int c = 0; c < 4; ++c) write(w + (4 * j + c) * kLanes + from, step * floats_of(q >> (8 * c) & 255) - lowest);
        }
    }
};

struct Q6KLanes {
    static constexpr int64_t kElements = 256, kBytes = 210;

    static void values(const uint32_t *words, int group, int from, float *w) {
        const Lanes scale = halves_of(read<BitLanes>(words + 52 * kLanes + from));
        for (int part = 2 * group; part < 2 * group + 2; ++part) {
            const WholeLanes factor = (WholeLanes)(byte_at(words + 48 * kLanes + from, part) << 24) >> 24;
            const Lanes step = scale * __builtin_convertvector(factor, Lanes);
            const uint32_t *low = words + (part / 8 * 16 + part % 4 * 4) * kLanes + from;
            const uint32_t *high = words + (32 + part / 8 * 8 + part % 2 * 4) * kLanes + from;
            for (int j = 0; j < 4; ++j) {
                const BitLanes top = (read<BitLanes>(high + j * kLanes) >> (part % 8 / 2 * 2) & 0x03030303) << 4;
                const BitLanes q = (read<BitLanes>(low + j * kLanes) >> (part % 8 / 4 * 4) & kLowNibbles) | top;
                for (int c = 0; c < 4; ++c) {
                    const int column = part % 2 * 16 + 4 * j + c;
                    write(w + column * kLanes + from, step * (floats_of(q >> (8 * c) & 255) - 32.0f));
                }
            }
        }
    }
};

}  // namespace
