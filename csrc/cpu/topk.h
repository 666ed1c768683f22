// Finds exactly the kappa largest entries of a stream of blocks. Ties go to the lower id.
//
// A key combines a value and its id in an integer. Keys above a threshold are appended. A full buffer is cut
// to the kappa largest, whose least becomes the threshold. Ids ascend, so later equal values are not kept.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "exponent.h"

namespace smopd {

constexpr int64_t kLanes = 32;       // values compared at a time, one per bit of a mask
constexpr int64_t kMaxRanked = 192;  // for more keys, sorting is faster than counting the larger ones
constexpr int32_t kBisections = 8;   // steps to find the first threshold of a row
constexpr float kInf = std::numeric_limits<float>::infinity();

// Larger values have larger keys, and so do lower ids of equal values. -0 equals +0; NaN is above +inf.
SMOPD_INLINE int64_t make_key(float value, int64_t id) {
  const uint32_t bits = float_to_bits(value);
  const int32_t magnitude = int32_t(bits & 0x7fffffffu);
  const int32_t number = bits >> 31 ? -magnitude : magnitude;
  const int32_t order = value != value ? std::numeric_limits<int32_t>::max() : number;
  return int64_t((uint64_t(uint32_t(order)) << 32) | uint32_t(~uint32_t(id)));
}

SMOPD_INLINE int64_t key_id(int64_t key) { return int64_t(uint32_t(~uint32_t(uint64_t(key)))); }

// Returns a key's value without the sign of -0 or the payload of a NaN.
SMOPD_INLINE float key_value(int64_t key) {
  const int32_t order = int32_t(key >> 32);
  return bits_to_float(order < 0 ? 0x80000000u | uint32_t(-order) : uint32_t(order));
}

// The largest keys so far. Once there are `capacity` keys, they are cut to the kappa largest.
struct Candidates {
  int64_t kappa;
  int64_t capacity;
  int64_t count = 0;
  float threshold = -kInf;  // only larger values can still enter
  int64_t* keys = nullptr;  // room for key_slots(kappa)
  std::vector<int64_t> sorted;

  explicit Candidates(int64_t kappa_in)
      : kappa(kappa_in), capacity(2 * kappa_in + kLanes), sorted(kappa_in) {}
};

inline int64_t key_slots(int64_t kappa) { return 2 * kappa + 2 * kLanes; }
inline float lowest_threshold(int64_t kappa) { return kappa > 0 ? -kInf : kInf; }

// Moves the kappa largest keys to the front, in descending order. Needs count >= kappa >= 1.
SMOPD_INLINE void prune(Candidates& top) {
  if (top.count > kMaxRanked) {
    std::nth_element(top.keys, top.keys + (top.kappa - 1), top.keys + top.count, std::greater<int64_t>());
    std::sort(top.keys, top.keys + top.kappa, std::greater<int64_t>());
  } else {
    // A key's place is the number of larger keys. This avoids mispredicted branches.
    const int64_t* keys = top.keys;
    for (int64_t i = 0; i < top.count; ++i) {
      int64_t place = 0;
      for (int64_t j = 0; j < top.count; ++j) place += keys[j] > keys[i] ? 1 : 0;
      if (place < top.kappa) top.sorted[place] = keys[i];
    }
    std::copy(top.sorted.begin(), top.sorted.end(), top.keys);
  }
  top.count = top.kappa;
}

// Finds by bisection a threshold that at least kappa entries of the block exceed, but few more. Without it,
// the first block of a row would collect nearly everything.
SMOPD_INLINE float first_threshold(
    const Candidates& top, const float* block, int64_t padded, float lowest_lane, float highest) {
  float below = -kInf;
  if (!(lowest_lane > -kInf) || !(highest < kInf)) return below;
  float low = lowest_lane;  // kLanes entries are at least as large
  if (top.kappa >= kLanes) {
    for (int64_t j = 0; j < padded; ++j) {
      const float finite = block[j] > -kInf ? block[j] : kInf;
      low = finite < low ? finite : low;
    }
  }
  float high = highest;
  for (int32_t step = 0; step < kBisections; ++step) {
    const float middle = low + 0.5f * (high - low);
    int32_t larger = 0;
    for (int64_t j = 0; j < padded; ++j) larger += block[j] > middle ? 1 : 0;
    if (larger < top.kappa) {
      high = middle;
    } else {
      below = low = middle;
      if (larger <= top.capacity / 2) break;
    }
  }
  return below;
}

// Appends the block's entries above the threshold. Padding is -inf. `first` is the id of the first entry.
SMOPD_INLINE void collect(Candidates& top, const float* block, int64_t first, int64_t padded) {
  for (int64_t j = 0; j < padded; j += kLanes) {
    uint32_t hits = 0;
    for (int64_t l = 0; l < kLanes; ++l) hits |= block[j + l] > top.threshold ? uint32_t(1) << l : 0u;
    for (; hits != 0; hits &= hits - 1) {
      const int64_t l = __builtin_ctz(hits);
      top.keys[top.count++] = make_key(block[j + l], first + j + l);
    }
    if (top.count >= top.capacity) {
      prune(top);
      top.threshold = key_value(top.keys[top.kappa - 1]);
    }
  }
}

// Collects the kappa largest entries of a row with a NaN or with fewer than kappa entries above -inf.
template <typename T>
void collect_all(Candidates& top, const T* row, int64_t vocab) {
  std::vector<int64_t> keys(vocab);
  for (int64_t v = 0; v < vocab; ++v) keys[v] = make_key(to_float(row[v]), v);
  std::partial_sort(keys.begin(), keys.begin() + top.kappa, keys.end(), std::greater<int64_t>());
  std::copy(keys.begin(), keys.begin() + top.kappa, top.keys);
}

// State of a row after some of its blocks. One pass over blocks in the L1 cache converts to float, takes the
// maximum and sums exponentials. It collects entries if the maximum exceeds the threshold.
struct TopKRow {
  double sum = 0.0;  // of exp((x - max) / T)
  float max = -kInf;
  float token = 0.0f;  // the given token's logit
  float threshold;
  int32_t count = 0;
  bool has_nan = false;

  explicit TopKRow(int64_t kappa) : threshold(lowest_threshold(kappa)) {}
};

// Values of a block in float, padded with -inf to full lanes, and the extremes of the lanes' maxima.
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

// Adds the elements first, first + 1, ... of a row. `first` is a multiple of kBlockLength.
template <typename T>
SMOPD_INLINE void add_piece(
    TopKRow& row, Candidates& top, const T* piece, int64_t first, int64_t n_elements, const Exponent& exponent,
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
    // Subtract the maximum first, so that a token with probability 1 has log-probability exactly 0. A NaN
    // makes the sum NaN. If the maximum is infinite, nothing is summed, so search for a NaN.
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

// Whether the collection has the kappa largest entries. If not, use collect_all.
inline bool is_collected(const TopKRow& row, int64_t kappa) {
  return kappa == 0 || (!row.has_nan && row.count >= kappa);
}

struct Outputs {
  int32_t* ids;
  float* logps;
  float* token_logp;
};

// `top` has the kappa largest keys in order. `out` is the index of the row's results.
inline void write_row(
    const TopKRow& row, const Candidates& top, double scale, bool has_token, int64_t out, const Outputs& to) {
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
