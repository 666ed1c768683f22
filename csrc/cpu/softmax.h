// A row's softmax at one temperature: sums over blocks, which keep the exponentials for the gradient.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponent.h"
#include "support.h"

namespace smopd {

constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <typename T>
T minus_infinity();
template <>
inline float minus_infinity<float>() { return -kInfinity; }
template <>
inline BFloat16 minus_infinity<BFloat16>() { return {0xff80u}; }
template <>
inline Float16 minus_infinity<Float16>() { return {0xfc00u}; }

// A softmax over a row of which some slots may be held out of the stream and added afterwards.
struct Softmax {
  double temperature;
  float scale;
  Exponent exponent{};
  float reference = -kInfinity;  // the largest streamed logit so far
  double sum = 0.0;              // of 2^(scale x - shift) over the stream
  double dot = 0.0;              // of the same times (x - reference), if asked
  std::vector<double>* shifts;   // of each block's stored exponentials

  // From here on relative to `origin`, the row's largest logit. Exact enough for logits up to 2^30.
  double origin = 0.0;
  double base = 0.0;         // scale origin rounded up
  double log2_stream = 0.0;  // log2 of the sum of 2^(scale (x - origin)) over the stream, -inf for nothing
  double log2_total = 0.0;   // and over the whole row, NaN where it has no softmax
  double mean = 0.0;         // of x - origin, if dot was asked

  double log2_weight(float x) const { return (double(x) - origin) * double(scale); }
  double log2_p(float x) const { return log2_weight(x) - log2_total; }
  // Of an exponential that was stored as 1.
  double log2_unit(double shift) const { return (shift - base) + (base - origin * double(scale)); }
  double entropy() const { return kLn2 * (log2_total - double(scale) * mean); }
};

inline Softmax start_softmax(double temperature, std::vector<double>* shifts) {
  shifts->clear();
  Softmax z{};
  z.temperature = temperature;
  z.scale = exponent_scale(temperature);
  z.reference = -kInfinity;
  z.shifts = shifts;
  return z;
}

inline void raise_reference(Softmax& z, float reference) {
  const Exponent next = exponent_at(reference, z.scale);
  if (z.reference > -kInfinity) {
    const double factor = std::exp2(z.exponent.shift - next.shift);
    z.dot = factor * (z.dot + (double(z.reference) - double(reference)) * z.sum);
    z.sum *= factor;
  }
  z.exponent = next;
  z.reference = reference;
}

// Adds a block of the stream and writes its exponentials to e, which may be x. `ahead`: see exponent.h.
template <typename T>
inline void add_block(Softmax& z, const T* x, float* e, int64_t length, bool dot, const T* ahead) {
  const float highest = block_max(x, length);
  if (highest > z.reference) raise_reference(z, highest);
  if (z.reference == -kInfinity) {  // nothing so far but -inf and NaN: zeros, of any shift
    z.sum += block_exponentials(x, e, length, exponent_at(0.0f, z.scale), ahead).sum;
    z.shifts->push_back(-std::numeric_limits<double>::infinity());
    return;
  }
  const BlockSums block = dot ? block_exponentials_dot(x, e, length, z.exponent, z.reference, ahead)
                              : block_exponentials(x, e, length, z.exponent, ahead);
  z.sum += block.sum;
  z.dot += block.dot;
  z.shifts->push_back(z.exponent.shift);
}

// Adds what was held out of the stream (null: nothing was), leaves its probabilities there and takes the
// logarithms.
inline void finish_softmax(Softmax& z, Support* held_out) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const bool streamed = z.reference > -kInfinity;
  const int64_t held = held_out == nullptr ? 0 : held_out->count;
  z.origin = double(z.reference);
  for (int64_t i = 0; i < held; ++i) z.origin = std::max(z.origin, double(held_out->logits[i]));
  const bool any = z.origin > kNothing;
  z.base = any ? std::ceil(z.origin * double(z.scale)) : 0.0;
  if (!any) z.origin = 0.0;
  const double unit = streamed ? std::exp2(z.log2_unit(z.exponent.shift)) : 1.0;
  double total = z.sum * unit;
  double dot = streamed ? unit * (z.dot + (double(z.reference) - z.origin) * z.sum) : 0.0;
  for (int64_t i = 0; i < held; ++i) held_out->p[i] = z.log2_weight(held_out->logits[i]);
  if (held > 0) exp2_each(held_out->p.data(), held_out->p.data(), held);
  for (int64_t i = 0; i < held; ++i) {
    const double e = held_out->p[i];
    total += e;
    if (e > 0.0) dot += e * (double(held_out->logits[i]) - z.origin);
  }
  z.log2_total = any ? std::log2(total) : kNaN;
  z.log2_stream = streamed ? z.log2_unit(z.exponent.shift) + std::log2(z.sum) : kNothing;
  if (held == 0) z.log2_stream = z.log2_total;
  z.mean = dot / total;
  for (int64_t i = 0; i < held; ++i) held_out->p[i] /= total;
}

}  // namespace smopd
