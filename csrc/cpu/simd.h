// Building blocks of the CPU kernels: dispatch by instruction set, conversions from and to float.
//
// Everything here is plain C++ that the compiler vectorises inside a function marked SMOPD_CLONES, so the
// helpers are always inlined into it and take its instruction set. No flag here or in setup.py may imply
// -ffinite-math-only or flush-to-zero: infinities and NaN are part of the contract.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define SMOPD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define SMOPD_HAS_CLONES
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

SMOPD_INLINE double bits_to_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
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

// The value, or the NaN without a payload.
SMOPD_INLINE float canonical(float value) { return value == value ? value : bits_to_float(0x7fc00000u); }

// To T by rounding to the nearest, ties to even. narrow_number serves every value but NaN with a full payload,
// which carries into the sign. Arithmetic hands a payload on, so a loop makes its coefficients canonical first.
// narrow serves every value.
template <typename T>
SMOPD_INLINE T narrow_number(float value);

template <>
SMOPD_INLINE float narrow_number<float>(float value) {
  return value;
}

template <>
SMOPD_INLINE BFloat16 narrow_number<BFloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
SMOPD_INLINE Float16 narrow_number<Float16>(float value) {
  // Normal results: rebias the exponent and round the 13 dropped bits; an overflow carries into the exponent
  // and is cut to infinity. Subnormal ones: adding 0.5 leaves the multiple of 2^-24 in the lowest bits.
  const uint32_t bits = float_to_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t carried = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t normal = carried < 0x7c00u ? carried : 0x7c00u;
  const bool tiny = magnitude < 0x38800000u;
  const uint32_t subnormal = float_to_bits(bits_to_float(tiny ? magnitude : 0u) + 0.5f) - 0x3f000000u;
  const uint32_t number = magnitude > 0x7f800000u ? 0x7e00u : tiny ? subnormal : normal;
  return {uint16_t(((bits >> 16) & 0x8000u) | number)};
}

template <typename T>
SMOPD_INLINE T narrow(float value) {
  return narrow_number<T>(canonical(value));
}

}  // namespace smopd
