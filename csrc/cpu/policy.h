// A token's policy-gradient terms, from its log-probability alone: clipped surrogate, sampled reverse KL.
//
// The bits are CLIP_* of kernels/types.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace smopd {

constexpr double kLogRatioBound = 20.0;

constexpr int8_t kClipLow = 1;
constexpr int8_t kClipHigh = 2;
constexpr int8_t kClipDual = 4;
constexpr int8_t kClipLogRatio = 8;
constexpr int8_t kClipReverseLow = 16;
constexpr int8_t kClipReverseHigh = 32;

struct PolicySettings {
  double clip_low;
  double clip_high;
  double dual_clip;  // infinite for none
  bool reverse_ppo;
};

struct PolicyTerms {
  double surrogate = 0.0;
  double slope = 0.0;  // of the surrogate in the log-probability
  double reverse = 0.0;
  double reverse_slope = 0.0;
  int8_t clipped = 0;
};

// `log_ratio`: log pi - log pi_old, 0 without an old policy. NaN is in no clip and goes through.
inline PolicyTerms policy_terms(
    double log_ratio, double adv, const double* reverse_adv, const PolicySettings& settings) {
  const double low = 1.0 - settings.clip_low;
  const double high = 1.0 + settings.clip_high;
  const double bounded = log_ratio < -kLogRatioBound ? -kLogRatioBound
                         : log_ratio > kLogRatioBound ? kLogRatioBound
                                                      : log_ratio;
  const double ratio = std::exp(bounded);
  const bool saturated = std::fabs(log_ratio) > kLogRatioBound;
  const bool below = ratio < low;
  const bool above = ratio > high;
  const double clipped_ratio = below ? low : above ? high : ratio;

  PolicyTerms terms;
  terms.surrogate = std::max(-adv * ratio, -adv * clipped_ratio);
  const bool is_low = below && adv < 0.0;
  const bool is_high = above && adv > 0.0;
  const bool is_dual = adv < 0.0 && terms.surrogate > -settings.dual_clip * adv;
  if (is_dual) terms.surrogate = -settings.dual_clip * adv;
  if (!(is_low || is_high || is_dual || saturated)) terms.slope = -adv * ratio;
  terms.clipped = int8_t((is_low ? kClipLow : 0) | (is_high ? kClipHigh : 0) | (is_dual ? kClipDual : 0) |
                         (saturated ? kClipLogRatio : 0));
  if (reverse_adv == nullptr) return terms;

  const double gain = *reverse_adv;
  bool reverse_low = below;
  bool reverse_high = above;
  terms.reverse = -gain * clipped_ratio;
  if (settings.reverse_ppo) {
    terms.reverse = std::max(-gain * ratio, -gain * clipped_ratio);
    reverse_low = below && gain < 0.0;
    reverse_high = above && gain > 0.0;
  }
  if (!(reverse_low || reverse_high || saturated)) terms.reverse_slope = -gain * ratio;
  terms.clipped |= int8_t((reverse_low ? kClipReverseLow : 0) | (reverse_high ? kClipReverseHigh : 0));
  return terms;
}

}  // namespace smopd
