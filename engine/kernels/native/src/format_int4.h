// int4: a weight is scale * (q - zero / 16), with a scale and a zero point for each 32 of a row.  A tile is 4 vectors a
// half, the j-th with columns 4j to 4j + 3 of 16 rows in its low nibbles and columns 16 + 4j to 16 + 4j + 3 in its high ones.
#pragma once
#include "quantise_group.h"

namespace {

#if SWITCHYARD_VECTOR_BITS == 128
// The zeros of 16 rows, four by four.
struct Zeros {
    float32x4_t of_part[4];
    explicit Zeros(const uint8_t *zeros) {
        const uint8x16_t bytes = vld1q_u8(zeros);
        const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
        of_part[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(low)));
        of_part[1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(low)));
        of_part[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(high)));
        of_part[3] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)));
    }
};

template <class Math, int count, int parts, int lane>
static inline void add_int4(const uint8_t *at, const int8x16_t (*q)[2], typename Math::Nibbles (*products)[parts]) {
    for (int part = 0; part < parts; ++part) {
        const uint8x16_t pairs = vld1q_u8(at + 64 * lane + 16 * part);
        const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
        const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
        for (int v = 0; v < count; ++v) {
            Math::template add_nibbles<lane>(products[v][part], first, q[v][0]);
            Math::template add_nibbles<lane>(products[v][part], second, q[v][1]);
        }
    }
}
#endif

struct Int4Fit {
    float scale[kLanes], zero[kLanes], error[kLanes];
};

// As they will be stored.
static inline float stored_scale(float scale) { return round_bf16(scale); }
static inline float stored_zero(float zero) { return between(whole(zero * 16.0f), 0.0f, 255.0f) / 16.0f; }

// One round: quantises with (scale, zero), keeps them in `best` where they are better, and proposes others by least
// squares over the weights without what half-quadratic splitting (Badri and Shaji, "Half-Quadratic Quantization",
// 2023; the l_1/2 norm) takes for outliers.  `threshold` is 1 / beta in units of the scale.
void int4_round(const float *w, float threshold, Int4Fit &now, Int4Fit &best) {
    float inverse[kLanes], q_sum[kLanes] = {}, q_squares[kLanes] = {}, t_sum[kLanes] = {}, products[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
        now.scale[lane] = stored_scale(now.scale[lane]);
        now.zero[lane] = stored_zero(now.zero[lane]);
        now.error[lane] = 0;
        inverse[lane] = now.scale[lane] > 1e-30f ? 1.0f / now.scale[lane] : 0.0f;
    }
    for (int i = 0; i < kGroup; ++i)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float x = w[i * kLanes + lane] * inverse[lane];  // in units of the scale
            const float q = between(whole(x + now.zero[lane]), 0.0f, 15.0f);
            const float error = x - (q - now.zero[lane]), size = std::fabs(error);
            const float kept = size - threshold / std::sqrt(size + 1e-12f);
            const float target = x - (kept > 0 ? std::copysign(kept, error) : 0.0f);
            now.error[lane] += error * error;
            q_sum[lane] += q;
            q_squares[lane] += q * q;
            t_sum[lane] += target;
            products[lane] += q * target;
        }
    for (int lane = 0; lane < kLanes; ++lane) {
        const float error = now.error[lane] * now.scale[lane] * now.scale[lane];
        const bool better = error < best.error[lane];
        best.error[lane] = better ? error : best.error[lane];
        best.scale[lane] = better ? now.scale[lane] : best.scale[lane];
        best.zero[lane] = better ? now.zero[lane] : best.zero[lane];
        const float n = kGroup, spread = n * q_squares[lane] - q_sum[lane] * q_sum[lane];
        const float slope = (n * products[lane] - q_sum[lane] * t_sum[lane]) / (spread > 0 ? spread : 1.0f);
        const bool usable = spread > 0 && slope > 0.25f && slope < 4.0f;
        now.zero[lane] = usable ? (q_sum[lane] - t_sum[lane] / slope) / n : now.zero[lane];
        now.scale[lane] = usable ? slope * now.scale[lane] : now.scale[lane];
    }
}

