// Codes of quantised safetensors, 2, 4 or 8 bits in words of 32, as groups of a record: see SwitchyardCodes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml_blocks.h"
#include "kernel_set.h"
#include "switchyard_kernels.h"

namespace {

// What `keep_group` asks of a type: these codes' bits are in SwitchyardCodes.
struct FourBits {
    static constexpr int kFormat = SWITCHYARD_INT4;
    static constexpr Zero kZero = Zero::kAny;
};
struct EightBits {
    static constexpr int kFormat = SWITCHYARD_INT8;
    static constexpr Zero kZero = Zero::kNone;
};

inline uint32_t word_at(const uint8_t *words, int64_t index) {
    uint32_t word;
    std::memcpy(&word, words + 4 * index, 4);
    return word;
}

// 8 codes of 4 bits, or of 2, in a byte each.
inline uint64_t spread4(uint64_t word) {
    word = (word | word << 16) & 0x0000ffff0000ffff;
    word = (word | word << 8) & 0x00ff00ff00ff00ff;
    return (word | word << 4) & 0x0f0f0f0f0f0f0f0f;
}
inline uint64_t spread2(uint64_t word) {
    word = (word | word << 24) & 0x000000ff000000ff;
    word = (word | word << 12) & 0x000f000f000f000f;
    return (word | word << 6) & 0x0303030303030303;
}

// The words that hold the codes of a row's group, in its columns' order: one for each bit.
inline void gather_words(const SwitchyardCodes &codes, int64_t row, int64_t group, uint32_t *words) {
    if (codes.arrangement == SWITCHYARD_AWQ) {
        constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
        const int shift = 4 * kPlaces[row % 8];
        const uint8_t *from = codes.words + 4 * (group * kGroup * codes.stride + row / 8);
        for (int j = 0; j < 4; ++j) {
            words[j] = 0;
            for (int c = 0; c < 8; ++c) words[j] |= (word_at(from, (8 * j + c) * codes.stride) >> shift & 15) << (4 * c);
        }
        return;
    }
    const bool by_row = codes.arrangement == SWITCHYARD_ROWS;
    for (int64_t j = 0; j < codes.bits; ++j) {
        const int64_t word = group * codes.bits + j;
        words[j] = word_at(codes.words, by_row ? row * codes.stride + word : word * codes.stride + row);
    }
}

inline void read_codes(const SwitchyardCodes &codes, int64_t columns, int64_t row, int64_t group, CodedGroup *out) {
    const int64_t at = row * (columns / codes.group) + group * kGroup / codes.group;
    uint32_t words[8];
    gather_words(codes, row, group, words);
    out->scale = codes.scales[at];
    if (codes.bits == 8) {
        for (int j = 0; j < 8; ++j) out->words[j] = words[j] ^ (codes.flipped ? 0x80808080 : 0);
        return;
    }
    uint64_t pairs[2];  // elements 0 to 15 in the low bits of bytes, 16 to 31 in the high ones
    for (int j = 0; j < 2; ++j)
        pairs[j] = codes.bits == 4 ? spread4(words[j]) | spread4(words[2 + j]) << 4
                                   : spread2(words[0] >> (16 * j) & 0xffff) | spread2(words[1] >> (16 * j) & 0xffff) << 4;
    if (!codes.added) {
        out->zero = codes.zeros[at];
    } else if (const float added = codes.added[at]; out->scale != 0) {
        out->zero = -added / out->scale;
    } else {  // a constant group becomes 8 or -8 times an eighth of it
        out->scale = std::fabs(added) / 8;
        out->zero = added > 0 ? 0.0f : 8.0f;
        pairs[0] = pairs[1] = added > 0 ? 0x8888888888888888 : 0;
    }
    std::memcpy(out->words, pairs, 16);
}

}  // namespace
