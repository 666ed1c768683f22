// The loops over a block, compiled for each instruction set and vectorized by the compiler. Comparisons have
// their operands in an order that makes each one instruction and, except in max_of, propagates NaN.

#include "exponent.h"

#include <algorithm>
#include <limits>

namespace smopd {
namespace {

constexpr int64_t kRun = 256;  // elements summed in float. Longer sums of equal numbers would drift
constexpr int64_t kMaxLanes = 32;
constexpr int64_t kLine = 64;  // bytes of a cache line
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Whether the clone in use has a fused multiply-add.
#ifdef SMOPD_HAS_CLONES
__attribute__((target("default"))) bool is_fused() { return false; }
__attribute__((target("arch=x86-64-v3"))) bool is_fused() { return true; }
__attribute__((target("arch=x86-64-v4"))) bool is_fused() { return true; }
#elif defined(__FMA__) || defined(__aarch64__)
bool is_fused() { return true; }
#else
bool is_fused() { return false; }
#endif

SMOPD_INLINE void fetch_run(const void* ahead, int64_t from, int64_t n_bytes) {
  if (ahead == nullptr) return;
  const char* const next = static_cast<const char*>(ahead) + from;
  for (int64_t byte = 0; byte < n_bytes; byte += kLine) __builtin_prefetch(next + byte);
}

// Returns 2^(scale x - shift) if x >= lowest and scale x <= shift. The polynomial is our degree-5 Remez fit
// of 2^r in relative error, divided by its constant term. Its mean error, -7e-8, cancels in a softmax.
template <bool kFused>
SMOPD_INLINE float exponential(float x, const Exponent& z) {
  uint32_t rounded;
  float r;
  if constexpr (kFused) {
    rounded = float_to_bits(x * z.scale + z.start);
    r = x * z.scale - float(int32_t(rounded) + z.bias);
  } else {
    const double below = double(x) * double(z.scale) - z.shift;
    rounded = float_to_bits(float(below) + (kRounder + 127.0f));
    r = float(below - double(int32_t(rounded) - 127 - int32_t(kRounderBits)));
  }
  float p = 1.32764668480e-3f;
  p = p * r + 9.67554055499e-3f;
  p = p * r + 5.55071288892e-2f;
  p = p * r + 2.40221180053e-1f;
  p = p * r + 6.93146917392e-1f;
  p = p * r + 1.0f;
  return p * bits_to_float(rounded << 23);
}

// 2^x = 2^n 2^r by the Taylor series of 2^r for |r| <= 1/2. The first omitted term is below 2^-57. 2^n is
// split into two factors so that a subnormal result is rounded once.
SMOPD_INLINE double exact_exp2(double x) {
  constexpr double kFar = 1100.0;  // beyond it, 2^x is 0 or infinity
  const double below = x > kFar ? kFar : x;
  const double inside = below < -kFar ? -kFar : below;
  const double rounded = std::nearbyint(inside);
  const double r = inside - rounded;
  const int32_t n = int32_t(rounded == rounded ? rounded : 0.0);
  double p = 1.3691488853904128e-12;
  p = p * r + 2.5678435993488206e-11;
  p = p * r + 4.4455382718708116e-10;
  p = p * r + 7.054911620801123e-09;
  p = p * r + 1.01780860092397e-07;
  p = p * r + 1.321548679014431e-06;
  p = p * r + 1.5252733804059841e-05;
  p = p * r + 0.0001540353039338161;
  p = p * r + 0.0013333558146428443;
  p = p * r + 0.009618129107628477;
  p = p * r + 0.05550410866482158;
  p = p * r + 0.24022650695910072;
  p = p * r + 0.6931471805599453;
  p = p * r + 1.0;
  const int32_t half = n >> 1;
  const double first = bits_to_double(uint64_t(int64_t(half) + 1023) << 52);
  const double second = bits_to_double(uint64_t(int64_t(n - half) + 1023) << 52);
  return p * first * second;
}

SMOPD_INLINE float max_of(const float* x, int64_t length) {
  float lanes[kMaxLanes];
  for (int64_t l = 0; l < kMaxLanes; ++l) lanes[l] = kMinusInfinity;
  int64_t j = 0;
  for (; j + kMaxLanes <= length; j += kMaxLanes) {
    for (int64_t l = 0; l < kMaxLanes; ++l) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
  }
  for (int64_t l = 0; j + l < length; ++l) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
  float result = kMinusInfinity;
  for (int64_t l = 0; l < kMaxLanes; ++l) result = lanes[l] > result ? lanes[l] : result;
  return result;
}

// 16-bit floats are compared as integers, which have the same order once negative ones are flipped.
template <typename T>
SMOPD_INLINE float max_of(const T* x, int64_t length) {
  int16_t highest = std::numeric_limits<int16_t>::min();
  for (int64_t j = 0; j < length; ++j) {
    const int16_t bits = int16_t(x[j].bits);
    const int16_t order = int16_t(bits ^ ((bits >> 15) & 0x7fff));
    highest = highest > order ? highest : order;
  }
  const float result = to_float(T{uint16_t(highest ^ ((highest >> 15) & 0x7fff))});
  return length == 0 ? kMinusInfinity : result;
}

// For a shift too large for the vector loop, one element at a time in double. Models never reach this.
template <bool kDot, typename T>
BlockSums far_exponentials(const T* x, float* e, int64_t length, const Exponent& z, float reference) {
  BlockSums total{0.0, 0.0};
  for (int64_t j = 0; j < length; ++j) {
    const float value = to_float(x[j]);
    e[j] = float(std::exp2(double(value) * double(z.scale) - z.shift));
    total.sum += double(e[j]);
    if (kDot && e[j] > 0.0f) total.dot += double(e[j]) * (double(value) - double(reference));
  }
  return total;
}

template <bool kFused>
SMOPD_INLINE double near_sum(
    const float* x, int64_t length, float less, const Exponent& exponent, const void* ahead) {
  const Exponent z = exponent;
  double total = 0.0;
  for (int64_t begin = 0; begin < length; begin += kRun) {
    const int64_t end = std::min(begin + kRun, length);
    fetch_run(ahead, begin * int64_t(sizeof(float)), kRun * int64_t(sizeof(float)));
    float sum = 0.0f;
    for (int64_t j = begin; j < end; ++j) {
      const float raw = x[j] - less;
      sum += exponential<kFused>(z.lowest > raw ? z.lowest : raw, z);
    }
    total += double(sum);
  }
  return total;
}

template <bool kDot, bool kFused, typename T>
SMOPD_INLINE BlockSums near_exponentials(
    const T* x, float* e, int64_t length, const Exponent& exponent, float reference, const T* ahead) {
  const Exponent z = exponent;
  BlockSums total{0.0, 0.0};
  for (int64_t begin = 0; begin < length; begin += kRun) {
    const int64_t end = std::min(begin + kRun, length);
    fetch_run(ahead, begin * int64_t(sizeof(T)), kRun * int64_t(sizeof(T)));
    float sum = 0.0f;
    float dot = 0.0f;
#pragma GCC ivdep
    for (int64_t j = begin; j < end; ++j) {
      const float raw = to_float(x[j]);
      const float value = z.lowest > raw ? z.lowest : raw;
      const float result = exponential<kFused>(value, z);
      e[j] = result;
      sum += result;
      if (kDot) dot += result * (value - reference);
    }
    total.sum += double(sum);
    total.dot += double(dot);
  }
  return total;
}

template <bool kDot, typename T>
SMOPD_INLINE BlockSums exponentials(
    const T* x, float* e, int64_t length, const Exponent& z, float reference, const T* ahead) {
  if (z.far) return far_exponentials<kDot>(x, e, length, z, reference);
  return is_fused() ? near_exponentials<kDot, true>(x, e, length, z, reference, ahead)
                    : near_exponentials<kDot, false>(x, e, length, z, reference, ahead);
}

template <bool kSlope, bool kSecond, typename T>
SMOPD_INLINE void gradient_of(
    const float* e, const float* second, const T* x, T* out, int64_t length, const Gradient& gradient) {
  Gradient g = gradient;
  g.level = canonical(g.level);
  g.slope = canonical(g.slope);
  g.second_level = canonical(g.second_level);
#pragma GCC ivdep
  for (int64_t j = 0; j < length; ++j) {
    float result = g.level;
    if (kSlope) {
      const float raw = to_float(x[j]);
      const float value = g.lowest > raw ? g.lowest : raw;
      result += g.slope * (value - g.reference);
    }
    result *= e[j];
    if (kSecond) result += g.second_level * second[j];
    out[j] = narrow_number<T>(result);
  }
}

}  // namespace

SMOPD_CLONES double block_sum(
    const float* x, int64_t length, float less, const Exponent& z, const void* ahead) {
  return is_fused() ? near_sum<true>(x, length, less, z, ahead) : near_sum<false>(x, length, less, z, ahead);
}

SMOPD_CLONES void exp2_each(const double* x, double* out, int64_t length) {
#pragma GCC ivdep
  for (int64_t i = 0; i < length; ++i) out[i] = exact_exp2(x[i]);
}

#define SMOPD_BLOCK_FUNCTIONS(T)                                                                          \
  SMOPD_CLONES float block_max(const T* x, int64_t length) { return max_of(x, length); }                  \
  SMOPD_CLONES BlockSums block_exponentials(                                                              \
      const T* x, float* e, int64_t length, const Exponent& z, const T* ahead) {                          \
    return exponentials<false>(x, e, length, z, 0.0f, ahead);                                             \
  }                                                                                                       \
  SMOPD_CLONES BlockSums block_exponentials_dot(                                                          \
      const T* x, float* e, int64_t length, const Exponent& z, float reference, const T* ahead) {         \
    return exponentials<true>(x, e, length, z, reference, ahead);                                         \
  }                                                                                                       \
  SMOPD_CLONES void block_scale(const float* e, T* out, int64_t length, float level) {                    \
    gradient_of<false, false, T>(e, e, nullptr, out, length, {level, 0.0f, 0.0f, 0.0f, 0.0f});            \
  }                                                                                                       \
  SMOPD_CLONES void block_curve(const float* e, const T* x, T* out, int64_t length, const Gradient& g) {  \
    gradient_of<true, false>(e, e, x, out, length, g);                                                    \
  }                                                                                                       \
  SMOPD_CLONES void block_pair(                                                                           \
      const float* e, const float* second, const T* x, T* out, int64_t length, const Gradient& g) {       \
    gradient_of<true, true>(e, second, x, out, length, g);                                                \
  }

SMOPD_BLOCK_FUNCTIONS(float)
SMOPD_BLOCK_FUNCTIONS(BFloat16)
SMOPD_BLOCK_FUNCTIONS(Float16)

}  // namespace smopd
