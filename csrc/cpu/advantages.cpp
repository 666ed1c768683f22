// Group advantages on the CPU: GRPO, GDPO and GD2PO, with the whitening of one process. Their definition is
// in kernels/reference/advantages.py; as there, everything is computed in double.
//
// A group is one thread's: its rewards are copied to a scratch of (responses, rewards). Every sum has one order,
// whatever the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "simd.h"

namespace smopd {
namespace {

constexpr double kEqualUlps = 8.0;         // EQUAL_ULPS of the reference
constexpr double kConflictFloor = 1e-8;    // CONFLICT_FLOOR
constexpr double kTokenVarEps = 1e-8;      // TOKEN_VAR_EPS
constexpr int64_t kElementsPerReward = 8;  // a reward costs about as much as so many logits
constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum Whitening : int64_t { kNoWhitening = 0, kResponses = 1, kTokens = 2 };

// The responses of each group, in their own order: members[starts[g]] to members[starts[g + 1] - 1].
struct Groups {
  std::vector<int64_t> starts;
  std::vector<int64_t> members;

  int64_t count() const { return int64_t(starts.size()) - 1; }
};

inline uint64_t mixed(uint64_t id) {  // the finaliser of splitmix64
  id = (id ^ (id >> 30)) * 0xbf58476d1ce4e5b9u;
  id = (id ^ (id >> 27)) * 0x94d049bb133111ebu;
  return id ^ (id >> 31);
}

Groups read_groups(const int64_t* ids, int64_t stride, int64_t n) {
  size_t slots = 8;
  while (slots < 2 * size_t(n)) slots *= 2;
  std::vector<int64_t> table(slots, -1);  // a group's number
  std::vector<int64_t> id_of;
  std::vector<int64_t> number(n);
  for (int64_t r = 0; r < n; ++r) {
    const int64_t id = ids[r * stride];
    if (r > 0 && id == ids[(r - 1) * stride]) {
      number[r] = number[r - 1];
      continue;
    }
    size_t at = mixed(uint64_t(id)) & (slots - 1);
    while (table[at] >= 0 && id_of[table[at]] != id) at = (at + 1) & (slots - 1);
    if (table[at] < 0) {
      table[at] = int64_t(id_of.size());
      id_of.push_back(id);
    }
    number[r] = table[at];
  }
  Groups groups{std::vector<int64_t>(id_of.size() + 1, 0), std::vector<int64_t>(n)};
  for (int64_t r = 0; r < n; ++r) ++groups.starts[number[r] + 1];
  for (size_t g = 0; g < id_of.size(); ++g) groups.starts[g + 1] += groups.starts[g];
  std::vector<int64_t> next(groups.starts.begin(), groups.starts.end() - 1);
  for (int64_t r = 0; r < n; ++r) groups.members[next[number[r]]++] = r;
  return groups;
}

struct Rewards {
  const void* data;
  ScalarType type;
  int64_t responses;
  int64_t rewards;
  int64_t stride_r;
  int64_t stride_k;
};

inline double to_double(double value) { return value; }

template <typename T>
inline double to_double(T value) {
  return to_float(value);
}

// values[i][k]: the rewards of member i.
template <typename T>
void copy_rewards(const Rewards& from, const int64_t* members, int64_t n, double* values) {
  const T* const data = static_cast<const T*>(from.data);
  for (int64_t i = 0; i < n; ++i) {
    const T* const row = data + members[i] * from.stride_r;
    double* const to = values + i * from.rewards;
    for (int64_t k = 0; k < from.rewards; ++k) to[k] = to_double(row[k * from.stride_k]);
  }
}

// In place, (n, K) to (n, 1): the weighted sum, and of what size its terms are.
void sum_rewards(double* values, double* sizes, int64_t n, const std::vector<double>& weights) {
  const int64_t rewards = int64_t(weights.size());
  for (int64_t i = 0; i < n; ++i) {
    double total = 0.0;
    double size = 0.0;
    for (int64_t k = 0; k < rewards; ++k) {
      if (weights[k] == 0.0) continue;  // plays no part, not even by being NaN
      const double term = weights[k] * values[i * rewards + k];
      total += term;
      size += std::abs(term);
    }
    values[i] = total;
    sizes[i] = size;
  }
}

// Of one group, by reward.
struct Moments {
  std::vector<double> count, mean, low, high, size, m2, scale, varied;

