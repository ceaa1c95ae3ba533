// 16 rows side by side, in vectors of as many lanes as a register has: compilers do not find these by themselves.
// Included by files per instruction set: everything is local to them, so that the linker never mixes them.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanesAtOnce = kVectorBytes / 4;

typedef float Lanes __attribute__((vector_size(kVectorBytes)));
typedef int32_t WholeLanes __attribute__((vector_size(kVectorBytes)));
typedef uint32_t BitLanes __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfLanes __attribute__((vector_size(kVectorBytes)));  // two to a lane
typedef uint16_t ShortLanes __attribute__((vector_size(kVectorBytes / 2)));
typedef uint8_t ByteLanes __attribute__((vector_size(kVectorBytes / 4)));

template <class To> inline To read(const void *from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class From> inline void write(void *to, const From &value) { std::memcpy(to, &value, sizeof value); }

inline float whole(float value) { return (value + kRoundMagic) - kRoundMagic; }  // |value| < 2^22, ties to even
inline Lanes whole(Lanes values) { return (values + kRoundMagic) - kRoundMagic; }
inline Lanes floats_of(BitLanes whole) { return __builtin_convertvector((WholeLanes)whole, Lanes); }
inline BitLanes nearest_bf16(BitLanes bits) { return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }  // of numbers

}  // namespace
