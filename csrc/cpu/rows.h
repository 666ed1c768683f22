// The terms of a row and their closed-form gradient (see kernels/reference/loss.py).
//
// One pass stores the row's exponentials and sums them. A second pass turns them into the gradient. With a
// tail bucket, the first pass skips the support, so that the student's mass outside the support is its own
// sum. The entries of the support and the token are computed in double from gathered logits and written last.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "exponent.h"
#include "union.h"

namespace smopd {

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

// A softmax over a row. Some slots may be held out of the stream and added afterwards.
struct Softmax {
  double temperature;
  float scale;
  Exponent exponent{};
  float reference = -kInfinity;  // the largest streamed logit so far
  double sum = 0.0;              // of 2^(scale x - shift) over the stream
  double dot = 0.0;              // of the same times (x - reference), if requested
  std::vector<double>* shifts;   // of each block's stored exponentials

  // The fields below are relative to `origin`, the row's largest logit. Accurate for logits up to 2^30.
  double origin = 0.0;
  double base = 0.0;         // scale * origin, rounded up
  double log2_stream = 0.0;  // log2 of the sum of 2^(scale (x - origin)) over the stream, -inf if it is empty
  double log2_total = 0.0;   // the same over the whole row, NaN if it has no softmax
  double mean = 0.0;         // of x - origin, if dot was requested

