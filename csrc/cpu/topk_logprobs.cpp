// topk_logprobs on the CPU: log-softmax over the vocabulary, the kappa largest, the given tokens' values.
//
// Shapes: N rows, V vocabulary. One streaming pass over a row, in blocks that stay in the first-level
// cache: convert to float, block maximum, sum of exponentials (exponent.h), and, only where a block's maximum
// exceeds the kappa-th largest value so far, collection of the entries above it. Rows are independent and
// each is computed by one thread in one order: the result does not depend on the number of threads.
//
// Log-probabilities are x - logsumexp(x) in every case: NaN throughout a row that holds a NaN or nothing but
// -inf; in a row with +inf, NaN there and -inf elsewhere. In the order a NaN is above +inf, as in torch.topk.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "exponent.h"
#include "simd.h"
#include "topk.h"

namespace smopd {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

struct Arguments {
  const void* logits;
  int64_t stride;  // elements between rows
  int64_t vocab;
  int64_t kappa;
  const int64_t* token_ids;  // null when there are none
  double temperature;
  int64_t teachers;  // row n of this one goes to n * teachers + teacher
  int64_t teacher;
  int32_t* ids;
  float* logps;
  float* token_logp;
};

template <typename T>
SMOPD_INLINE void compute_row(
    const Arguments& a, int64_t n, Candidates& top, float* buffer, float* exponentials) {
  const T* row = static_cast<const T*>(a.logits) + n * a.stride;
  const Exponent exponent = exponent_at(0.0f, exponent_scale(a.temperature));
  float max = -kInf;
  double sum = 0.0;  // of exp((x - max) / T)
  bool has_nan = false;
  top.reset();

  for (int64_t start = 0; start < a.vocab; start += kBlockLength) {
    const int64_t length = std::min(kBlockLength, a.vocab - start);
    const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = 0; j < length; ++j) buffer[j] = to_float(row[start + j]);
    for (int64_t j = length; j < padded; ++j) buffer[j] = -kInf;

    float lane_max[kLanes];
    int32_t lane_nan[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) lane_max[l] = -kInf, lane_nan[l] = 0;
    for (int64_t j = 0; j < padded; j += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        const float x = buffer[j + l];
        lane_max[l] = x > lane_max[l] ? x : lane_max[l];
        lane_nan[l] |= x != x ? 1 : 0;
      }
    }
    float block_max = -kInf;
    float lowest_lane = kInf;
    for (int64_t l = 0; l < kLanes; ++l) {
      block_max = lane_max[l] > block_max ? lane_max[l] : block_max;
      lowest_lane = lane_max[l] < lowest_lane ? lane_max[l] : lowest_lane;
      has_nan |= lane_nan[l] != 0;
    }

    if (block_max > max) {
      sum *= std::exp2((double(max) - double(block_max)) * double(exponent.scale));
      max = block_max;
    }
    if (max == -kInf) continue;
    const bool more = start + 2 * kBlockLength <= a.vocab;
    const float* const ahead = more ? reinterpret_cast<const float*>(row + start + kBlockLength) : nullptr;
    // Less the maximum, so that a certain token's log-probability is exactly 0.
    for (int64_t j = 0; j < length; ++j) exponentials[j] = buffer[j] - max;
    sum += block_exponentials(exponentials, exponentials, length, exponent, ahead).sum;
    if (block_max > top.threshold) {
      if (start == 0) top.threshold = first_threshold(top, buffer, padded, lowest_lane, block_max);
      collect(top, row, buffer, start, padded);
    }
  }

  const bool undefined = has_nan || max == -kInf;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const double log2_sum = max < kInf ? std::log2(sum) : 0.0;
  const auto logp = [&](int64_t id) {
    const double log2_weight = (double(to_float(row[id])) - double(max)) * double(exponent.scale);
    return undefined ? nan : float(kLn2 * (log2_weight - log2_sum));
  };
  const int64_t out = n * a.teachers + a.teacher;
  if (a.token_ids != nullptr) a.token_logp[out] = logp(a.token_ids[n]);
  if (a.kappa == 0) return;
  if (has_nan || top.count < a.kappa) {
    collect_all(top, row, a.vocab);
  } else {
    prune(top);
  }
  for (int64_t s = 0; s < a.kappa; ++s) {
    const int64_t id = key_id(top.keys[s]);
    a.ids[out * a.kappa + s] = int32_t(id);
    a.logps[out * a.kappa + s] = logp(id);
  }
}

template <typename T>
SMOPD_INLINE void compute_rows(const Arguments& a, int64_t begin, int64_t end) {
  Candidates top(a.kappa);
  alignas(64) float buffer[kBlockLength];
  alignas(64) float exponentials[kBlockLength];
  for (int64_t n = begin; n < end; ++n) compute_row<T>(a, n, top, buffer, exponentials);
}

