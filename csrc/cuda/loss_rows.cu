// smopd::loss_rows_cuda: the operator around the kernel of loss_rows.h, for GPUs of compute capability 9.0.
// Never run on a GPU so far: see loss_rows.h.

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "hopper.cuh"

namespace smopd::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr size_t kRingBytes = size_t(Hopper::kRing) * Geometry<Hopper>::kChunkVectors * sizeof(Words);
constexpr size_t kSharedBytes = kRingBytes + sizeof(Shared<Hopper>);
static_assert(kSharedBytes <= 227 * 1024, "more than a block of sm_90 can have");
static_assert(Hopper::kThreads > kMaxSupport);

template <bool kTwo, bool kEntropyGradient>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(Hopper::kThreads, 1)
    loss_rows_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) unsigned char memory[];
  Hopper machine;
  Words* ring = reinterpret_cast<Words*>(memory);
  Shared<Hopper>& shared = *reinterpret_cast<Shared<Hopper>*>(memory + kRingBytes);
  loss_rows_block<Hopper, kTwo, kEntropyGradient>(machine, arguments, shared, ring);
}

#define SMOPD_CHECK(condition, ...) STD_TORCH_CHECK(condition, "loss_rows_cuda: ", __VA_ARGS__)

void check_cuda(cudaError_t error, const char* what) {
  SMOPD_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

template <bool kTwo, bool kEntropyGradient>
void launch(const Arguments& arguments, int32_t clusters, cudaStream_t stream) {
  const auto kernel = &loss_rows_kernel<kTwo, kEntropyGradient>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes)),
             "asking for shared memory");
  kernel<<<unsigned(clusters * kBlocks), Hopper::kThreads, kSharedBytes, stream>>>(arguments);
  check_cuda(cudaGetLastError(), "the launch");
}

// (N,) or (N, S), contiguous, on the logits' device.
template <typename T>
const T* read(const Tensor& tensor, const Tensor& logits, ScalarType type, const char* name) {
  SMOPD_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() &&
                  tensor.get_device_index() == logits.get_device_index() && tensor.is_cuda() &&
                  tensor.dim() >= 1 && tensor.size(0) == logits.size(0),
              name, " is not a contiguous (N, ...) tensor of its dtype on the logits' device");
  return static_cast<const T*>(tensor.data_ptr());
}

const float* read_column(const std::optional<Tensor>& column, const Tensor& logits, const char* name) {
  return column.has_value() ? read<float>(*column, logits, ScalarType::Float, name) : nullptr;
}

