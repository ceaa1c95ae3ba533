// Many vectors in bf16, two neighbouring columns of 16 vectors in each 64 bytes: [column pairs, 16, 2], padded with
// zeros to whole groups of 32 columns.  Products of bf16 pairs read that as it is, and rows of weights as they are
// stored.  Compiled with AVX-512 F, BW and VL.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "activation_rows.h"
#include "many_kernels.h"
#include "matrix.h"

namespace {

constexpr int64_t kPairLanes = 16;
constexpr int64_t kTileBytes = 1024;  // 16 vectors x 32 columns in bf16

// 16 rows of 16 numbers of 32 bits, in place.
static inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// 32 columns from `at`, zeros beyond the last.
static inline __m512i load_group(const uint16_t *row, int64_t at, int64_t columns) {
    if (at + kGroup <= columns) return _mm512_loadu_si512(row + at);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << (columns - at)) - 1), row + at);
}

int64_t packed_tiles(int32_t, int64_t columns) { return groups_of(columns) * kTileBytes; }

void pack_pairs(const uint16_t *const *rows, int64_t count, int64_t columns, uint8_t *out) {
    for (int64_t at = 0; at < columns; at += kGroup, out += kTileBytes) {
        __m512i r[16];
        for (int64_t v = 0; v < 16; ++v)
            r[v] = v < count ? load_group(rows[v], at, columns) : _mm512_setzero_si512();
        transpose(r);
        for (int64_t v = 0; v < 16; ++v) _mm512_store_si512(out + 64 * v, r[v]);
    }
}

// Rows are padded, because rows a power of two apart would evict each other from the cache.
int64_t copied_stride(int64_t columns) { return groups_of(columns) * 64 + 64; }

int64_t rows_room(int64_t columns) { return kTileRows * copied_stride(columns); }

// A row of blocks, or of any numbers, in bf16.
inline void narrow_row(const StoredRow &row, int64_t columns, uint8_t *out) {
    if (row.type->number == kBf16Type) {
        std::memcpy(out, row.blocks, static_cast<size_t>(columns) * 2);
        return;
    }
    alignas(64) float values[kWide] = {};
    const int64_t bytes = kWide / row.type->elements * row.type->bytes;
    for (int64_t at = 0; at < columns; at += kWide) {
        const int64_t some = std::min(kWide, columns - at);
        const uint8_t *from = row.blocks + at / kWide * bytes;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + bytes + line);
        row.type->unpack(from, some, values);
        for (int64_t i = 0; i < some; i += 32) {
            const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(values + i + 16), _mm512_load_ps(values + i));
            _mm512_storeu_si512(out + (at + i) * 2, both);
        }
    }
}

// The halves of a block, with zeros where rows or columns end.
Panel copy_rows(const SwitchyardMatrix &matrix, int64_t block, int64_t, uint8_t *room) {
    const RowOrder order(matrix);
    const int64_t columns = matrix.columns, stride = copied_stride(columns), bytes = columns * 2;
    for (int64_t i = 0; i < kTileRows; ++i) {
        const int64_t upper = block * order.block + i % kHalfRows * order.step;
        const int64_t row = upper + i / kHalfRows * order.partner;
        const int64_t there = upper < order.first_limit && row < matrix.rows ? bytes : 0;
        if (there) narrow_row(stored_row(kAvx512VnniRows, matrix, row), columns, room + i * stride);
        std::memset(room + i * stride + there, 0, static_cast<size_t>(stride - there));
    }
    return {room, room + kHalfRows * stride, stride};
}

// The same without a copy, unless rows or columns end in the block.
Panel prepare_rows(const SwitchyardMatrix &matrix, int64_t block, int64_t count, uint8_t *room) {
    const RowOrder order(matrix);
    const int64_t first = block * order.block, columns = matrix.columns;
    const int64_t last = first + (kHalfRows - 1) * order.step;
    if (columns % kGroup != 0 || matrix.order || matrix.second || last >= order.first_limit || last + order.partner >= matrix.rows)
        return copy_rows(matrix, block, count, room);
    const auto *upper = static_cast<const uint8_t *>(matrix.weights) + first * columns * 2;
    return {upper, upper + order.partner * columns * 2, order.step * columns * 2};
}

}  // namespace