struct Int4 {
#if SWITCHYARD_VECTOR_BITS == 512
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512 sums[count][2];
        for (auto &vector : sums) vector[0] = vector[1] = _mm512_setzero_ps();
        const uint8_t *w = row.weights, *zeros = row.zeros;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups; ++group, scales += kTileRows, zeros += kTileRows) {
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                fetch(w, kHalfRows * kGroup / 2);
                __m512i products[count];
                for (int v = 0; v < count; ++v) products[v] = _mm512_setzero_si512();
                for (int j = 0; j < 4; ++j) {
                    const __m512i pairs = _mm512_loadu_si512(w + 64 * j);
                    const __m512i first = _mm512_and_si512(pairs, low);
                    const __m512i second = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
                    for (int v = 0; v < count; ++v) {
                        const int8_t *q = x[v].q + group * kGroup + 4 * j;
                        products[v] = Math::add_unsigned(products[v], first, columns(q));
                        products[v] = Math::add_unsigned(products[v], second, columns(q + 16));
                    }
                }
                const __m512 scale = scales_of(scales + kHalfRows * half);
                const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros + kHalfRows * half))));
                for (int v = 0; v < count; ++v) {
                    const __m512 sixteenths = _mm512_set1_ps(static_cast<float>(x[v].sums[group]) * 0.0625f);
                    const __m512 value =
                        _mm512_fnmadd_ps(zero, sixteenths, _mm512_cvtepi32_ps(Math::whole_sums(products[v])));
                    sums[v][half] =
                        _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(x[v].scales[group])), sums[v][half]);
                }
            }
        }
        for (int v = 0; v < count; ++v)
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * kTileRows + kHalfRows * half, sums[v][half]);
    }