  double log2_weight(float x) const { return (double(x) - origin) * double(scale); }
  double log2_p(float x) const { return log2_weight(x) - log2_total; }
  // log2 of an exponential that was stored as 1.
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

// Adds a block of the stream and writes its exponentials to e, which may be x. For `ahead`, see exponent.h.
template <typename T>
inline void add_block(Softmax& z, const T* x, float* e, int64_t length, bool dot, const T* ahead) {
  const float highest = block_max(x, length);
  if (highest > z.reference) raise_reference(z, highest);
  if (z.reference == -kInfinity) {  // only -inf and NaN so far, so any shift will do
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

// Adds the slots held out of the stream, if any, stores their probabilities and takes the logarithms.
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

struct RowSettings {
  double temperature;     // of the token's log-probability and the entropy
  double kl_temperature;  // of the forward KL
  bool tail;
  bool entropy;           // compute the entropy
  bool entropy_gradient;  // the entropy may have a gradient
};

// The working memory of one thread.
struct Work {
  TargetWork target;
  std::vector<double> shifts;
  std::vector<double> kl_shifts;
  std::vector<float> exponentials;     // of a row, unless stored in the gradient
  std::vector<float> kl_exponentials;  // at the second temperature

  explicit Work(const Target& t) : target(t) {}
};

template <typename T>
struct Row {
  const T* logits;
  int64_t vocab;
  int64_t token;     // in [0, vocab)
  Support* support;  // null without a forward KL
  RowSettings settings;
  T* out;  // the gradient's memory (it may be that of the logits), or null

  bool same = true;  // there is one temperature
  Softmax policy{};  // at the first temperature
  Softmax kl{};      // at the second
  float* exponentials = nullptr;
  float* kl_exponentials = nullptr;
  float token_logit = 0.0f;
  double logp = 0.0;
  double entropy = 0.0;
  double kl_value = 0.0;
  double student_mass = 0.0;
};

// Coefficients of the gradient. A KL with coefficient 0 adds nothing, even if its target is NaN.
struct Slopes {
  double logp;
  double kl;
  double entropy;
};

// Places the exponentials in the gradient's memory if it is float and the logits are not read again.
template <typename T>
inline void place_exponentials(Row<T>& row, Work& work) {
  if (row.out == nullptr) return;
  const size_t vocab = size_t(row.vocab);
  if constexpr (std::is_same_v<T, float>) {
    if (!row.settings.entropy_gradient && row.same) row.exponentials = row.out;
  }
  if (row.exponentials == nullptr) {
    if (work.exponentials.size() < vocab) work.exponentials.resize(vocab);
    row.exponentials = work.exponentials.data();
  }
  if (!row.same) {
    if (work.kl_exponentials.size() < vocab) work.kl_exponentials.resize(vocab);
    row.kl_exponentials = work.kl_exponentials.data();
  }
}

// Computes the sums of the stream, without the held-out slots.
template <typename T>
inline void stream_blocks(Row<T>& row) {
  alignas(64) T copy[kBlockLength];
  alignas(64) float spare[kBlockLength];
  Support* const held_out = row.settings.tail ? row.support : nullptr;
  for (int64_t start = 0; start < row.vocab; start += kBlockLength) {
    const int64_t length = std::min(kBlockLength, row.vocab - start);
    const T* block = row.logits + start;
    for (int64_t i = 0; held_out != nullptr && i < held_out->count; ++i) {
      const uint64_t offset = uint64_t(int64_t(held_out->ids[i]) - start);
      if (offset >= uint64_t(length)) continue;
      if (block != copy) std::copy(block, block + length, copy);
      block = copy;
      copy[offset] = minus_infinity<T>();
    }
    const T* const ahead = start + kAhead + kBlockLength <= row.vocab ? row.logits + start + kAhead : nullptr;
    float* const kl_e = row.kl_exponentials == nullptr ? spare : row.kl_exponentials + start;
    if (!row.same) add_block(row.kl, block, kl_e, length, false, ahead);
    float* const e = row.exponentials == nullptr ? spare : row.exponentials + start;
    add_block(row.policy, block, e, length, row.settings.entropy, row.same ? ahead : nullptr);
  }
}

// Computes the row's terms, and its exponentials if a gradient follows.
template <typename T>
inline void row_terms(Row<T>& row, Work& work) {
  row.same = row.support == nullptr || row.settings.temperature == row.settings.kl_temperature;
  row.policy = start_softmax(row.settings.temperature, &work.shifts);
  if (!row.same) row.kl = start_softmax(row.settings.kl_temperature, &work.kl_shifts);
  row.token_logit = to_float(row.logits[row.token]);
  Support* const support = row.support;
  for (int64_t i = 0; support != nullptr && i < support->count; ++i) {
    support->logits[i] = to_float(row.logits[support->ids[i]]);
  }
  place_exponentials(row, work);
  stream_blocks(row);
  Support* const held_out = row.settings.tail ? row.support : nullptr;
  finish_softmax(row.policy, held_out);
  if (!row.same) finish_softmax(row.kl, held_out);
  if (row.same) row.kl = row.policy;

  row.logp = kLn2 * row.policy.log2_p(row.token_logit);
  if (row.settings.entropy) row.entropy = row.policy.entropy();
  if (support == nullptr) return;
  if (!row.settings.tail) {
    for (int64_t i = 0; i < support->count; ++i) support->p[i] = row.kl.log2_p(support->logits[i]);
    exp2_each(support->p.data(), support->p.data(), support->count);
  }
  double cross = 0.0, student_mass = 0.0;
  for (int64_t i = 0; i < support->count; ++i) {
    const double log2_p = row.kl.log2_p(support->logits[i]);
    student_mass += support->p[i];
    if (support->q[i] > 0.0) cross += support->q[i] * kLn2 * log2_p;
  }
  row.student_mass = support->mass == support->mass ? student_mass : support->mass;
  row.kl_value = support->q_logq - cross;
  if (support->tail_q > 0.0) {
    const double log_off = kLn2 * (row.kl.log2_stream - row.kl.log2_total);
    row.kl_value += support->tail_q * (std::log(support->tail_q) - log_off);
  }
}

// Returns an entry of the gradient of sum(slopes * terms) in the logits:
//
//   (1/T) [logp ([v = y] - p_v) - entropy p_v (log p_v + H)]
//   + (1/T') kl [W p'_v - q_v - (off the support: q_r p'_v / p'_r)],   W = Q + q_r
template <typename T>
inline double gradient_entry(
    const Row<T>& row, const Slopes& d, float logit, bool is_token, bool inside, double kl_p, double q) {
  const double log2_p = row.policy.log2_p(logit);
  const double p = row.same ? kl_p : std::exp2(log2_p);
  double policy = d.logp * ((is_token ? 1.0 : 0.0) - p);
  if (d.entropy != 0.0 && p > 0.0) policy -= d.entropy * p * (kLn2 * log2_p + row.entropy);
  double kl = 0.0;
  if (row.support != nullptr && d.kl != 0.0) {
    kl = (row.support->mass + row.support->tail_q) * kl_p - q;
    const bool off = !inside && row.kl.log2_stream > -std::numeric_limits<double>::infinity();
    if (off) kl -= row.support->tail_q * std::exp2(row.kl.log2_weight(logit) - row.kl.log2_stream);
  }
  return policy / row.policy.temperature + d.kl * kl / row.kl.temperature;
}

// Writes the row's gradient. row_terms must have been called with an `out`.
template <typename T>
inline void row_gradient(const Row<T>& row, const Slopes& d) {
  const Softmax& z = row.policy;
  const Support* const support = row.support;
  if (z.log2_total != z.log2_total) {
    std::fill(row.out, row.out + row.vocab, narrow<T>(std::numeric_limits<float>::quiet_NaN()));
    return;
  }
  // Off the support, an entry is p_v (policy + curve (log p_v + H)) + p'_v kl + off p'_v / p'_r. Here p_v is
  // a multiple of e.
  const bool any_off = row.kl.log2_stream > -std::numeric_limits<double>::infinity();
  const bool any_kl = support != nullptr && d.kl != 0.0;
  const double kl = any_kl ? d.kl * (support->mass + support->tail_q) / row.kl.temperature : 0.0;
  const double off = any_kl && any_off ? -d.kl * support->tail_q / row.kl.temperature : 0.0;
  const float reference = any_off ? z.reference : 0.0f;
  const double curve = -d.entropy / z.temperature;
  double policy = -d.logp / z.temperature;
  if (curve != 0.0) policy += curve * (kLn2 * z.log2_p(reference) + row.entropy);
  size_t block = 0;
  for (int64_t start = 0; start < row.vocab; start += kBlockLength, ++block) {
    const int64_t length = std::min(kBlockLength, row.vocab - start);
    const T* const x = row.logits + start;
    T* const out = row.out + start;
    const float* const e = row.exponentials + start;
    const double unit = std::exp2(z.log2_unit((*z.shifts)[block]) - z.log2_total);
    const double kl_log2_unit = row.kl.log2_unit((*row.kl.shifts)[block]);
    double kl_level = any_kl ? kl * (row.same ? unit : std::exp2(kl_log2_unit - row.kl.log2_total)) : 0.0;
    if (off != 0.0) kl_level += off * std::exp2(kl_log2_unit - row.kl.log2_stream);
    const float slope = float(curve * unit * kLn2 * double(z.scale));
    Gradient g{float(policy * unit), slope, reference, z.exponent.lowest, float(kl_level)};
    if (any_kl && !row.same) {
      block_pair(e, row.kl_exponentials + start, x, out, length, g);
    } else if (curve != 0.0) {
      g.level = float(policy * unit + kl_level);
      block_curve(e, x, out, length, g);
    } else {
      block_scale(e, out, length, float(policy * unit + kl_level));
    }
  }

  bool token_inside = false;
  const int64_t held = support == nullptr ? 0 : support->count;
  for (int64_t i = 0; i < held; ++i) {
    const bool is_token = support->ids[i] == row.token;
    token_inside |= is_token;
    const double p = support->p[i];
    const double entry = gradient_entry(row, d, support->logits[i], is_token, true, p, support->q[i]);
    row.out[support->ids[i]] = narrow<T>(float(entry));
  }
  if (token_inside) return;
  const double p = std::exp2(row.kl.log2_p(row.token_logit));
  row.out[row.token] = narrow<T>(float(gradient_entry(row, d, row.token_logit, true, false, p, 0.0)));
}

}  // namespace smopd
