// Building blocks of the CPU kernels: dispatch by instruction set, conversions to float, exp2.
//
// Everything here is plain C++ that the compiler vectorises inside a function marked SMOPD_CLONES, so the
// helpers are always inlined into it and take its instruction set. No flag here or in setup.py may imply
// -ffinite-math-only or flush-to-zero: infinities and NaN are part of the contract.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define SMOPD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SMOPD_CLONES
#endif

#define SMOPD_INLINE inline __attribute__((always_inline))

namespace smopd {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

SMOPD_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

SMOPD_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

SMOPD_INLINE float to_float(float value) { return value; }

SMOPD_INLINE float to_float(BFloat16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

SMOPD_INLINE float to_float(Float16 value) {
  // Shift the exponent and mantissa into place and rescale by 2^112 (the difference of the biases), which
  // normalises subnormals too; an exponent of all ones is an infinity or a NaN and keeps its mantissa.
  const uint32_t magnitude = uint32_t(value.bits & 0x7fffu) << 13;
  const uint32_t finite = float_to_bits(bits_to_float(magnitude) * bits_to_float((127u + 112u) << 23));
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  return bits_to_float(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// 2^t for t <= 0; relative error below 1e-7, exactly 1 at 0 and exactly 0 at t <= -127 and for NaN.
// The polynomial is the degree-6 minimax (Remez) fit of 2^r on [-1/2, 1/2] in relative error, ours.
SMOPD_INLINE float exp2_nonpositive(float t) {
  t = t > -127.0f ? t : -127.0f;
  const int32_t n = int32_t(t - 0.5f);
  const float r = t - float(n);
  float p = 1.53458121587e-4f;
  p = p * r + 1.33999312095e-3f;
  p = p * r + 9.61848895652e-3f;
  p = p * r + 5.55032877700e-2f;
  p = p * r + 2.40226468906e-1f;
  p = p * r + 6.93147205737e-1f;
  p = p * r + 1.0f;
  return p * bits_to_float(uint32_t(n + 127) << 23);
}

}  // namespace smopd