SMOPD_CLONES void rows_float(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<float>(a, begin, end);
}

SMOPD_CLONES void rows_bfloat16(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<BFloat16>(a, begin, end);
}

SMOPD_CLONES void rows_float16(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<Float16>(a, begin, end);
}

using RowsFunction = void (*)(const Arguments&, int64_t, int64_t);

RowsFunction rows_for(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return rows_float;
    case ScalarType::BFloat16: return rows_bfloat16;
    default: return rows_float16;
  }
}

using Results = std::tuple<Tensor, Tensor, Tensor>;

// The rows of M teachers, row n of teacher m at n M + m of the results; without `stacked` M is 1 and no axis.
Results topk_of(
    const char* op, const std::vector<Tensor>& teachers, bool stacked, int64_t kappa,
    const std::optional<Tensor>& token_ids, double temperature) {
  const auto n_teachers = int64_t(teachers.size());
  std::vector<Logits> inputs;
  for (const Tensor& teacher : teachers) inputs.push_back(read_logits(op, "logits", teacher));
  const Logits first = inputs[0];
  for (const Logits& input : inputs) {
    const bool fits = input.type == first.type && input.rows == first.rows && input.vocab == first.vocab;
    SMOPD_REQUIRE(op, fits, "the teachers' logits differ in shape or dtype");
  }
  const int64_t vocab = first.vocab;
  SMOPD_REQUIRE(op, kappa >= 0 && kappa <= vocab, "kappa is ", kappa, ", expected 0 to V = ", vocab);
  check_temperature(op, "temperature", temperature);

  std::vector<int64_t> tokens;
  if (token_ids.has_value()) tokens = read_token_ids(op, *token_ids, first.rows, vocab);
  std::vector<int64_t> shape{first.rows, kappa};
  std::vector<int64_t> picked{token_ids.has_value() ? first.rows : 0};
  if (stacked) shape.insert(shape.begin() + 1, n_teachers), picked.push_back(n_teachers);
  const auto device = teachers[0].device();
  Tensor ids = torch::stable::empty(shape, ScalarType::Int, std::nullopt, device);
  Tensor logps = torch::stable::empty(shape, ScalarType::Float, std::nullopt, device);
  Tensor token_logp = torch::stable::empty(picked, ScalarType::Float, std::nullopt, device);
  if (first.rows == 0) return {ids, logps, token_logp};

  std::vector<Arguments> arguments;
  for (int64_t m = 0; m < n_teachers; ++m) {
    arguments.push_back(
        {inputs[m].data,
         inputs[m].stride,
         vocab,
         kappa,
         token_ids.has_value() ? tokens.data() : nullptr,
         temperature,
         n_teachers,
         m,
         static_cast<int32_t*>(ids.data_ptr()),
         static_cast<float*>(logps.data_ptr()),
         static_cast<float*>(token_logp.data_ptr())});
  }
  const RowsFunction rows_of_type = rows_for(first.type);
  const int64_t grain = rows_per_thread(vocab);
  torch::stable::parallel_for(0, first.rows * n_teachers, grain, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < n_teachers; ++m) {  // its rows n with begin <= m N + n < end
      const int64_t start = std::max(begin - m * first.rows, int64_t(0));
      const int64_t stop = std::min(end - m * first.rows, first.rows);
      if (start < stop) rows_of_type(arguments[m], start, stop);
    }
  });
  return {ids, logps, token_logp};
}

// logits (N, V) float32, bfloat16 or float16, unit stride along V; token_ids (N,) int64 or int32, or none.
// Returns ids (N, kappa) int32, logps (N, kappa) float32, token_logp (N,) float32 or (0,) without token_ids.
Results topk_logprobs_cpu(
    const Tensor& logits, int64_t kappa, const std::optional<Tensor>& token_ids, double temperature) {
  return topk_of("topk_logprobs_cpu", {logits}, false, kappa, token_ids, temperature);
}

// The same of M teachers: (N, M, kappa), (N, M, kappa), (N, M) or (0, M).
Results topk_logprobs_teachers_cpu(
    const std::vector<Tensor>& logits, int64_t kappa, const std::optional<Tensor>& token_ids,
    double temperature) {
  return topk_of("topk_logprobs_teachers_cpu", logits, true, kappa, token_ids, temperature);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("topk_logprobs_cpu", TORCH_BOX(&topk_logprobs_cpu));
  m.impl("topk_logprobs_teachers_cpu", TORCH_BOX(&topk_logprobs_teachers_cpu));
}

}  // namespace smopd
