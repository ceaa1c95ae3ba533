// int8: a weight is scale * q, with a scale for each 32 of a row.  A tile is 8 vectors a half, the j-th with columns 4j to
// 4j + 3 of 16 rows.
#pragma once
#include "quantise_group.h"

namespace {

#if SWITCHYARD_VECTOR_BITS == 128
// Columns 4 lane to 4 lane + 3 and 16 more of `parts` vectors of rows: weights at `at`, 64 bytes a step.
template <class Math, int count, int parts, int lane>
static inline void add_int8(const uint8_t *at, const int8x16_t (*q)[2], int32x4_t (*products)[parts]) {
    for (int later = 0; later < 2; ++later)
        for (int part = 0; part < parts; ++part) {
            const int8x16_t weights = vreinterpretq_s8_u8(vld1q_u8(at + 64 * (lane + 4 * later) + 16 * part));
            for (int v = 0; v < count; ++v)
                products[v][part] = Math::template add<lane>(products[v][part], weights, q[v][later]);
        }
}
#endif

struct Int8 {
#if SWITCHYARD_VECTOR_BITS == 512
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        __m512 sums[count][2];
        for (auto &vector : sums) vector[0] = vector[1] = _mm512_setzero_ps();
        const uint8_t *w = row.weights;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows) {
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
                fetch(w, kHalfRows * kGroup);
                __m512i products[count];
                for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
                for (int j = 0; j < 8; ++j) {
                    const __m512i weights = Math::prepared(_mm512_loadu_si512(w + 64 * j));
                    for (int v = 0; v < count; ++v)
                        products[v] = Math::add(products[v], weights, columns(x[v].q + group * kGroup + 4 * j));
                }
                const __m512 scale = scales_of(scales + kHalfRows * half);
                for (int v = 0; v < count; ++v)
                    sums[v][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[v]),
                                                    _mm512_mul_ps(scale, _mm512_set1_ps(x[v].scales[group])), sums[v][half]);
            }
        }
        for (int v = 0; v < count; ++v)
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * kTileRows + kHalfRows * half, sums[v][half]);
    }
#elif SWITCHYARD_VECTOR_BITS == 256
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        __m256 sums[count][4];
        for (auto &vector : sums)
            for (auto &sum : vector) sum = _mm256_setzero_ps();
        const uint8_t *w = row.weights;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, w += kTileRows * kGroup, scales += kTileRows) {
            fetch(w, kTileRows * kGroup);
            for (int part = 0; part < 4; ++part) {  // 8 rows of the tile
                const uint8_t *at = w + (part >> 1) * kHalfRows * kGroup + (part & 1) * 32;
                typename Math::Products products[count];
                for (int v = 0; v < count; ++v) products[v] = Math::none(x[v].sums[group]);
                for (int j = 0; j < 8; ++j) {
                    const __m256i weights =
                        Math::prepared(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 64 * j)));
                    for (int v = 0; v < count; ++v)
                        products[v] = Math::add(products[v], weights, columns(x[v].q + group * kGroup + 4 * j));
                }
                const __m256 scale = scales_of(scales + 8 * part);
                for (int v = 0; v < count; ++v)
                    sums[v][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[v]),
                                                    _mm256_mul_ps(scale, _mm256_set1_ps(x[v].scales[group])), sums[v][part]);
            }
        }
        for (int v = 0; v < count; ++v)
            for (int part = 0; part < 4; ++part) _mm256_storeu_ps(out + v * kTileRows + 8 * part, sums[v][part]);
    }
#elif SWITCHYARD_VECTOR_BITS == 128
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        constexpr int parts = Math::parts(count);
        float32x4_t sums[count][8];
        for (auto &vector : sums)
            for (auto &sum : vector) sum = vdupq_n_f32(0);
        const uint8_t *w = row.weights;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows) {
            int8x16_t q[count][2];
            load_group<count>(x, group, q);
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
                fetch(w, kHalfRows * kGroup);
                for (int from = 0; from < 4; from += parts) {
                    const uint8_t *at = w + 16 * from;
                    int32x4_t products[count][parts];
                    for (auto &vector : products)
                        for (auto &product : vector) product = vdupq_n_s32(0);
                    add_int8<Math, count, parts, 0>(at, q, products);
                    add_int8<Math, count, parts, 1>(at, q, products);
                    add_int8<Math, count, parts, 2>(at, q, products);
                    add_int8<Math, count, parts, 3>(at, q, products);
                    for (int part = 0; part < parts; ++part) {
                        const int place = 4 * half + from + part;
                        const float32x4_t scale = scales_of(scales + 4 * place);
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
            const auto *w = reinterpret_cast<const int8_t *>(row.weights) + group * kTileRows * kGroup;
            const int8_t *q = vector.q + group * kGroup;
            for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup) {
                int32_t products[kHalfRows] = {};
                for (int j = 0; j < 8; ++j)
                    for (int r = 0; r < kHalfRows; ++r)
                        for (int c = 0; c < 4; ++c) products[r] += w[j * 64 + r * 4 + c] * q[4 * j + c];
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
        alignas(64) int8_t rows[kHalfRows][kGroup];
        for (int r = 0; r < kHalfRows; ++r)
            for (int j = 0; j < 8; ++j) std::memcpy(&rows[r][4 * j], half.weights + j * 64 + r * 4, 4);
        for (int r = 0; r < kHalfRows; ++r) {
            const float scale = from_bf16(half.scales[r]);
            for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow_finite(scale * static_cast<float>(rows[r][c]));
        }
    }

    // Of the scales from the least one that clips nothing upwards, that with the least squared error: some of them happen to
    // meet a group's values much better than others.
    static void fit(const float *w, const FitTarget &target) {
        uint8_t *q = target.codes;
        uint16_t *scales = target.scales;
        constexpr int kScales = 16;  // neighbours in bf16
        float top[kLanes] = {}, odd[kLanes] = {}, inverse[kLanes], least[kLanes];
        uint16_t first[kLanes];
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float size = std::fabs(w[i * kLanes + lane]);
                top[lane] = size > top[lane] ? size : top[lane];
                odd[lane] += size * 0.0f;  // NaN from infinities and NaNs
            }
        for (int lane = 0; lane < kLanes; ++lane) {
            first[lane] = scales[lane] = bf16_above(top[lane] / 127.0f);
            least[lane] = std::numeric_limits<float>::infinity();
        }
        for (int step = 0; step < kScales; ++step) {
            float scale[kLanes], error[kLanes] = {};
            for (int lane = 0; lane < kLanes; ++lane) {
                scale[lane] = from_bf16(static_cast<uint16_t>(first[lane] + step));
                inverse[lane] = 1.0f / scale[lane];
            }
            for (int i = 0; i < kGroup; ++i)
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float x = w[i * kLanes + lane] * inverse[lane];
                    const float off = x - between(whole(x), -127.0f, 127.0f);
                    error[lane] += off * off;
                }
            for (int lane = 0; lane < kLanes; ++lane) {
                const float squares = error[lane] * scale[lane] * scale[lane];
                const bool better = squares < least[lane];
                least[lane] = better ? squares : least[lane];
                scales[lane] = better ? static_cast<uint16_t>(first[lane] + step) : scales[lane];
            }
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            scales[lane] = odd[lane] != odd[lane] ? kNaN : top[lane] < 1e-30f ? 0 : scales[lane];
            inverse[lane] = top[lane] < 1e-30f ? 0 : 1.0f / from_bf16(scales[lane]);
        }
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = between(whole(w[i * kLanes + lane] * inverse[lane]), -127.0f, 127.0f);
                q[i * kLanes + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
            }
    }
};

}  // namespace
