// A row of top-kappa and log-sum-exp, taken in by blocks: at once, or by pieces as a linear head makes them.
//
// One streaming pass, in blocks that stay in the first-level cache: convert to float, block maximum, sum of
// exponentials (exponent.h), and, only where a block's maximum exceeds the kappa-th largest value so far,
// collection of the entries above it (topk.h).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "exponent.h"
#include "simd.h"
#include "topk.h"

namespace smopd {

constexpr double kLn2 = 0.69314718055994530942;

// What is known of a row after some of its blocks.
struct Row {
  double sum = 0.0;  // of exp((x - max) / T)
  float max = -kInf;
  float token = 0.0f;  // the given token's logit
  float threshold;
  int32_t count = 0;
  bool has_nan = false;

  explicit Row(int64_t kappa) : threshold(lowest_threshold(kappa)) {}
};

// A block's values, converted and padded with -inf to full lanes, and the maximum of each lane.
struct Block {
  alignas(64) float copy[kBlockLength];
  const float* values;
  float max;
  float lowest_lane;
};

template <typename T>
SMOPD_INLINE void read_block(Block& block, const T* x, int64_t length) {
  const int64_t whole = length / kLanes * kLanes;
  float lane_max[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lane_max[l] = -kInf;
  constexpr bool kAsItIs = std::is_same_v<T, float>;
  block.values = kAsItIs && whole == length ? reinterpret_cast<const float*>(x) : block.copy;
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const float value = to_float(x[j + l]);
      if (!kAsItIs) block.copy[j + l] = value;
      lane_max[l] = value > lane_max[l] ? value : lane_max[l];
    }
  }
  if (whole < length) {
    for (int64_t j = kAsItIs ? 0 : whole; j < length; ++j) block.copy[j] = to_float(x[j]);
    for (int64_t j = length; j < whole + kLanes; ++j) block.copy[j] = -kInf;
    for (int64_t l = 0; l < kLanes; ++l) {
      const float value = block.copy[whole + l];
      lane_max[l] = value > lane_max[l] ? value : lane_max[l];
    }
  }
  block.max = -kInf;
  block.lowest_lane = kInf;
  for (int64_t l = 0; l < kLanes; ++l) {
    block.max = lane_max[l] > block.max ? lane_max[l] : block.max;
    block.lowest_lane = lane_max[l] < block.lowest_lane ? lane_max[l] : block.lowest_lane;
  }
}

// Takes in the elements first, first + 1, ... of a row; `first` is a multiple of kBlockLength.
template <typename T>
SMOPD_INLINE void add_piece(
    Row& row, Candidates& top, const T* piece, int64_t first, int64_t n_elements, const Exponent& exponent,
    Block& block) {
  float max = row.max;
  double sum = row.sum;
  bool has_nan = row.has_nan;
  top.count = row.count;
  top.threshold = row.threshold;

  for (int64_t start = 0; start < n_elements; start += kBlockLength) {
    const int64_t length = std::min(kBlockLength, n_elements - start);
    read_block(block, piece + start, length);
    if (block.max > max) {
      sum *= std::exp2((double(max) - double(block.max)) * double(exponent.scale));
      max = block.max;
    }
    // Less the maximum, so that a certain token's log-probability is exactly 0. A NaN reaches the sum; beside
    // an infinity, or in a row of nothing above -inf so far, it is looked for.
    if (max > -kInf && max < kInf) {
      const bool more = start + 2 * kBlockLength <= n_elements;
      const double added =
          block_sum(block.values, length, max, exponent, more ? piece + start + kBlockLength : nullptr);
      sum += added;
      has_nan |= added != added;
    } else {
      for (int64_t j = 0; j < length; ++j) has_nan |= block.values[j] != block.values[j];
    }
    if (block.max > top.threshold) {
      const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
      if (first + start == 0) {
        top.threshold = first_threshold(top, block.values, padded, block.lowest_lane, block.max);
      }
      collect(top, block.values, first + start, padded);
    }
  }
  row.max = max;
  row.sum = sum;
  row.has_nan = has_nan;
  row.count = int32_t(top.count);
  row.threshold = top.threshold;
}

// Whether the collection has the kappa largest; else they have to be found among all (collect_all).
inline bool is_collected(const Row& row, int64_t kappa) {
  return kappa == 0 || (!row.has_nan && row.count >= kappa);
}

struct Outputs {
  int32_t* ids;
  float* logps;
  float* token_logp;
};

// top: the kappa largest in order. out: the place of the row's results.
inline void write_row(
    const Row& row, const Candidates& top, double scale, bool has_token, int64_t out, const Outputs& to) {
  const bool undefined = row.has_nan || row.max == -kInf;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const double log2_sum = row.max < kInf ? std::log2(row.sum) : 0.0;
  const auto logp = [&](float value) {
    const double log2_weight = (double(value) - double(row.max)) * scale;
    return undefined ? nan : float(kLn2 * (log2_weight - log2_sum));
  };
  if (has_token) to.token_logp[out] = logp(row.token);
  for (int64_t s = 0; s < top.kappa; ++s) {
    to.ids[out * top.kappa + s] = int32_t(key_id(top.keys[s]));
    to.logps[out * top.kappa + s] = logp(key_value(top.keys[s]));
  }
}

}  // namespace smopd
