// States of tokens, in any type.
#pragma once
#include "card.h"

// Element `at` of a state: 0 bf16, 1 fp16, 2 fp32.
__device__ __forceinline__ float state_at(const u8* states, int type, i64 at) {
    if (type == 0) return reinterpret_cast<const Bf16*>(states)[at].value();
    if (type == 1) return reinterpret_cast<const Fp16*>(states)[at].value();
    return reinterpret_cast<const float*>(states)[at];
}

__device__ __forceinline__ void set_state(u8* states, int type, i64 at, float value) {
    if (type == 0) reinterpret_cast<Bf16*>(states)[at] = Bf16::of(value);
    else if (type == 1) reinterpret_cast<Fp16*>(states)[at] = Fp16::of(value);
    else reinterpret_cast<float*>(states)[at] = value;
}

// A number as it is in a state.
__device__ __forceinline__ float rounded_to(int type, float value) {
    return type == 0 ? Bf16::of(value).value() : type == 1 ? Fp16::of(value).value() : value;
}
