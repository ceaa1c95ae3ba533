#include "held_rows.h"

#include <algorithm>
#include <cmath>

#include "kernel_set.h"
#include "switchyard_kernels.h"

int64_t size_of_number(int32_t type) { return type == SWITCHYARD_KV_FP32 ? 4 : type == SWITCHYARD_KV_INT8 ? 1 : 2; }

namespace {

// The scale is the largest number's 127th part.  A NaN becomes 0: the comparison is false for it.
void write_int8(const float *x, int64_t dim, int8_t *out, float *scale) {
    float most = 0;
    for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(x[i]));
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    *scale = most / 127.0f;
    for (int64_t i = 0; i < dim; ++i) {
        const float scaled = x[i] * inverse;
        out[i] = std::fabs(scaled) <= 127.5f ? static_cast<int8_t>(std::nearbyint(std::fmin(scaled, 127.0f))) : int8_t{0};
    }
}

}  // namespace

void write_row(int32_t type, const float *x, int64_t dim, int64_t row, void *rows, float *scales) {
    const int64_t at = row * dim;
    if (type == SWITCHYARD_KV_INT8) {
        write_int8(x, dim, static_cast<int8_t *>(rows) + at, scales + row);
    } else if (type == SWITCHYARD_KV_FP32) {
        std::copy_n(x, dim, static_cast<float *>(rows) + at);
    } else if (auto *out = static_cast<uint16_t *>(rows) + at; type == SWITCHYARD_KV_BF16) {
        for (int64_t i = 0; i < dim; ++i) out[i] = to_bf16(x[i]);
    } else {
        for (int64_t i = 0; i < dim; ++i) out[i] = to_half(std::max(-65504.0f, std::min(65504.0f, x[i])));
    }
}

HeldRows HeldHead::rows_of(const int32_t *pages, int64_t key_dim, int64_t value_dim) const {
    const int64_t first = kv_head * held.page_tokens * (held.run ? held.run : 1), size = size_of_number(held.type);
    HeldRows rows = {static_cast<const char *>(held.keys) + first * key_dim * size,
                     static_cast<const char *>(held.values) + first * value_dim * size, key_dim, value_dim};
    if (held.key_scales) rows.key_scales = held.key_scales + first, rows.value_scales = held.value_scales + first;
    rows.pages = pages;
    rows.page_tokens = held.page_tokens;
    rows.page_rows = held.run ? held.page_tokens : kv_heads * held.page_tokens;
    return rows;
}