  explicit Moments(int64_t columns)
      : count(columns),
        mean(columns),
        low(columns),
        high(columns),
        size(columns),
        m2(columns),
        scale(columns),
        varied(columns) {}
};

// Each column of values (n, columns) becomes (value - mean) / (sigma + norm_eps) over what is not NaN; 0 for
// a NaN and where fewer than two or only equal values are known. sizes: null if they are the values' own.
SMOPD_CLONES void normalise(
    double* values, const double* sizes, int64_t n, int64_t columns, double norm_eps, double equal_within,
    Moments& moments) {
  double* const count = moments.count.data();
  double* const mean = moments.mean.data();
  double* const low = moments.low.data();
  double* const high = moments.high.data();
  double* const size = moments.size.data();
  double* const m2 = moments.m2.data();
  double* const scale = moments.scale.data();
  double* const varied = moments.varied.data();
  for (int64_t k = 0; k < columns; ++k) {
    count[k] = mean[k] = size[k] = m2[k] = 0.0;
    low[k] = kInfinity;
    high[k] = -kInfinity;
  }
  for (int64_t i = 0; i < n; ++i) {
    const double* const row = values + i * columns;
#pragma GCC ivdep
    for (int64_t k = 0; k < columns; ++k) {
      const double value = row[k];
      const bool known = value == value;
      const double of_size = known ? (sizes == nullptr ? std::abs(value) : sizes[i * columns + k]) : 0.0;
      count[k] += known ? 1.0 : 0.0;
      mean[k] += known ? value : 0.0;
      low[k] = value < low[k] ? value : low[k];
      high[k] = value > high[k] ? value : high[k];
      size[k] = of_size > size[k] ? of_size : size[k];
    }
  }
  for (int64_t k = 0; k < columns; ++k) mean[k] /= count[k] > 1.0 ? count[k] : 1.0;
  for (int64_t i = 0; i < n; ++i) {
    double* const row = values + i * columns;
#pragma GCC ivdep
    for (int64_t k = 0; k < columns; ++k) {
      const double centred = row[k] == row[k] ? row[k] - mean[k] : 0.0;
      row[k] = centred;
      m2[k] += centred * centred;
    }
  }
  for (int64_t k = 0; k < columns; ++k) {
    varied[k] = count[k] > 1.0 && high[k] - low[k] > equal_within * size[k] ? 1.0 : 0.0;
    scale[k] = std::sqrt(m2[k] / (count[k] > 2.0 ? count[k] - 1.0 : 1.0)) + norm_eps;
  }
  for (int64_t i = 0; i < n; ++i) {
    double* const row = values + i * columns;
#pragma GCC ivdep
    for (int64_t k = 0; k < columns; ++k) row[k] = varied[k] > 0.0 ? row[k] / scale[k] : 0.0;
  }
}

struct Settings {
  bool summed;  // GRPO
  bool drop;    // GD2PO
  std::optional<double> snr_threshold;
  double norm_eps;
  double equal_within;
};

// A response's weighted sum of its per-reward advantages; whether they conflict.
bool sum_advantages(
    const double* row, const std::vector<double>& weights, const Settings& settings, double& adv) {
  double total = 0.0;
  double size = 0.0;
  bool up = false;
  bool down = false;
  for (size_t k = 0; k < weights.size(); ++k) {
    const double part = row[k] * weights[k];
    const bool has_sign = std::abs(row[k]) > kConflictFloor;
    total += part;
    size += std::abs(part);
    up |= has_sign && part > 0.0;
    down |= has_sign && part < 0.0;
  }
  adv = total;
  if (!settings.drop || !up || !down) return false;
  return !settings.snr_threshold.has_value() ||
         std::abs(total) / (size + settings.norm_eps) < *settings.snr_threshold;
}

// Working memory of one thread.
struct Scratch {
  std::vector<double> values;
  std::vector<double> sizes;
  Moments moments;

