// Products of rows that are stored in blocks, as GGUF files have them, with a few vectors: each type is one file in types/,
// and nothing is repacked.
#pragma once
#include <cstdint>

#include "switchyard_kernels.h"

// How a vector is rounded for a type: types of 32 have a scale per 32 values, as QuantisedVector has them, types of 64 and more one per
// 256; plain numbers are multiplied with the vector as it is.
enum class VectorForm { kSpread, kBy32, kBy256, kFloats };
constexpr int kForms = 4;
constexpr int64_t kWide = 256;  // values of a scale, and weights of a block of the larger types
constexpr int64_t kPart = 16;   // values of a sum
static constexpr int64_t wide_blocks(int64_t n) { return (n + kWide - 1) / kWide; }

// A vector in one of the forms; it is padded with zeros to whole blocks of 256.
struct RowVector {
    const int8_t *q;       // -127 to 127
    const float *scales;   // per 32, or per 256: a value is scale * q
    const int32_t *sums;   // per 32, of q: kBy32
    const int16_t *parts;  // per 16, of q: kBy256
    const float *values;   // kFloats
};

constexpr int kMostRowVectors = 8;  // that are multiplied without unpacking rows to memory

// A block of 32 rows, unpacked for many vectors: a weight is scale * (code - offset) + minimum.
struct RowPanel {
    uint8_t *codes;        // unsigned; in an order of the instruction set's, such as int8's tiles of 32 columns
    float *scales, *mins;  // [columns / width][32]
    int64_t width;         // columns that share a scale: 16 or 32
    int32_t offset;        // of codes; whole numbers only
    bool has_mins;
};

struct RowType {
    int32_t number;  // ggml's
    int64_t elements, bytes;  // of a block
    VectorForm form;
    // out[v] = row * x[v], for `columns` (whole blocks) and `count` <= kMostRowVectors vectors, each as it would be alone.
    void (*dot)(const uint8_t *row, int64_t columns, const RowVector *x, int count, float *out);
    // Up to 32 rows (null beyond a matrix), after which come those that are to be fetched meanwhile (or null), to a panel with
    // memory for `columns` rounded up to 256; null where products of a row with a few vectors at a time are as fast.
    void (*unpack_panel)(const uint8_t *const *rows, int64_t columns, RowPanel *panel);
    // out[v * 32 + row] for `count` vectors, as `dot`, but rounded otherwise.
    void (*multiply)(const RowPanel &panel, int64_t columns, const RowVector *x, int64_t count, float *out);
    // The same as both for up to kMostRowVectors, each as it would be alone, whose codes are not stored; null where that takes as long.
    void (*multiply_few)(const uint8_t *const *rows, int64_t columns, const RowVector *x, int64_t count, float *out);
    int fewest;  // vectors from which these are faster than `dot`
    // A row's weights.
    void (*unpack)(const uint8_t *row, int64_t columns, float *out);
};

constexpr int kMostTypes = 64;  // and ggml's numbers for them are below
constexpr int32_t kF32Type = 0, kF16Type = 1, kBf16Type = 30;  // ggml's numbers of types of numbers

struct RowKernels {
    RowType types[kMostTypes];
    int32_t count;
    // n values to form kBy256, padded.  Whether, somewhere, one is so large that little is left of those that share its scale.
    bool (*quantise_wide)(const float *x, int64_t n, int8_t *q, float *scales, int16_t *parts);
    int8_t places[kMostTypes];  // of each number's type, or -1

    constexpr const RowType *begin() const { return types; }
    constexpr const RowType *end() const { return types + count; }
    constexpr const RowType *of(int32_t number) const {
        const int place = number < 0 || number >= kMostTypes ? -1 : places[number];
        return place < 0 ? nullptr : types + place;
    }
};

extern const RowKernels kPortableRows;
#if defined(__x86_64__) || defined(_M_X64)
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512VnniRows;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const RowKernels kNeonRows;
extern const RowKernels kNeonDotRows;
extern const RowKernels kNeonI8mmRows;
#endif
