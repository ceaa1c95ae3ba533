// The kernels of paged_kernels.h in vectors of 16 floats, which the compiler splits into the target's.  Included once for
// every instruction set, which defines MOST_ACCUMULATORS: how many of these its registers hold besides operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernel_set.h"
#include "paged_kernels.h"

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr float kNone = -std::numeric_limits<float>::infinity();

template <class To, class From> inline To bits_of(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline Floats load_floats(const float *x) {
    Floats v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
inline void store_floats(float *x, const Floats &v) { std::memcpy(x, &v, sizeof v); }
inline Floats all(float x) { return Floats{} + x; }

struct Bf16 {
    typedef uint16_t Element;
    static constexpr bool scaled = false;
    static Floats load(const Element *x) {
        Halves half;
        std::memcpy(&half, x, sizeof half);
        return bits_of<Floats>(__builtin_convertvector(half, Words) << 16);
    }
    static Element store(float x, float) { return to_bf16(x); }
};
struct Fp16 {
    typedef uint16_t Element;
    static constexpr bool scaled = false;
    static Floats load(const Element *x) {
        Halves half;
        std::memcpy(&half, x, sizeof half);
        const Words wide = __builtin_convertvector(half, Words);
        // The exponent is corrected by a product, which makes subnormals right as well; infinities do not occur.
        const Words sign = (wide & 0x8000u) << 16, rest = (wide & 0x7fffu) << 13;
        return bits_of<Floats>(bits_of<Words>(bits_of<Floats>(rest) * all(0x1p112f)) | sign);
    }
    static Element store(float x, float) {
        const float top = 65504.0f;
        x = x > top ? top : x < -top ? -top : x;
        const uint32_t sign = bits_of<uint32_t>(x) >> 16 & 0x8000u;
        const float size = std::fabs(x);
        if (size < 0x1p-14f) return static_cast<Element>(sign | static_cast<uint32_t>(std::nearbyint(size * 0x1p24f)));
        const uint32_t word = bits_of<uint32_t>(size);
        const uint32_t rounded = word + 0xfffu + (word >> 13 & 1u);
        return static_cast<Element>(sign | ((rounded >> 13) - (112u << 10)));
    }
};
struct Int8 {
    typedef int8_t Element;
    static constexpr bool scaled = true;
    static Floats load(const Element *x) {
        Bytes bytes;
        std::memcpy(&bytes, x, sizeof bytes);
        return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
    }
    static Element store(float x, float inverse) {
        const float scaled_x = x * inverse;
        // A NaN becomes 0: the comparison is false for it.
        return std::fabs(scaled_x) <= 127.5f ? static_cast<Element>(std::nearbyint(std::fmin(scaled_x, 127.0f))) : 0;
    }
};
struct Fp32 {
    typedef float Element;
    static constexpr bool scaled = false;
    static Floats load(const Element *x) { return load_floats(x); }
    static Element store(float x, float) { return x; }
};

// e to the power of x <= 0, within two units of the last place (the polynomial of Cephes' expf).
inline Floats exponential(Floats x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const Floats shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
    const Floats f = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats y = f * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    const Ints exponent = (bits_of<Ints>(shifted) - 0x4b400000) << 23;
    return bits_of<Floats>(bits_of<Ints>(y) + exponent);
}
inline float sum_of(const Floats &v) {
    float x[kLanes];
    store_floats(x, v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] += x[i + step];
    return x[0];
}
inline float most_of(const Floats &v) {
    float x[kLanes];
    store_floats(x, v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
}

// Scores of a page's tokens with `count` queries.
template <class T, int count>
void page_scores(const typename T::Element *keys, int64_t dim, const float *const *q, Floats (*scores)[2]) {
    Floats sums[count][2];
    for (auto &sum : sums) sum[0] = sum[1] = Floats{};
    for (int64_t d = 0; d < dim; ++d, keys += kPageTokens) {
        const Floats low = T::load(keys), high = T::load(keys + kLanes);
        for (int i = 0; i < count; ++i) {
            sums[i][0] += low * q[i][d];
            sums[i][1] += high * q[i][d];
        }
    }
    for (int i = 0; i < count; ++i) scores[i][0] = sums[i][0], scores[i][1] = sums[i][1];
}

// out[i] += sum over the page's first `tokens` of shares[i][token] * values[token].
template <class T, int count, int columns>
void mix_columns(const typename T::Element *values, int64_t dim, int64_t tokens, const float (*shares)[kPageTokens],
                 float *out, int64_t out_step) {
    Floats sums[count][columns];
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < columns; ++c) sums[i][c] = load_floats(out + i * out_step + c * kLanes);
    for (int64_t token = 0; token < tokens; ++token, values += dim)
        for (int c = 0; c < columns; ++c) {
            const Floats value = T::load(values + c * kLanes);
            for (int i = 0; i < count; ++i) sums[i][c] += value * shares[i][token];
        }
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < columns; ++c) store_floats(out + i * out_step + c * kLanes, sums[i][c]);
}

template <class T, int count>
void mix_page(const typename T::Element *values, int64_t dim, int64_t tokens, const float (*shares)[kPageTokens],
              float *out) {
    constexpr int columns = count >= 4 ? 1 : 4 / count;
    const int64_t step = whole_lanes(dim);
    int64_t at = 0;
    for (; at + columns * kLanes <= dim; at += columns * kLanes)
        mix_columns<T, count, columns>(values + at, dim, tokens, shares, out + at, step);
    for (; at + kLanes <= dim; at += kLanes)
        mix_columns<T, count, 1>(values + at, dim, tokens, shares, out + at, step);
    for (; at < dim; ++at)
        for (int i = 0; i < count; ++i)
            for (int64_t token = 0; token < tokens; ++token) {
                typename T::Element one[kLanes] = {values[token * dim + at]};
                out[i * step + at] += shares[i][token] * T::load(one)[0];
            }
}

struct Softmax {
    float top = kNone, total = 0;
};

template <class T, int count>
void attend_page(const SwitchyardPagedLayer &layer, int64_t page, int64_t kv_head, int64_t first,
                 const PageQueries &queries, int begin, Softmax *state) {
    typedef typename T::Element Element;
    const int64_t key_dim = layer.key_dim, value_dim = layer.value_dim, block = page * layer.kv_heads + kv_head;
    const Element *keys = static_cast<const Element *>(layer.keys) + block * key_dim * kPageTokens;
    const Element *values = static_cast<const Element *>(layer.values) + block * value_dim * kPageTokens;
    Floats scores[count][2];
    page_scores<T, count>(keys, key_dim, queries.q + begin, scores);
    float shares[count][kPageTokens];
    int64_t tokens = 0;
    const int64_t out_step = whole_lanes(value_dim);
    for (int i = 0; i < count; ++i) {
        const int64_t from = queries.from[begin + i] - first, to = queries.to[begin + i] - first, kept = layer.kept - first;
        Floats &low = scores[i][0], &high = scores[i][1];
        if (T::scaled) {
            const float *scales = layer.key_scales + block * kPageTokens;
            low *= load_floats(scales);
            high *= load_floats(scales + kLanes);
        }
        float *row = shares[i];
        store_floats(row, low);
        store_floats(row + kLanes, high);
        if (layer.softcap != 0)
            for (int64_t t = 0; t < kPageTokens; ++t) row[t] = layer.softcap * std::tanh(row[t] / layer.softcap);
        if (from > 0 || to < kPageTokens)
            for (int64_t t = 0; t < kPageTokens; ++t)
                if (t >= to || (t < from && t >= kept)) row[t] = kNone;
        low = load_floats(row);
        high = load_floats(row + kLanes);
        const float top = most_of(low > high ? low : high);
        if (top > state[i].top) {
            const float shrink = state[i].top == kNone ? 0.0f : std::exp(state[i].top - top);
            state[i].total *= shrink;
            float *out = queries.out + (begin + i) * out_step;
            for (int64_t at = 0; at < out_step; ++at) out[at] *= shrink;
            state[i].top = top;
        }
        if (state[i].top == kNone) {
            std::fill_n(row, kPageTokens, 0.0f);
            continue;
        }
        // Masked tokens weigh exactly 0, not the smallest number that the exponential gives.
        low = low == all(kNone) ? Floats{} : exponential(low - state[i].top);
        high = high == all(kNone) ? Floats{} : exponential(high - state[i].top);
        state[i].total += sum_of(low + high);
        if (T::scaled) {
            const float *scales = layer.value_scales + block * kPageTokens;
            low *= load_floats(scales);
            high *= load_floats(scales + kLanes);
        }
        store_floats(row, low);
        store_floats(row + kLanes, high);
        tokens = std::max(tokens, std::min(to, kPageTokens));
    }
    mix_page<T, count>(values, value_dim, tokens, shares, queries.out + begin * out_step);
}

// Which page kernel takes `count` queries: more accumulators than registers cost more than a second pass.
template <class T, int most>
int attend_some(const SwitchyardPagedLayer &layer, int64_t page, int64_t kv_head, int64_t first,
                const PageQueries &queries, int begin, Softmax *state) {
    if constexpr (most > 1) {
        if (queries.count - begin < most)
            return attend_some<T, most - 1>(layer, page, kv_head, first, queries, begin, state);
    }
    attend_page<T, most>(layer, page, kv_head, first, queries, begin, state);
    return most;
}

template <class T>
void attend(const SwitchyardPagedLayer &layer, const int32_t *pages, int64_t kv_head, const PageQueries &queries) {
    Softmax state[kMostQueries];
    const int64_t out_step = whole_lanes(layer.value_dim);
    std::fill_n(queries.out, queries.count * out_step, 0.0f);
    if (layer.sinks)
        for (int i = 0; i < queries.count; ++i) state[i].top = queries.sink[i], state[i].total = 1.0f;
    const int64_t from = *std::min_element(queries.from, queries.from + queries.count);
    const int64_t to = *std::max_element(queries.to, queries.to + queries.count);
    const int64_t end = (to + kPageTokens - 1) / kPageTokens;
    const auto visit = [&](int64_t index) {
        for (int begin = 0; begin < queries.count;)
            begin += attend_some<T, MOST_ACCUMULATORS / 2>(layer, pages[index], kv_head, index * kPageTokens, queries,
                                                           begin, state + begin);
    };
    // The kept tokens' pages that are not in the window anyway.
    const int64_t window = from / kPageTokens;
    const int64_t kept = std::min<int64_t>(layer.kept, to);
    for (int64_t index = 0; index < std::min(window, (kept + kPageTokens - 1) / kPageTokens); ++index) visit(index);
    for (int64_t index = window; index < end; ++index) visit(index);
    for (int i = 0; i < queries.count; ++i)
        for (int64_t at = 0; at < out_step; ++at) queries.out[i * out_step + at] /= state[i].total;
}

// The scale that makes [n] fit into int8, and its inverse.
inline float int8_scale(const float *x, int64_t n, float *inverse) {
    float most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    *inverse = most > 0 ? 127.0f / most : 0.0f;
    return most / 127.0f;
}

template <class T>
void write(const SwitchyardPagedLayer &layer, int64_t page, int64_t kv_head, int64_t slot, const float *key,
           const float *value) {
    typedef typename T::Element Element;
    const int64_t key_dim = layer.key_dim, value_dim = layer.value_dim, block = page * layer.kv_heads + kv_head;
    Element *keys = static_cast<Element *>(layer.keys) + block * key_dim * kPageTokens + slot;
    Element *values = static_cast<Element *>(layer.values) + (block * kPageTokens + slot) * value_dim;
    float of_keys = 0, of_values = 0;
    if (T::scaled) {
        layer.key_scales[block * kPageTokens + slot] = int8_scale(key, key_dim, &of_keys);
        layer.value_scales[block * kPageTokens + slot] = int8_scale(value, value_dim, &of_values);
    }
    for (int64_t d = 0; d < key_dim; ++d) keys[d * kPageTokens] = T::store(key[d], of_keys);
    for (int64_t d = 0; d < value_dim; ++d) values[d] = T::store(value[d], of_values);
}

template <class T> constexpr PagedKernels paged_kernels() { return {attend<T>, write<T>}; }

}  // namespace

#define PAGED_KERNELS \
    { paged_kernels<Bf16>(), paged_kernels<Fp16>(), paged_kernels<Int8>(), paged_kernels<Fp32>() }