// logits (N, V) bf16, unit stride along V; ids int32; everything else fp32, contiguous. grad: None, a buffer
// like the logits, or the logits. Returns TokenTerms' columns (N,): fp32, clipped int8.
using Columns = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Columns loss_rows_cuda(
    const Tensor& logits, const Tensor& token_ids, const Tensor& adv, const Tensor& pg_weight,
    const std::optional<Tensor>& old_logp, const std::optional<Tensor>& kl_weight,
    const std::optional<Tensor>& ent_weight, const std::optional<Tensor>& target_ids,
    const std::optional<Tensor>& target_logps, const std::optional<Tensor>& reverse_adv,
    const std::optional<Tensor>& reverse_weight, double clip_low, double clip_high,
    std::optional<double> dual_clip, double opd_coef, double entropy_coef, bool tail, double temperature,
    double kl_temperature, bool ppo, const std::optional<Tensor>& grad) {
  SMOPD_CHECK(logits.is_cuda() && logits.dim() == 2 && logits.scalar_type() == ScalarType::BFloat16,
              "logits is not a CUDA tensor (N, V) of bfloat16");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  SMOPD_CHECK(vocab >= 1 && vocab <= Geometry<Hopper>::capacity(), "V is ", vocab, ", expected 1 to ",
              Geometry<Hopper>::capacity());
  SMOPD_CHECK(vocab == 1 || logits.stride(1) == 1, "logits has stride ", logits.stride(1), " along V, expected 1");
  const int32_t chunks = chunks_of(int32_t(vocab), Geometry<Hopper>::kChunkVectors);
  SMOPD_CHECK(rows * chunks < int64_t(1) << 30, "N is ", rows, ", expected less than ", (int64_t(1) << 30) / chunks);
  SMOPD_CHECK(temperature > 0.0 && kl_temperature > 0.0, "a temperature is not above 0");
  SMOPD_CHECK(target_ids.has_value() == target_logps.has_value(), "a target is ids and log-probabilities, or none");

  Arguments a{};
  a.logits = static_cast<const uint16_t*>(logits.data_ptr());
  a.logits_stride = logits.stride(0);
  a.rows = int32_t(rows);
  a.vocab = int32_t(vocab);
  a.token_ids = read<int32_t>(token_ids, logits, ScalarType::Int, "token_ids");
  if (target_ids.has_value()) {
    a.target_ids = read<int32_t>(*target_ids, logits, ScalarType::Int, "target_ids");
    a.target_logps = read<float>(*target_logps, logits, ScalarType::Float, "target_logps");
    SMOPD_CHECK(target_ids->dim() == 2 && target_logps->dim() == 2 && target_ids->size(1) == target_logps->size(1) &&
                    target_ids->size(1) <= kMaxSupport,
                "target_ids and target_logps are not (N, S) with S of at most ", kMaxSupport);
    a.support = int32_t(target_ids->size(1));
  }
  a.columns[kAdv] = read_column(adv, logits, "adv");
  a.columns[kPgWeight] = read_column(pg_weight, logits, "pg_weight");
  a.columns[kOldLogp] = read_column(old_logp, logits, "old_logp");
  a.columns[kKlWeight] = read_column(kl_weight, logits, "kl_weight");
  a.columns[kEntWeight] = read_column(ent_weight, logits, "ent_weight");
  a.columns[kReverseAdv] = read_column(reverse_adv, logits, "reverse_adv");
  a.columns[kReverseWeight] = read_column(reverse_weight, logits, "reverse_weight");
  if (grad.has_value()) {
    SMOPD_CHECK(grad->is_cuda() && grad->get_device_index() == logits.get_device_index() && grad->dim() == 2 &&
                    grad->scalar_type() == ScalarType::BFloat16 && grad->size(0) == rows && grad->size(1) == vocab &&
                    (vocab == 1 || grad->stride(1) == 1),
                "grad is not like the logits");
    a.grad = static_cast<uint16_t*>(grad->data_ptr());
    a.grad_stride = grad->stride(0);
  }
  a.objective = {
      .low = float(1.0 - clip_low),
      .high = float(1.0 + clip_high),
      .dual = dual_clip.has_value() ? float(*dual_clip) : std::numeric_limits<float>::infinity(),
      .opd_coef = float(opd_coef),
      .entropy_coef = float(entropy_coef),
      .temperature = float(temperature),
      .kl_temperature = float(kl_temperature),
      .has_old = old_logp.has_value(),
      .has_target = target_ids.has_value(),
      .has_reverse = reverse_adv.has_value(),
      .tail = tail,
      .ppo = ppo,
  };

  const auto device = logits.device();
  std::array<Tensor, kTerms> terms;
  for (int32_t k = 0; k < kTerms; ++k) {
    terms[k] = torch::stable::empty({rows}, ScalarType::Float, std::nullopt, device);
    a.terms[k] = static_cast<float*>(terms[k].data_ptr());
  }
  Tensor clipped = torch::stable::empty({rows}, ScalarType::Char, std::nullopt, device);
  a.clipped = static_cast<int8_t*>(clipped.data_ptr());
  const Columns columns{terms[kLogp], terms[kEntropy], terms[kKl], terms[kTeacherMass], terms[kStudentMass],
                        clipped, terms[kSurrogate], terms[kReverse]};
  if (rows == 0) return columns;

  const int32_t index = logits.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index), "reading the device");
  const int32_t clusters = std::min(a.rows, std::max(1, multiprocessors / kBlocks));
  const bool two = target_ids.has_value() && temperature != kl_temperature;
  const auto run = two ? (entropy_coef != 0.0 ? launch<true, true> : launch<true, false>)
                       : (entropy_coef != 0.0 ? launch<false, true> : launch<false, false>);
  run(a, clusters, static_cast<cudaStream_t>(stream));
  return columns;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CUDA, m) {
  m.impl("loss_rows_cuda", TORCH_BOX(&loss_rows_cuda));
}

}  // namespace smopd::cuda
