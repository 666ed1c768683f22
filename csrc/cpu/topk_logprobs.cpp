// topk_logprobs on the CPU: log-softmax over the vocabulary, the kappa largest, the given tokens' values.
//
// Shapes: N rows, V vocabulary. One streaming pass over a row, in blocks that stay in the first-level
// cache: convert to float, block maximum, sum of exponentials, and, only where a block's maximum exceeds
// the kappa-th largest value so far, collection of the entries above it. Rows are independent and each is
// computed by one thread in one order: the result does not depend on the number of threads.
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
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "simd.h"
#include "topk.h"

namespace smopd {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 2048;   // floats; 8 KiB, a quarter of the smallest common first-level cache
constexpr int64_t kGrain = 32768; // elements that are worth a thread
constexpr float kLog2E = 1.44269504088896340736f;

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
SMOPD_INLINE void compute_row(const Arguments& a, int64_t n, Candidates& top, float* buffer) {
  const T* row = static_cast<const T*>(a.logits) + n * a.stride;
  const float scale = float(double(kLog2E) / a.temperature);
  float max = -kInf;
  double sum = 0.0;
  bool has_nan = false;
  top.reset();

  for (int64_t start = 0; start < a.vocab; start += kBlock) {
    const int64_t length = std::min(kBlock, a.vocab - start);
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
      sum *= std::exp((double(max) - double(block_max)) / a.temperature);
      max = block_max;
    }
    if (max == -kInf) continue;
    float lane_sum[kLanes] = {};  // short sums: a block of equal entries would round the same way each time
    for (int64_t j = 0; j < padded; j += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lane_sum[l] += exp2_nonpositive((buffer[j + l] - max) * scale);
    }
    for (int64_t l = 0; l < kLanes; ++l) sum += double(lane_sum[l]);
    if (block_max > top.threshold) {
      if (start == 0) top.threshold = first_threshold(top, buffer, padded, lowest_lane, block_max);
      collect(top, row, buffer, start, padded);
    }
  }

  const bool undefined = has_nan || max == -kInf;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float log_sum = max < kInf ? float(std::log(sum)) : 0.0f;
  const float temperature = float(a.temperature);
  const auto logp = [&](int64_t id) {
    return undefined ? nan : (to_float(row[id]) - max) / temperature - log_sum;
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
  alignas(64) float buffer[kBlock];
  for (int64_t n = begin; n < end; ++n) compute_row<T>(a, n, top, buffer);
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
    case ScalarType::Half: return rows_float16;
    default: return nullptr;
  }
}

#define SMOPD_CHECK(condition, ...) STD_TORCH_CHECK(condition, "topk_logprobs_cpu: ", __VA_ARGS__)

std::vector<int64_t> read_token_ids(const Tensor& ids, int64_t rows, int64_t vocab) {
  SMOPD_CHECK(ids.is_cpu() && ids.dim() == 1 && ids.size(0) == rows,
              "token_ids has to be a CPU tensor of shape (N,) = (", rows, ",)");
  const bool wide = ids.scalar_type() == ScalarType::Long;
  SMOPD_CHECK(wide || ids.scalar_type() == ScalarType::Int, "token_ids is neither int64 nor int32");
  std::vector<int64_t> tokens(rows);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t place = n * ids.stride(0);
    tokens[n] = wide ? static_cast<const int64_t*>(ids.data_ptr())[place]
                     : static_cast<const int32_t*>(ids.data_ptr())[place];
    SMOPD_CHECK(tokens[n] >= 0 && tokens[n] < vocab, "token_ids[", n, "] is ", tokens[n],
                ", expected 0 to V - 1 = ", vocab - 1);
  }
  return tokens;
}

// logits (N, V) float32, bfloat16 or float16, unit stride along V; token_ids (N,) int64 or int32, or none.
// Returns ids (N, kappa) int32, logps (N, kappa) float32, token_logp (N,) float32 or (0,) without token_ids.
std::tuple<Tensor, Tensor, Tensor> topk_logprobs_cpu(
    const Tensor& logits, int64_t kappa, const std::optional<Tensor>& token_ids, double temperature) {
  SMOPD_CHECK(logits.is_cpu(), "logits is not on the CPU");
  SMOPD_CHECK(logits.dim() == 2, "logits has ", logits.dim(), " dimensions, expected (N, V)");
  const int64_t rows = logits.size(0);
  const int64_t vocab = logits.size(1);
  const RowsFunction rows_of_type = rows_for(logits.scalar_type());
  SMOPD_CHECK(rows_of_type != nullptr, "logits is not float32, bfloat16 or float16");
  SMOPD_CHECK(vocab <= 1 || logits.stride(1) == 1, "logits has stride ", logits.stride(1),
              " along V, expected 1");
  SMOPD_CHECK(vocab < int64_t(1) << 31, "V is ", vocab, ", expected less than 2^31");
  SMOPD_CHECK(kappa >= 0 && kappa <= vocab, "kappa is ", kappa, ", expected 0 to V = ", vocab);
  SMOPD_CHECK(temperature > 0.0 && std::isnormal(float(temperature)), "temperature is ", temperature,
              ", expected a positive number");

  std::vector<int64_t> tokens;
  if (token_ids.has_value()) tokens = read_token_ids(*token_ids, rows, vocab);
  const int64_t picked = token_ids.has_value() ? rows : 0;
  const auto device = logits.device();
  Tensor ids = torch::stable::empty({rows, kappa}, ScalarType::Int, std::nullopt, device);
  Tensor logps = torch::stable::empty({rows, kappa}, ScalarType::Float, std::nullopt, device);
  Tensor token_logp = torch::stable::empty({picked}, ScalarType::Float, std::nullopt, device);
  if (rows == 0) return {ids, logps, token_logp};

  const Arguments arguments{
      logits.data_ptr(),
      logits.stride(0),
      vocab,
      kappa,
      token_ids.has_value() ? tokens.data() : nullptr,
      temperature,
      static_cast<int32_t*>(ids.data_ptr()),
      static_cast<float*>(logps.data_ptr()),
      static_cast<float*>(token_logp.data_ptr())};
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, vocab));
  torch::stable::parallel_for(
      0, rows, grain, [&](int64_t begin, int64_t end) { rows_of_type(arguments, begin, end); });
  return {ids, logps, token_logp};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("topk_logprobs_cpu", TORCH_BOX(&topk_logprobs_cpu));
}

}  // namespace smopd
