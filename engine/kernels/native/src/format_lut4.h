// lut4: a weight is scale * table[q], with a scale for each 32 of a row and a table of 16 whole numbers from -127 to 127 for
// the matrix.  What MXFP4, IQ4_NL and the like mean is such a table.  Codes lie as in int4.
#pragma once
#include "quantise_group.h"

namespace {

#if SWITCHYARD_VECTOR_BITS == 128
// Columns 4 lane to 4 lane + 3 and 16 more of `parts` vectors of rows, looked up.
template <class Math, int count, int parts, int lane>
static inline void add_lut4(const uint8_t *at, int8x16_t table, const int8x16_t (*q)[2], int32x4_t (*products)[parts]) {
    for (int part = 0; part < parts; ++part) {
        const uint8x16_t pairs = vld1q_u8(at + 64 * lane + 16 * part);
        const int8x16_t first = vqtbl1q_s8(table, vandq_u8(pairs, vdupq_n_u8(15)));
        const int8x16_t second = vqtbl1q_s8(table, vshrq_n_u8(pairs, 4));
        for (int v = 0; v < count; ++v) {
            products[v][part] = Math::template add<lane>(products[v][part], first, q[v][0]);
            products[v][part] = Math::template add<lane>(products[v][part], second, q[v][1]);
        }
    }
}
#endif

struct Lut4 {
#if SWITCHYARD_VECTOR_BITS == 512
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i table = Math::prepared(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row.table))));
        __m512 sums[count][2];
        for (auto &vector : sums) vector[0] = vector[1] = _mm512_setzero_ps();
        const uint8_t *w = row.weights;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows) {
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                fetch(w, kHalfRows * kGroup / 2);
                __m512i products[count];
                for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
                for (int j = 0; j < 4; ++j) {
                    const __m512i pairs = _mm512_loadu_si512(w + 64 * j);
                    const __m512i first = _mm512_shuffle_epi8(table, _mm512_and_si512(pairs, low));
                    const __m512i second =
                        _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low));
                    for (int v = 0; v < count; ++v) {
                        const int8_t *q = x[v].q + group * kGroup + 4 * j;
                        products[v] = Math::add(products[v], first, columns(q));
                        products[v] = Math::add(products[v], second, columns(q + 16));
                    }
                }
                const __m512 scale = scales_of(scales + kHalfRows * half);
                for (int v = 0; v < count; ++v)
                    sums[v][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[v]),
                                                    _mm512_mul_ps(scale, _mm512_set1_ps(x[v].scales[group])),
                                                    sums[v][half]);
            }
        }
        for (int v = 0; v < count; ++v)
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * kTileRows + kHalfRows * half, sums[v][half]);
    }
#elif SWITCHYARD_VECTOR_BITS == 256
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        const __m256i low = _mm256_set1_epi8(15);
        const __m256i table = Math::prepared(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row.table))));
        __m256 sums[count][4];
        for (auto &vector : sums)
            for (auto &sum : vector) sum = _mm256_setzero_ps();
        const uint8_t *w = row.weights;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, w += kTileRows * kGroup / 2, scales += kTileRows) {
            fetch(w, kTileRows * kGroup / 2);
            for (int part = 0; part < 4; ++part) {  // 8 rows of the tile
                const uint8_t *at = w + (part >> 1) * kHalfRows * kGroup / 2 + (part & 1) * 32;
                typename Math::Products products[count];
                for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
                for (int j = 0; j < 4; ++j) {
                    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 64 * j));
                    const __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, low));
                    const __m256i second =
                        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low));
                    for (int v = 0; v < count; ++v) {
                        const int8_t *q = x[v].q + group * kGroup + 4 * j;
                        products[v] = Math::add(products[v], first, columns(q));
                        products[v] = Math::add(products[v], second, columns(q + 16));
                    }
                }
                const __m256 scale = scales_of(scales + 8 * part);
                for (int v = 0; v < count; ++v)
                    sums[v][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[v]),
                                                    _mm256_mul_ps(scale, _mm256_set1_ps(x[v].scales[group])),
                                                    sums[v][part]);
            }
        }
        for (int v = 0; v < count; ++v)
            for (int part = 0; part < 4; ++part) _mm256_storeu_ps(out + v * kTileRows + 8 * part, sums[v][part]);
    }
#elif SWITCHYARD_VECTOR_BITS == 128
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        constexpr int parts = Math::parts(count);
        const int8x16_t table = vld1q_s8(row.table);
        float32x4_t sums[count][8];
        for (auto &vector : sums)
            for (auto &sum : vector) sum = vdupq_n_f32(0);
        const uint8_t *w = row.weights;
        for (int64_t group = 0; group < row.groups; ++group) {
            int8x16_t q[count][2];
            load_group<count>(x, group, q);
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                fetch(w, kHalfRows * kGroup / 2);
                for (int from = 0; from < 4; from += parts) {
                    const uint8_t *at = w + 16 * from;
                    int32x4_t products[count][parts];
                    for (auto &vector : products)
                        for (auto &product : vector) product = vdupq_n_s32(0);
                    add_lut4<Math, count, parts, 0>(at, table, q, products);
                    add_lut4<Math, count, parts, 1>(at, table, q, products);
                    add_lut4<Math, count, parts, 2>(at, table, q, products);
                    add_lut4<Math, count, parts, 3>(at, table, q, products);
                    for (int part = 0; part < parts; ++part) {
                        const int place = 4 * half + from + part;
                        const float32x4_t scale = scales_of(row.scales + group * kTileRows + 4 * place);
                        for (int v = 0; v < count; ++v)
                            sums[v][place] = vfmaq_f32(sums[v][place], vcvtq_f32_s32(products[v][part]),
                                                       vmulq_n_f32(scale, x[v].scales[group]));
                    }
                }
            }
        }
        store_sums<count>(sums, out);
    }
