// Products of matrices with many vectors, as in a prefill: weights are converted once, for all vectors, to the form that the
// processor multiplies fastest.
#pragma once
#include <cstdint>

#include "kernel_set.h"
#include "switchyard_kernels.h"

// A block of 32 rows as `multiply` reads it: its two halves of 16, `stride` bytes between the rows of each where they
// are rows.
struct Panel {
    const uint8_t *upper, *lower;
    int64_t stride;
    // Of a bf16 matrix, what is multiplied next, 16 rows each as they are stored, to be fetched meanwhile; or null.
    const uint8_t *next_upper = nullptr, *next_lower = nullptr;
};

// What of the next block is fetched while `rows` rows from `row` on are multiplied with one of `parts` parts of the
// vectors.
class Ahead {
  public:
    Ahead(const Panel &panel, int64_t columns, int64_t row, int64_t rows, int64_t part, int64_t parts)
        : from_(row < kHalfRows ? panel.next_upper : panel.next_lower), stride_(columns * 2),
          begin_(row % kHalfRows + rows * part / parts), end_(from_ ? row % kHalfRows + rows * (part + 1) / parts : 0) {}
    // Of each of its rows, the 32 columns from here.
    void fetch(int64_t column) const {
        for (int64_t row = begin_; row < end_; ++row) __builtin_prefetch(from_ + row * stride_ + column * 2, 0, 2);
    }

  private:
    const uint8_t *from_;
    int64_t stride_, begin_, end_;
};

// A kind of rows is a matrix's format: of numbers among blocks that of bf16, or one more for F32 and F16, which bf16 would round.
constexpr int32_t kExact = kFormatCount, kKinds = kFormatCount + 1;

struct ManyKernels {
    int64_t lanes;  // vectors that are computed side by side: a tile, padded with zeros
    // By kind of rows: the number of vectors from which these kernels beat those for few; 0 if they do not support it.
    int64_t fewest[kKinds];
    // Bytes of a packed tile of `lanes` vectors, and of the buffer that `prepare` is given.
    int64_t (*packed_bytes)(int32_t format, int64_t columns);
    int64_t (*panel_bytes)(int32_t format, int64_t columns);
    // Up to `lanes` bf16 vectors of `columns` into one tile.
    void (*pack)(int32_t format, const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out);
    // For products with `count` vectors in all.
    Panel (*prepare)(const SwitchyardMatrix &matrix, int64_t block, int64_t count, uint8_t *room);
    // out: [count, 32] of the block's rows with the `count` vectors of tiles one after the other from `x`; room for those
    // that the last tile is padded with.
    void (*multiply)(int32_t format, int64_t columns, const Panel &panel, const uint8_t *x, int64_t count,
                     float *out);
    // In place: [count, 32] of gate and up halves (or 32 rows without a gate) and their biases [32] -> activated, in
    // the first 16 (32) of each 32.
    void (*activate)(const SwitchyardExperts &layer, const float *bias, int64_t count, float *dots);
    // sum[i] += weight * (dots[i] + bias[i]), rounded to bf16 before it is weighted where `rounds`, for i < rows <= 32.
    void (*add)(float weight, const float *dots, const float *bias, bool rounds, int64_t rows, float *sum);
    // A running softmax.  Scores of a query with `keys` keys, 32 side by side and `step` floats from one 32 to the next, of
    // which [from, to) are seen -> shares [keys] in bf16, 0 where not seen; `top` is the highest of scale * score so far,
    // `total` the sum of shares.  Returns what sums before are to be multiplied with.
    float (*soften)(const float *scores, int64_t step, int64_t keys, int64_t from, int64_t to, float scale, float *top,
                    float *total, uint16_t *shares);
    // sum[i] = before * sum[i] + dots[i] for i < rows
    void (*carry)(float before, const float *dots, int64_t rows, float *sum);
    // To bf16, rounded to nearest even.
    void (*narrow)(const float *values, int64_t count, uint16_t *out);
};

extern const ManyKernels kPortableMany;
#if defined(__x86_64__) || defined(_M_X64)
extern const ManyKernels kAvx2Many;
extern const ManyKernels kAvx512Many;
extern const ManyKernels *const kAvx512Bf16Many;  // null if the compiler does not know the instructions
extern const ManyKernels *const kAmxMany;         // likewise
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const ManyKernels kNeonMany;
#endif
