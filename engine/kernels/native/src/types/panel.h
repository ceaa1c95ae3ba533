// A block of 32 rows unpacked once for many vectors: in tiles, of which a column's four bytes of a vector meet those of 16 rows.
#pragma once
#include "rows.h"

#if defined(__AVX512VNNI__)
namespace {

constexpr int64_t kPanelRows = 32;

// 16 rows of 64 bytes, `stride` apart -> 16 vectors with four bytes of each row.
inline void transpose(const uint8_t *rows, int64_t stride, uint8_t *out, int64_t step) {
    __m512i in[16], pairs[16];
    for (int i = 0; i < 16; ++i) in[i] = bytes_at(rows + i * stride);
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // in[i + c]: column c of every four, of rows i to i + 3
        in[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        in[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        in[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        in[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(in[c], in[4 + c], 0x88), high = _mm512_shuffle_i32x4(in[c], in[4 + c], 0xdd);
        const __m512i more = _mm512_shuffle_i32x4(in[8 + c], in[12 + c], 0x88);
        const __m512i most = _mm512_shuffle_i32x4(in[8 + c], in[12 + c], 0xdd);
        const __m512i columns[4] = {_mm512_shuffle_i32x4(low, more, 0x88), _mm512_shuffle_i32x4(high, most, 0x88),
                                    _mm512_shuffle_i32x4(low, more, 0xdd), _mm512_shuffle_i32x4(high, most, 0xdd)};
        for (int four = 0; four < 4; ++four) _mm512_store_si512(out + step * (4 * four + c), columns[four]);
    }
}

// 64 columns of all rows to their place: two tiles, of which each half of 16 rows has eight vectors.
inline void put_columns(const uint8_t *codes, int64_t column, RowPanel *panel) {
    alignas(64) uint8_t vectors[16 * 64];
    for (int half = 0; half < 2; ++half) {
        transpose(codes + half * 16 * kWide + column % kWide, kWide, vectors, 64);
        for (int tile = 0; tile < 2; ++tile)
            std::memcpy(panel->codes + (column / kGroup + tile) * 1024 + half * 512, vectors + tile * 512, 512);
    }
}

template <class Type> void unpack_wide(const uint8_t *const *rows, int64_t columns, RowPanel *panel) {
    panel->width = Type::kWidth;
    panel->offset = Type::kOffset;
    panel->has_mins = Type::kLowest;
    alignas(64) uint8_t codes[kPanelRows * kWide];
    alignas(64) float scales[16], mins[16];
    for (int64_t block = 0; block * kWide < columns; ++block) {
        for (int64_t row = 0; row < kPanelRows; ++row) {
            const int64_t parts = kWide / Type::kWidth, step = Type::kWidth / kPart;
            float *to_scales = panel->scales + block * parts * kPanelRows + row;
            float *to_mins = panel->mins + block * parts * kPanelRows + row;
            if (!rows[row]) {
                std::memset(codes + row * kWide, 0, kWide);
                for (int64_t part = 0; part < parts; ++part) to_scales[part * kPanelRows] = to_mins[part * kPanelRows] = 0;
                continue;
            }
            const uint8_t *at = rows[row] + block * Type::kBytes;
            for (int64_t line = 0; line < Type::kBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char *>(at) + line + 2 * Type::kBytes, _MM_HINT_T0);
            const Wide wide = Type::wide(at);
            for (int j = 0; j < 4; ++j) {
                uint8_t *to = codes + row * kWide;
                _mm256_store_si256(reinterpret_cast<__m256i *>(to + Type::place(j, 0)), _mm512_castsi512_si256(wide.codes[j]));
                _mm256_store_si256(reinterpret_cast<__m256i *>(to + Type::place(j, 1)), _mm512_extracti64x4_epi64(wide.codes[j], 1));
            }
            const __m512 steps = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(wide.steps));
            _mm512_store_ps(scales, _mm512_mul_ps(steps, _mm512_set1_ps(wide.scale)));
            for (int64_t part = 0; part < parts; ++part) to_scales[part * kPanelRows] = scales[part * step];
            if constexpr (Type::kLowest) {
                const __m512 least = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(wide.mins));
                _mm512_store_ps(mins, _mm512_mul_ps(least, _mm512_set1_ps(-wide.lowest)));
                for (int64_t part = 0; part < parts; ++part) to_mins[part * kPanelRows] = mins[part * step];
            }
        }
        for (int64_t column = 0; column < kWide; column += 64) put_columns(codes, block * kWide + column, panel);
    }
}

template <class Type> void unpack_four(const uint8_t *const *rows, int64_t columns, RowPanel *panel) {
    panel->width = kGroup;
    panel->offset = Type::kOffset;
    panel->has_mins = Type::kOffset == 0;
    alignas(64) uint8_t codes[kPanelRows * kWide];
    const int64_t groups = columns / kGroup, step = Type::kBytes;
    for (int64_t from = 0; from < groups; from += kWide / kGroup) {
        for (int64_t row = 0; row < kPanelRows; ++row)
            for (int64_t group = from; group < from + kWide / kGroup; group += 4) {
                uint8_t last[4 * Type::kBytes] = {};
                const int64_t there = rows[row] && group < groups ? (groups - group < 4 ? groups - group : 4) : 0;
                const uint8_t *at = last;
                if (there == 4)
                    at = rows[row] + group * step;
                else if (there > 0)
                    std::memcpy(last, rows[row] + group * step, static_cast<size_t>(there * step));
                _mm_prefetch(reinterpret_cast<const char *>(at) + 512, _MM_HINT_T0);
                const Four four = Type::four(at);
                uint8_t *to = codes + row * kWide + (group - from) * kGroup;
                _mm512_store_si512(to, four.codes[0]);
                _mm512_store_si512(to + 64, four.codes[1]);
                alignas(16) float scales[4], offsets[4];
                _mm_store_ps(scales, four.scales);
                _mm_store_ps(offsets, four.offsets);
                for (int64_t i = 0; i < 4; ++i) {
                    panel->scales[(group + i) * kPanelRows + row] = i < there ? scales[i] : 0;
                    panel->mins[(group + i) * kPanelRows + row] = i < there ? offsets[i] : 0;
                }
            }
        for (int64_t column = 0; column < kWide; column += 64) put_columns(codes, from * kGroup + column, panel);
    }
}

template <int count, bool wide, bool has_mins, int width>
void multiply_some(const RowPanel &panel, int64_t columns, const RowVector *x, float *out) {
    __m512 sums[count][2];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm512_setzero_ps();
    const uint8_t *codes = panel.codes;
    const float *scales = panel.scales, *mins = panel.mins;
    for (int64_t group = 0; group * kGroup < columns; ++group, codes += 1024)
        for (int part = 0; part < kGroup / width; ++part, scales += kPanelRows, mins += kPanelRows) {
            __m512i products[count][2];
            int32_t totals[count];
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                if constexpr (!wide)
                    totals[v] = x[v].sums[group];
                else if constexpr (width == kPart)
                    totals[v] = x[v].parts[2 * group + part];
                else
                    totals[v] = x[v].parts[2 * group] + x[v].parts[2 * group + 1];
                const __m512i start = has_mins ? _mm512_setzero_si512() : _mm512_set1_epi32(-panel.offset * totals[v]);
                products[v][0] = products[v][1] = start;
            }
#pragma GCC unroll 8
            for (int j = part * width / 4; j < (part + 1) * width / 4; ++j) {
                const __m512i upper = _mm512_load_si512(codes + 64 * j), lower = _mm512_load_si512(codes + 512 + 64 * j);
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v) {
                    int32_t four;
                    std::memcpy(&four, x[v].q + group * kGroup + 4 * j, 4);
                    const __m512i values = _mm512_set1_epi32(four);
                    products[v][0] = _mm512_dpbusd_epi32(products[v][0], upper, values);
                    products[v][1] = _mm512_dpbusd_epi32(products[v][1], lower, values);
                }
            }
            const __m512 scale[2] = {_mm512_load_ps(scales), _mm512_load_ps(scales + 16)};
            __m512 least[2];
            if constexpr (has_mins) least[0] = _mm512_load_ps(mins), least[1] = _mm512_load_ps(mins + 16);
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) {
                const float own = x[v].scales[wide ? group / (kWide / kGroup) : group];
                for (int half = 0; half < 2; ++half) {
                    const __m512 spread = _mm512_mul_ps(scale[half], _mm512_set1_ps(own));
                    sums[v][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[v][half]), spread, sums[v][half]);
                    if constexpr (has_mins)
                        sums[v][half] = _mm512_fmadd_ps(least[half], _mm512_set1_ps(own * static_cast<float>(totals[v])), sums[v][half]);
                }
            }
        }
    for (int v = 0; v < count; ++v) {
        _mm512_storeu_ps(out + v * kPanelRows, sums[v][0]);
        _mm512_storeu_ps(out + v * kPanelRows + 16, sums[v][1]);
    }
}

template <bool wide, bool has_mins, int width>
void multiply_panel(const RowPanel &panel, int64_t columns, const RowVector *x, int64_t count, float *out) {
    constexpr int64_t most = 5;
    const int64_t parts = (count + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = count * part / parts, some = count * (part + 1) / parts - begin;
        const auto loop = some == 5   ? multiply_some<5, wide, has_mins, width>
                          : some == 4 ? multiply_some<4, wide, has_mins, width>
                          : some == 3 ? multiply_some<3, wide, has_mins, width>
                          : some == 2 ? multiply_some<2, wide, has_mins, width>
                                      : multiply_some<1, wide, has_mins, width>;
        loop(panel, columns, x + begin, out + begin * kPanelRows);
    }
}

}  // namespace
#endif
