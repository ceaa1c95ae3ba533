// Every type, for the instruction set of the including file.  A new one is a file beside these and its line here.
#pragma once
#include "iq1_m.h"
#include "iq1_s.h"
#include "iq2_s.h"
#include "iq2_xs.h"
#include "iq2_xxs.h"
#include "iq3_s.h"
#include "iq3_xxs.h"
#include "iq4_nl.h"
#include "iq4_xs.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "panel.h"
#include "plain.h"
#include "q1_0.h"
#include "q2_0.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q5_1.h"
#include "q5_k.h"
#include "q6_k.h"
#include "q8_0.h"
#include "tq1_0.h"
#include "tq2_0.h"

namespace {

#define SWITCHYARD_BY_COUNT(loop)                                                                     \
    template <class Type> void loop##_some(const uint8_t *row, int64_t columns, const RowVector *x, int count, float *out) { \
        switch (count) {                                                                              \
            case 1: return loop<Type, 1>(row, columns, x, out);                                       \
            case 2: return loop<Type, 2>(row, columns, x, out);                                       \
            case 3: return loop<Type, 3>(row, columns, x, out);                                       \
            case 4: return loop<Type, 4>(row, columns, x, out);                                       \
            default:                                                                                  \
                loop<Type, 4>(row, columns, x, out);                                                  \
                return loop##_some<Type>(row, columns, x + 4, count - 4, out + 4);                    \
        }                                                                                             \
    }
SWITCHYARD_BY_COUNT(dot_wide)
SWITCHYARD_BY_COUNT(dot_apart)
SWITCHYARD_BY_COUNT(dot_four)
SWITCHYARD_BY_COUNT(dot_numbers)
#undef SWITCHYARD_BY_COUNT

bool quantise_wide(const float *x, int64_t n, int8_t *q, float *scales, int16_t *parts) {
    typedef float Values __attribute__((vector_size(64)));
    typedef int32_t Bits __attribute__((vector_size(64)));
    typedef int32_t Quarter __attribute__((vector_size(16)));
    typedef int8_t Codes __attribute__((vector_size(16)));
    constexpr int kParts = kWide / kPart;
    bool lost = false;
    for (int64_t block = 0; block * kWide < n; ++block, x += kWide, q += kWide, parts += kParts) {
        const int64_t there = n - block * kWide < kWide ? n - block * kWide : kWide;
        Values values[kParts] = {};
        std::memcpy(values, x, static_cast<size_t>(there) * 4);
        Bits most = {};  // sizes are compared as whole numbers, of which infinities and NaNs are the largest
        for (const Values &some : values) {
            const Bits sizes = (Bits)some & 0x7fffffff;
            most = sizes > most ? sizes : most;
        }
        int32_t each[kPart], top_bits = 0;
        std::memcpy(each, &most, sizeof each);
        for (int32_t one : each) top_bits = one > top_bits ? one : top_bits;
        float top;
        std::memcpy(&top, &top_bits, 4);
        if (top_bits >= 0x7f800000) {
            scales[block] = top - top;  // NaN
            std::memset(q, 1, kWide);
            for (int part = 0; part < kParts; ++part) parts[part] = kPart;
            continue;
        }
        scales[block] = top > 1e-30f ? top / 127.0f : 0.0f;
        const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
        Values squares = {};
        for (const Values &some : values) squares += (some * inverse) * (some * inverse);
        float energies[kPart], energy = -127.0f * 127.0f;
        std::memcpy(energies, &squares, sizeof energies);
        for (float one : energies) energy += one;
        lost |= energy > 0.01f && energy < kWide - 1;  // a step on average
        for (int part = 0; part < kParts; ++part) {
            // 1.5 * 2^23: what is added to it is rounded to a whole number, which its last bits then are.
            const Bits codes = (Bits)(values[part] * inverse + 12582912.0f) - 0x4b400000;
            const Codes narrow = __builtin_convertvector(codes, Codes);
            std::memcpy(q + part * kPart, &narrow, kPart);
            Quarter sums[4];
            std::memcpy(sums, &codes, sizeof sums);
            const Quarter sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            parts[part] = static_cast<int16_t>((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    }
    return lost;
}

template <class Type> constexpr RowType row_type() {
    if constexpr (Type::kElements == 1) {
        return {Type::kNumber, Type::kElements, Type::kBytes, VectorForm::kFloats, dot_numbers_some<Type>, nullptr, nullptr, nullptr, 0,
                unpack_numbers<Type>};
    } else if constexpr (Type::kElements == kGroup) {
        return {Type::kNumber, Type::kElements, Type::kBytes, VectorForm::kBy32, dot_four_some<Type>, unpack_panel<Type>,
                multiply_panel<false, has_mins<Type>(), kGroup, kFit<Type>>, few_of<Type>(), fewest_of<Type>(), unpack_four_row<Type>};
    } else {
        using Dot = decltype(RowType::dot);
        Dot dot = nullptr;
        if constexpr (kIsApart<Type>)
            dot = dot_apart_some<Type>;
        else
            dot = dot_wide_some<Type>;
        return {Type::kNumber, Type::kElements, Type::kBytes, VectorForm::kBy256, dot, unpack_panel<Type>,
                multiply_panel<true, has_mins<Type>(), Type::kWidth, kFit<Type>>, few_of<Type>(), fewest_of<Type>(), unpack_wide_row<Type>};
    }
}
template <class... Types> constexpr RowKernels kernels_of() {
    RowKernels made = {{row_type<Types>()...}, sizeof...(Types), quantise_wide, {}};
    int8_t place = 0;
    for (int8_t &each : made.places) each = -1;
    for (const RowType &type : made) made.places[type.number] = place++;
    return made;
}

constexpr RowKernels row_kernels() {
    return kernels_of<F32, F16, Bf16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Iq4Nl, Mxfp4, Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Xs,
                      Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Tq1, Tq2, Nvfp4, Q1_0, Q2_0>();
}

}  // namespace
