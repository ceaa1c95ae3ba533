// F32, F16 and BF16: plain numbers, multiplied with the vector as it is.
#pragma once
#include "rows.h"

namespace {

struct F32 : scalar::F32 {
#if defined(__AVX512VNNI__)
    static __m512 sixteen_at(const uint8_t *at) { return _mm512_loadu_ps(at); }
#elif defined(__AVX2__)
    static __m256 eight_at(const uint8_t *at) { return _mm256_loadu_ps(reinterpret_cast<const float *>(at)); }
#else
    static Floats four_at(const uint8_t *at) { return vector_at<Floats>(at); }
#endif
};

struct F16 : scalar::F16 {
#if defined(__AVX512VNNI__)
    static __m512 sixteen_at(const uint8_t *at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }
#elif defined(__AVX2__)
    static __m256 eight_at(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))); }
#else
    static Floats four_at(const uint8_t *at) {
#if defined(SWITCHYARD_NEON)
        return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
#else
        return Floats{half_at(at), half_at(at + 2), half_at(at + 4), half_at(at + 6)};
#endif
    }
#endif
};

struct Bf16 : scalar::Bf16 {
#if defined(__AVX512VNNI__)
    static __m512 sixteen_at(const uint8_t *at) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
#elif defined(__AVX2__)
    static __m256 eight_at(const uint8_t *at) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
#else
    static Floats four_at(const uint8_t *at) {
        typedef uint16_t Short __attribute__((vector_size(8)));
        return (Floats)(__builtin_convertvector(vector_at<Short>(at), Fours) << 16);
    }
#endif
};

template <class Type> void unpack_numbers(const uint8_t *row, int64_t columns, float *out) {
    int64_t at = 0;
#if defined(__AVX512VNNI__)
    for (; at + 16 <= columns; at += 16) _mm512_storeu_ps(out + at, Type::sixteen_at(row + at * Type::kBytes));
#elif defined(__AVX2__)
    for (; at + 8 <= columns; at += 8) _mm256_storeu_ps(out + at, Type::eight_at(row + at * Type::kBytes));
#else
    for (; at + 4 <= columns; at += 4) put_vector(Type::four_at(row + at * Type::kBytes), out + at);
#endif
    for (; at < columns; ++at) Type::values(row + at * Type::kBytes, out + at);
}

// Vectors are padded with zeros, rows are not.
template <class Type, int count> void dot_numbers(const uint8_t *row, int64_t columns, const RowVector *x, float *out) {
    int64_t at = 0;
    float rest[count] = {};
#if defined(__AVX512VNNI__)
    __m512 sums[count][4];  // a single sum would wait for itself
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm512_setzero_ps();
    const auto add = [&](int64_t from, int part) {
        const __m512 weights = Type::sixteen_at(row + from * Type::kBytes);
        for (int v = 0; v < count; ++v) sums[v][part] = _mm512_fmadd_ps(weights, _mm512_loadu_ps(x[v].values + from), sums[v][part]);
    };
    for (; at + 64 <= columns; at += 64) {
        for (int line = 0; line < Type::kBytes; ++line) __builtin_prefetch(row + at * Type::kBytes + 64 * line + kAheadOfRow);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) add(at + 16 * part, part);
    }
    for (; at + 16 <= columns; at += 16) add(at, 0);
    for (int v = 0; v < count; ++v)
        rest[v] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[v][0], sums[v][1]), _mm512_add_ps(sums[v][2], sums[v][3])));
#elif defined(__AVX2__)
    __m256 sums[count][2];
    for (auto &vector : sums)
        for (auto &sum : vector) sum = _mm256_setzero_ps();
    for (; at + 16 <= columns; at += 16) {
        if (at * Type::kBytes % 64 == 0) __builtin_prefetch(row + at * Type::kBytes + kAheadOfRow);
        for (int part = 0; part < 2; ++part) {
            const __m256 weights = Type::eight_at(row + (at + 8 * part) * Type::kBytes);
            for (int v = 0; v < count; ++v)
                sums[v][part] = _mm256_fmadd_ps(weights, _mm256_loadu_ps(x[v].values + at + 8 * part), sums[v][part]);
        }
    }
    for (int v = 0; v < count; ++v) {
        const __m256 both = _mm256_add_ps(sums[v][0], sums[v][1]);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        rest[v] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
#else
    Floats sums[count][2] = {};
    for (; at + 8 <= columns; at += 8) {
        if (at % 16 == 0) __builtin_prefetch(row + at * Type::kBytes + kAheadOfRow);
        for (int part = 0; part < 2; ++part) {
            const Floats weights = Type::four_at(row + (at + 4 * part) * Type::kBytes);
            for (int v = 0; v < count; ++v) sums[v][part] += weights * vector_at<Floats>(x[v].values + at + 4 * part);
        }
    }
    for (int v = 0; v < count; ++v) rest[v] = total_of_lanes(sums[v][0] + sums[v][1]);
#endif
    for (; at < columns; ++at) {
        float weight;
        Type::values(row + at * Type::kBytes, &weight);
        for (int v = 0; v < count; ++v) rest[v] += weight * x[v].values[at];
    }
    for (int v = 0; v < count; ++v) out[v] = rest[v];
}

}  // namespace
