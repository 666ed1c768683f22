// Exponentials of a row at one temperature, and the loops over its blocks that compute and use them.
//
// With scale = log2(e) / T, and `shift` as the row's largest scale * x so far, rounded up to an integer,
//
//     2^(scale x - shift) = 2^n 2^r,   n <= 0 an integer, r = scale x - (shift + n) in [-1/2, 1/2].
//
// A fused multiply-add rounds r once, so the relative error is about 1e-7 even for large x. Without this
// instruction, r is computed in double. NaN propagates to the sums, and -inf gives exactly 0.
//
// A block fits into the L1 cache. Short runs are summed in float, and the sums of runs in double.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// The compiler vectorizes plain loops in functions marked SMOPD_CLONES. Helpers are always inlined into these
// and use their instruction set. No flag here or in setup.py may imply -ffinite-math-only or flush-to-zero,
// because infinities and NaN must stay correct.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define SMOPD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define SMOPD_HAS_CLONES
#else
#define SMOPD_CLONES
#if defined(__x86_64__) && !defined(__AVX2__)
#warning "smopd._C: this compiler makes no AVX variants; use GCC 12 or later"
#endif
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
  // Shift exponent and mantissa into place and multiply by 2^112 (the difference of the biases), which also
  // normalizes subnormals. Infinities and NaN keep their mantissa.
  const uint32_t magnitude = uint32_t(value.bits & 0x7fffu) << 13;
  const uint32_t finite = float_to_bits(bits_to_float(magnitude) * bits_to_float((127u + 112u) << 23));
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  return bits_to_float(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// Removes the payload of a NaN.
SMOPD_INLINE float canonical(float value) { return value == value ? value : bits_to_float(0x7fc00000u); }

// Rounds to T, ties to even. narrow is right for every value. narrow_number is wrong for a NaN with a full
// payload, which carries into the sign. Payloads propagate, so loops first make their coefficients canonical.
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
  // Normal results: rebias the exponent, round the 13 dropped bits, and limit overflows to infinity.
  // Subnormal results: adding 0.5 leaves the multiple of 2^-24 in the lowest bits.
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

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;
constexpr int64_t kBlockLength = 2048;    // elements
constexpr int64_t kAhead = 2 * kBlockLength;  // distance of the prefetch
constexpr float kRounder = 12582912.0f;   // 1.5 * 2^23: adding it puts the integer part into the low bits
constexpr uint32_t kRounderBits = 0x4b400000u;
constexpr double kLargestShift = 1 << 20;  // below about 2^22, up to which kRounder - shift is exact

struct Exponent {
  float scale;
  float start;   // kRounder + 127 - shift
  float lowest;  // lower logits give 0
  int32_t bias;  // shift - 127 - kRounderBits
  double shift;  // an integer
  bool far;      // the shift is too large for the floats above
};

inline float exponent_scale(double temperature) { return float(kLog2E / temperature); }

// Returns the Exponent for logits up to `reference`.
inline Exponent exponent_at(float reference, float scale) {
  const double shift = std::ceil(double(reference) * double(scale));
  const float lowest = float((shift - 127.0) / double(scale));
  if (!(std::fabs(shift) <= kLargestShift)) return {scale, 0.0f, lowest, 0, shift, true};
  const int32_t bias = int32_t(shift) - 127 - int32_t(kRounderBits);
  return {scale, kRounder + 127.0f - float(shift), lowest, bias, shift, false};
}

struct BlockSums {
  double sum;  // of e = 2^(scale x - shift)
  double dot;  // of e (x - reference), if requested
};

// The gradient e (level + slope (x - reference)) + second_level e', with e' at the second temperature.
struct Gradient {
  float level;
  float slope;
  float reference;
  float lowest;  // of x
  float second_level;
};

// Sums 2^(scale (x - less) - shift) for a shift that is not far. `ahead`: see below.
double block_sum(const float* x, int64_t length, float less, const Exponent& z, const void* ahead);

// Computes 2^x in double, each within two units in the last place. `out` may be x.
void exp2_each(const double* x, double* out, int64_t length);

// These functions exist for T = float, BFloat16 and Float16.
//
// block_max returns the largest element, or -inf if there is none. NaN is ignored or returned.
// block_exponentials and block_exponentials_dot write e, which may be x, and sum it. scale x must not exceed
// the shift. If `ahead` is not null, the block there is prefetched.
// block_scale writes level e. block_curve adds the slope, and block_pair also the second temperature. `out`
// may be e or x.
#define SMOPD_BLOCK_FUNCTIONS(T)                                                                          \
  float block_max(const T* x, int64_t length);                                                            \
  BlockSums block_exponentials(const T* x, float* e, int64_t length, const Exponent& z, const T* ahead);  \
  BlockSums block_exponentials_dot(                                                                       \
      const T* x, float* e, int64_t length, const Exponent& z, float reference, const T* ahead);          \
  void block_scale(const float* e, T* out, int64_t length, float level);                                  \
  void block_curve(const float* e, const T* x, T* out, int64_t length, const Gradient& g);                \
  void block_pair(                                                                                        \
      const float* e, const float* second, const T* x, T* out, int64_t length, const Gradient& g);

SMOPD_BLOCK_FUNCTIONS(float)
SMOPD_BLOCK_FUNCTIONS(BFloat16)
SMOPD_BLOCK_FUNCTIONS(Float16)
#undef SMOPD_BLOCK_FUNCTIONS

}  // namespace smopd