  explicit Scratch(int64_t columns) : moments(columns) {}
};

void group_advantages(
    const Rewards& rewards, const std::vector<double>& weights, const Settings& settings,
    const int64_t* members, int64_t n, Scratch& scratch, double* adv, bool* kept) {
  if (int64_t(scratch.values.size()) < n * std::max<int64_t>(rewards.rewards, 1)) {
    scratch.values.resize(n * std::max<int64_t>(rewards.rewards, 1));
    scratch.sizes.resize(n);
  }
  double* const values = scratch.values.data();
  switch (rewards.type) {
    case ScalarType::Double: copy_rewards<double>(rewards, members, n, values); break;
    case ScalarType::Float: copy_rewards<float>(rewards, members, n, values); break;
    case ScalarType::BFloat16: copy_rewards<BFloat16>(rewards, members, n, values); break;
    default: copy_rewards<Float16>(rewards, members, n, values);
  }
  if (settings.summed) {
    sum_rewards(values, scratch.sizes.data(), n, weights);
    const double* const sizes = scratch.sizes.data();
    normalise(values, sizes, n, 1, settings.norm_eps, settings.equal_within, scratch.moments);
    for (int64_t i = 0; i < n; ++i) adv[members[i]] = values[i];
    return;
  }
  const int64_t columns = rewards.rewards;
  normalise(values, nullptr, n, columns, settings.norm_eps, settings.equal_within, scratch.moments);
  int64_t n_kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool dropped = sum_advantages(values + i * columns, weights, settings, adv[members[i]]);
    n_kept += dropped ? 0 : 1;
    if (settings.drop) kept[members[i]] = !dropped;
  }
  if (!settings.drop) return;
  const double share = double(n_kept) / double(n);
  for (int64_t i = 0; i < n; ++i) {
    double& value = adv[members[i]];
    value = kept[members[i]] ? value * share : 0.0;
  }
}

// In place. counts: how many samples each advantage stands for.
SMOPD_CLONES void whiten_all(double* adv, const double* counts, int64_t n, bool tokens, double norm_eps) {
  double count = 0.0;
  double total = 0.0;
  double m2 = 0.0;
  for (int64_t r = 0; r < n; ++r) {
    count += counts[r];
    total += counts[r] * adv[r];
  }
  const double mean = total / (count > 1.0 ? count : 1.0);
  for (int64_t r = 0; r < n; ++r) m2 += counts[r] * ((adv[r] - mean) * (adv[r] - mean));
  const double variance = m2 / (count > 2.0 ? count - 1.0 : 1.0);
  const double sigma = std::sqrt(variance) + norm_eps;
  const double scale = tokens ? std::sqrt(variance + kTokenVarEps) : sigma > 0.0 ? sigma : 1.0;
  const bool any = count > 1.0;
  for (int64_t r = 0; r < n; ++r) adv[r] = any && counts[r] > 0.0 ? (adv[r] - mean) / scale : 0.0;
}

// (K,) or (R,) float64, or ones.
std::vector<double> read_doubles(
    const char* op, const char* name, const std::optional<Tensor>& t, int64_t n) {
  std::vector<double> values(n, 1.0);
  if (!t.has_value()) return values;
  SMOPD_REQUIRE(op, t->is_cpu() && t->dim() == 1 && t->size(0) == n, name,
                " has to be a CPU tensor of shape (", n, ",)");
  SMOPD_REQUIRE(op, t->scalar_type() == ScalarType::Double, name, " is not float64");
  const double* const data = static_cast<const double*>(t->data_ptr());
  for (int64_t i = 0; i < n; ++i) values[i] = data[i * t->stride(0)];
  return values;
}

// rewards (R, K), group (R,). Returns adv (R,), float64 for float64 rewards or if `wide`, and kept (R,) if
// `drop`.
std::tuple<Tensor, Tensor> advantages_cpu(
    const Tensor& rewards, const Tensor& group, const std::optional<Tensor>& weights,
    const std::optional<Tensor>& lengths, bool summed, bool drop, std::optional<double> snr_threshold,
    int64_t whitening, double norm_eps, bool wide) {
  const char* op = "advantages_cpu";
  const ScalarType type = rewards.scalar_type();
  const bool half = type == ScalarType::BFloat16 || type == ScalarType::Half;
  SMOPD_REQUIRE(op, half || type == ScalarType::Double || type == ScalarType::Float,
                "rewards is not float64, float32, bfloat16 or float16");
  SMOPD_REQUIRE(op, rewards.is_cpu() && rewards.dim() == 2,
                "rewards has to be a CPU tensor of shape (R, K)");
  const Rewards given{rewards.data_ptr(), type, rewards.size(0), rewards.size(1), rewards.stride(0),
                      rewards.stride(1)};
  const int64_t n = given.responses;
  SMOPD_REQUIRE(op, group.is_cpu() && group.dim() == 1 && group.size(0) == n,
                "group has to be a CPU tensor of shape (R,) = (", n, ",)");
  SMOPD_REQUIRE(op, group.scalar_type() == ScalarType::Long, "group is not int64");
  const std::vector<double> weights_K = read_doubles(op, "weights", weights, given.rewards);
  std::vector<double> counts = read_doubles(op, "lengths", lengths, n);
  const double ulp = type == ScalarType::Double ? std::numeric_limits<double>::epsilon()
                                                : double(std::numeric_limits<float>::epsilon());
  const Settings settings{summed, drop, snr_threshold, norm_eps, kEqualUlps * ulp};

  wide = wide || type == ScalarType::Double;
  const auto like = rewards.device();
  Tensor out = torch::stable::empty({n}, wide ? ScalarType::Double : ScalarType::Float, std::nullopt, like);
  Tensor kept = torch::stable::empty({drop ? n : 0}, ScalarType::Bool, std::nullopt, like);
  bool* const kept_R = static_cast<bool*>(kept.data_ptr());
  const Groups groups = read_groups(static_cast<const int64_t*>(group.data_ptr()), group.stride(0), n);
  std::vector<double> adv(n);
  const int64_t group_elements = n * given.rewards / std::max<int64_t>(1, groups.count());
  const int64_t grain = rows_per_thread(kElementsPerReward * group_elements);
  torch::stable::parallel_for(0, groups.count(), grain, [&](int64_t begin, int64_t end) {
    Scratch scratch(std::max<int64_t>(given.rewards, 1));
    for (int64_t g = begin; g < end; ++g) {
      const int64_t start = groups.starts[g];
      const int64_t* const members = groups.members.data() + start;
      const int64_t size = groups.starts[g + 1] - start;
      group_advantages(given, weights_K, settings, members, size, scratch, adv.data(), kept_R);
    }
  });
  if (whitening != kNoWhitening) {
    for (int64_t r = 0; r < n && drop; ++r) counts[r] = kept_R[r] ? counts[r] : 0.0;
    whiten_all(adv.data(), counts.data(), n, whitening == kTokens, norm_eps);
  }
  if (wide) {
    std::copy(adv.begin(), adv.end(), static_cast<double*>(out.data_ptr()));
  } else {
    float* const to = static_cast<float*>(out.data_ptr());
    for (int64_t r = 0; r < n; ++r) to[r] = float(adv[r]);
  }
  return {out, kept};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("advantages_cpu", TORCH_BOX(&advantages_cpu));
}

}  // namespace smopd