#elif SWITCHYARD_VECTOR_BITS == 256
    template <class Math, int count> static void rows(const TileRow &row, const QuantisedVector *x, float *out) {
        const __m256i low = _mm256_set1_epi8(15);
        __m256 sums[count][4];
        for (auto &vector : sums)
            for (auto &sum : vector) sum = _mm256_setzero_ps();
        const uint8_t *w = row.weights, *zeros = row.zeros;
        const uint16_t *scales = row.scales;
        for (int64_t group = 0; group < row.groups;
             ++group, w += kTileRows * kGroup / 2, scales += kTileRows, zeros += kTileRows) {
            fetch(w, kTileRows * kGroup / 2);
            for (int part = 0; part < 4; ++part) {
                const uint8_t *at = w + (part >> 1) * kHalfRows * kGroup / 2 + (part & 1) * 32;
                __m256i products[count];
                for (int v = 0; v < count; ++v) products[v] = _mm256_setzero_si256();
                for (int j = 0; j < 4; ++j) {
                    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 64 * j));
                    const __m256i first = _mm256_and_si256(pairs, low);
                    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
                    for (int v = 0; v < count; ++v) {
                        const int8_t *q = x[v].q + group * kGroup + 4 * j;
                        products[v] = Math::add_unsigned(products[v], first, columns(q));
                        products[v] = Math::add_unsigned(products[v], second, columns(q + 16));
                    }
                }
                const __m256 scale = scales_of(scales + 8 * part);
                const __m256 zero = _mm256_cvtepi32_ps(
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(zeros + 8 * part))));
                for (int v = 0; v < count; ++v) {
                    const __m256 sixteenths = _mm256_set1_ps(static_cast<float>(x[v].sums[group]) * 0.0625f);
                    const __m256 value =
                        _mm256_fnmadd_ps(zero, sixteenths, _mm256_cvtepi32_ps(Math::whole_sums(products[v])));
                    sums[v][part] =
                        _mm256_fmadd_ps(value, _mm256_mul_ps(scale, _mm256_set1_ps(x[v].scales[group])), sums[v][part]);
                }
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
        for (int64_t group = 0; group < row.groups; ++group) {
            int8x16_t q[count][2];
            load_group<count>(x, group, q);
            for (int half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                fetch(w, kHalfRows * kGroup / 2);
                const Zeros zeros(row.zeros + group * kTileRows + half * kHalfRows);
                for (int from = 0; from < 4; from += parts) {
                    const uint8_t *at = w + 16 * from;
                    typename Math::Nibbles products[count][parts];
                    for (auto &vector : products)
                        for (auto &product : vector) product = Math::no_nibbles();
                    add_int4<Math, count, parts, 0>(at, q, products);
                    add_int4<Math, count, parts, 1>(at, q, products);
                    add_int4<Math, count, parts, 2>(at, q, products);
                    add_int4<Math, count, parts, 3>(at, q, products);
                    for (int part = 0; part < parts; ++part) {
                        const int place = 4 * half + from + part;
                        const float32x4_t scale = scales_of(row.scales + group * kTileRows + 4 * place);
                        for (int v = 0; v < count; ++v) {
                            const float sixteenths = static_cast<float>(x[v].sums[group]) * 0.0625f;
                            const float32x4_t whole = vcvtq_f32_s32(Math::whole_sums(products[v][part]));
                            const float32x4_t value =
                                vfmsq_f32(whole, zeros.of_part[from + part], vdupq_n_f32(sixteenths));
                            sums[v][place] = vfmaq_f32(sums[v][place], value, vmulq_n_f32(scale, x[v].scales[group]));
                        }
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
            const float sixteenths = static_cast<float>(vector.sums[group]) / 16.0f;
            for (int64_t half = 0; half < 2; ++half, w += kHalfRows * kGroup / 2) {
                int32_t products[kHalfRows] = {};
                for (int j = 0; j < 4; ++j)
                    for (int r = 0; r < kHalfRows; ++r)
                        for (int c = 0; c < 4; ++c) {
                            const uint8_t pair = w[j * 64 + r * 4 + c];
                            products[r] += (pair & 15) * q[4 * j + c] + (pair >> 4) * q[16 + 4 * j + c];
                        }
                for (int r = 0; r < kHalfRows; ++r) {
                    const int64_t place = half * kHalfRows + r, at = group * kTileRows + place;
                    const float value = static_cast<float>(products[r]) - static_cast<float>(row.zeros[at]) * sixteenths;
                    sums[place] += from_bf16(row.scales[at]) * vector.scales[group] * value;
                }
            }
        });
    }
#endif

    static void expand(const HalfTile &half, uint16_t *out) {
        alignas(64) uint8_t low[4][64], high[4][64];
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 64; ++i) {
                low[j][i] = half.weights[j * 64 + i] & 15;
                high[j][i] = static_cast<uint8_t>(half.weights[j * 64 + i] >> 4);
            }
        alignas(64) uint8_t rows[kHalfRows][kGroup];
        for (int r = 0; r < kHalfRows; ++r)
            for (int j = 0; j < 4; ++j) {
                std::memcpy(&rows[r][4 * j], &low[j][r * 4], 4);
                std::memcpy(&rows[r][16 + 4 * j], &high[j][r * 4], 4);
            }
        for (int r = 0; r < kHalfRows; ++r) {
            const float scale = from_bf16(half.scales[r]), zero = static_cast<float>(half.zeros[r]) * 0.0625f;
            for (int c = 0; c < kGroup; ++c) out[r * kGroup + c] = narrow_finite(scale * (static_cast<float>(rows[r][c]) - zero));
        }
    }

    // Starts from the whole range of each group and from narrower ones, which clip; with no rounds it is plain min-max.
    static void fit(const float *w, const FitTarget &target) {
        uint8_t *q = target.codes;
        uint16_t *scales = target.scales;
        constexpr int kStarts = 4;
        constexpr float kRange[kStarts] = {1.0f, 0.9f, 0.8f, 0.7f};
        float low[kLanes] = {}, high[kLanes] = {};
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = w[i * kLanes + lane];
                low[lane] = value < low[lane] ? value : low[lane];
                high[lane] = value > high[lane] ? value : high[lane];
            }
        Int4Fit best, now;
        for (int lane = 0; lane < kLanes; ++lane) {
            best.scale[lane] = from_bf16(kNaN);  // where nothing is better
            best.zero[lane] = 0;
            best.error[lane] = std::numeric_limits<float>::infinity();
        }
        for (int start = 0; start < (target.rounds ? kStarts : 1); ++start) {
            for (int lane = 0; lane < kLanes; ++lane) {
                now.scale[lane] = kRange[start] * (high[lane] - low[lane]) / 15.0f;
                now.zero[lane] = now.scale[lane] > 1e-30f ? -kRange[start] * low[lane] / now.scale[lane] : 0.0f;
            }
            float threshold = 0.1f;
            for (int round = 0; round <= target.rounds / kStarts; ++round, threshold *= 0.8f) int4_round(w, threshold, now, best);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            scales[lane] = to_bf16(best.scale[lane]);
            target.zeros[lane] = static_cast<uint8_t>(static_cast<int32_t>(best.zero[lane] * 16.0f));
        }
        float inverse[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) inverse[lane] = best.scale[lane] > 1e-30f ? 1.0f / best.scale[lane] : 0;
        for (int i = 0; i < kGroup; ++i)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = between(whole(w[i * kLanes + lane] * inverse[lane] + best.zero[lane]), 0.0f, 15.0f);
                q[i * kLanes + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
            }
    }
};

}  // namespace
