// Keys and values as they are stored: each type of SWITCHYARD_KV_*, in pages.
#pragma once
#include <cstdint>

#include "attend.h"
#include "switchyard_kernels.h"

// Bytes of a number.
int64_t size_of_number(int32_t type);
// Writes x [dim] as row `row` of `rows` [any, dim], and its scale, where the type has one, to scales[row].
void write_row(int32_t type, const float *x, int64_t dim, int64_t row, void *rows, float *scales);

// One of the heads whose keys and values pages hold.
struct HeldHead {
    const SwitchyardPages &held;
    int64_t kv_heads, kv_head;

    // Its rows as a sequence has them.
    HeldRows rows_of(const int32_t *pages, int64_t key_dim, int64_t value_dim) const;
    // Where its row of a token is among those of all heads and pages.
    int64_t row_of(const int32_t *pages, int64_t position) const {
        const int64_t page = pages ? pages[position / held.page_tokens] : 0;
        const int64_t slot = pages ? position % held.page_tokens : position;
        return (held.run ? kv_head * held.run + page : page * kv_heads + kv_head) * held.page_tokens + slot;
    }
};
