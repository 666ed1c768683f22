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

constexpr const char* kOp = "topk_logprobs_cpu";
constexpr double kLn2 = 0.69314718055994530942;

struct Arguments {
  const void* logits;
  int64_t stride;  // elements between rows
  int64_t vocab;
  int64_t kappa;
  const int64_t* token_ids;  // null when there are none
  double temperature;
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
  if (a.token_ids != nullptr) a.token_logp[n] = logp(a.token_ids[n]);
  if (a.kappa == 0) return;
  if (has_nan || top.count < a.kappa) {
    collect_all(top, row, a.vocab);
  } else {
    prune(top);
  }
  for (int64_t s = 0; s < a.kappa; ++s) {
    const int64_t id = key_id(top.keys[s]);
    a.ids[n * a.kappa + s] = int32_t(id);
    a.logps[n * a.kappa + s] = logp(id);
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

// logits (N, V) float32, bfloat16 or float16, unit stride along V; token_ids (N,) int64 or int32, or none.
// Returns ids (N, kappa) int32, logps (N, kappa) float32, token_logp (N,) float32 or (0,) without token_ids.
std::tuple<Tensor, Tensor, Tensor> topk_logprobs_cpu(
    const Tensor& logits, int64_t kappa, const std::optional<Tensor>& token_ids, double temperature) {
  const Logits input = read_logits(kOp, "logits", logits);
  const int64_t rows = input.rows;
  const int64_t vocab = input.vocab;
  SMOPD_REQUIRE(kOp, kappa >= 0 && kappa <= vocab, "kappa is ", kappa, ", expected 0 to V = ", vocab);
  check_temperature(kOp, "temperature", temperature);

  std::vector<int64_t> tokens;
  if (token_ids.has_value()) tokens = read_token_ids(kOp, *token_ids, rows, vocab);
  const int64_t picked = token_ids.has_value() ? rows : 0;
  const auto device = logits.device();
  Tensor ids = torch::stable::empty({rows, kappa}, ScalarType::Int, std::nullopt, device);
  Tensor logps = torch::stable::empty({rows, kappa}, ScalarType::Float, std::nullopt, device);
  Tensor token_logp = torch::stable::empty({picked}, ScalarType::Float, std::nullopt, device);
  if (rows == 0) return {ids, logps, token_logp};

  const Arguments arguments{
      input.data,
      input.stride,
      vocab,
      kappa,
      token_ids.has_value() ? tokens.data() : nullptr,
      temperature,
      static_cast<int32_t*>(ids.data_ptr()),
      static_cast<float*>(logps.data_ptr()),
      static_cast<float*>(token_logp.data_ptr())};
  const RowsFunction rows_of_type = rows_for(input.type);
  torch::stable::parallel_for(0, rows, rows_per_thread(vocab), [&](int64_t begin, int64_t end) {
    rows_of_type(arguments, begin, end);
  });
  return {ids, logps, token_logp};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("topk_logprobs_cpu", TORCH_BOX(&topk_logprobs_cpu));
}

}  // namespace smopd