#else
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        each_group(row, x, count, out, [&](int64_t group, const QuantisedVector &vector, float *sums) {
            const uint8_t *w = row.weights + group * kTileRows * kGroup / 2;
            const int8_t *q = vector.q + group * kGroup;
            for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                int32_t products[kHalfRows] = {};
                for (int j = 0; j < 4; ++j)
                    for (int r = 0; r < kHalfRows; ++r)
                        for (int c = 0; c < 4; ++c) {
                            const uint8_t pair = w[j * 64 + r * 4 + c];
                            products[r] += row.table[pair & 15] * q[4 * j + c];
                            products[r] += row.table[pair >> 4] * q[16 + 4 * j + c];
                        }
                for (int r = 0; r < kHalfRows; ++r) {
                    const int64_t place = half * kHalfRows + r;
                    const float scale = from_bf16(row.scales[group * kTileRows + place]) * vector.scales[group];
                    sums[place] += scale * static_cast<float>(products[r]);
                }
            }
        });
    }
#endif

    static void expand(const HalfTile &half, uint16_t *out) {
        for (int r = 0; r < kHalfRows; ++r) {
            const float scale = from_bf16(half.scales[r]);
            float of_code[16];
            for (int code = 0; code < 16; ++code) of_code[code] = scale * static_cast<float>(half.table[code]);
            for (int j = 0; j < 4; ++j)
                for (int c = 0; c < 4; ++c) {
                    const uint8_t pair = half.weights[j * 64 + r * 4 + c];
                    out[r * kGroup + 4 * j + c] = narrow_finite(of_code[pair & 15]);
                    out[r * kGroup + 16 + 4 * j + c] = narrow_finite(of_code[pair >> 4]);
                }
        }
    }

    // Tries scales around those at which the largest weight meets either end of the table, refits the best of each by least
    // squares, and keeps what is best of all, as it would be stored.
    static void fit(const float *w, const FitTarget &target) {
        constexpr int kShares = 8;
        float top[kLanes] = {}, odd[kLanes] = {}, least[kLanes], found[kLanes];
        int end = 0;
        for (int code = 0; code < 16; ++code) {
            const int size = target.table[code] < 0 ? -target.table[code] : target.table[code];
            end = size > end ? size : end;
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float size = std::fabs(w[i * kLanes + lane]);
                top[lane] = size > top[lane] ? size : top[lane];
                odd[lane] += size * 0.0f;  // NaN from infinities and NaNs
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            least[lane] = std::numeric_limits<float>::infinity();
            found[lane] = 0;
        }
        for (int sign = 1; sign >= -1; sign -= 2)
            for (int share = 0; share < kShares; ++share) {
                float scale[kLanes];
                for (int lane = 0; lane < kLanes; ++lane)
                    scale[lane] = round_bf16(static_cast<float>(sign) * top[lane] * (1.1f - 0.05f * static_cast<float>(share)) /
                                             static_cast<float>(end));
                for (int refit = 0; refit < 2; ++refit) {
                    float error[kLanes] = {}, along[kLanes] = {}, squares[kLanes] = {};
                    for (int i = 0; i < kGroup; ++i) {
                        float value[kLanes], off[kLanes];
                        nearest(w + i * kLanes, scale, target.table, value, off);
                        for (int lane = 0; lane < kLanes; ++lane) {
                            error[lane] += off[lane] * off[lane];
                            along[lane] += w[i * kLanes + lane] * value[lane];
                            squares[lane] += value[lane] * value[lane];
                        }
                    }
                    for (int lane = 0; lane < kLanes; ++lane) {
                        const bool better = error[lane] < least[lane];
                        least[lane] = better ? error[lane] : least[lane];
                        found[lane] = better ? scale[lane] : found[lane];
                        scale[lane] = squares[lane] > 0 ? round_bf16(along[lane] / squares[lane]) : scale[lane];
                    }
                }
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            found[lane] = odd[lane] != odd[lane] || top[lane] < 1e-30f ? 0.0f : found[lane];
            target.scales[lane] = odd[lane] != odd[lane] ? kNaN : to_bf16(found[lane]);
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                float best = std::numeric_limits<float>::infinity();
                uint8_t code = 0;
                for (uint8_t at = 0; at < 16; ++at) {
                    const float off = std::fabs(w[i * kLanes + lane] - found[lane] * static_cast<float>(target.table[at]));
                    code = off < best ? at : code;
                    best = off < best ? off : best;
                }
                target.codes[i * kLanes + lane] = code;
            }
    }

  private:
    // The table's value that is nearest to w / scale, and how far scale * value is from w.
    static void nearest(const float *w, const float *scale, const int8_t *table, float *value, float *off) {
        for (int lane = 0; lane < kLanes; ++lane) off[lane] = std::numeric_limits<float>::infinity();
        for (int code = 0; code < 16; ++code) {
            const auto entry = static_cast<float>(table[code]);
            for (int lane = 0; lane < kLanes; ++lane) {
                const float distance = std::fabs(w[lane] - scale[lane] * entry);
                value[lane] = distance < off[lane] ? entry : value[lane];
                off[lane] = distance < off[lane] ? distance : off[lane];
            }
        }
    }
};

}  // namespace
