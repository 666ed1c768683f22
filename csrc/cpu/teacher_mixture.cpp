// teacher_mixture on the CPU: the kappa best of all teachers' candidates. Its definition is in
// kernels/reference.py.

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "targets.h"

namespace smopd {
namespace {

constexpr int64_t kElementsPerCandidate = 64;  // a candidate costs about as much as so many logits

// ids and logps (N, M, S), log_alpha (N, M). Returns ids (N, kappa) int32, logps (N, kappa), mass (N,).
std::tuple<Tensor, Tensor, Tensor> teacher_mixture_cpu(
    const Tensor& ids, const Tensor& logps, const Tensor& log_alpha, int64_t kappa, bool merge) {
  const char* op = "teacher_mixture_cpu";
  SMOPD_REQUIRE(op, ids.dim() == 3, "ids has ", ids.dim(), " dimensions, expected (N, M, S)");
  const int64_t rows = ids.size(0);
  const Target target = read_target(op, ids, logps, log_alpha, rows, kappa, merge);
  Tensor kept_ids = torch::stable::empty({rows, kappa}, ScalarType::Int, std::nullopt, ids.device());
  Tensor kept_logps = torch::stable::empty({rows, kappa}, ScalarType::Float, std::nullopt, ids.device());
  Tensor mass = torch::stable::empty({rows}, ScalarType::Float, std::nullopt, ids.device());
  int32_t* const out_ids = static_cast<int32_t*>(kept_ids.data_ptr());
  float* const out_logps = static_cast<float*>(kept_logps.data_ptr());
  float* const out_mass = static_cast<float*>(mass.data_ptr());

  const int64_t grain = rows_per_thread(kElementsPerCandidate * target.teachers * target.slots);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    TeacherUnion candidates(target.teachers * target.slots);
    for (int64_t n = begin; n < end; ++n) {
      unite(candidates, target, n);
      double total = 0.0;
      for (int64_t k = 0; k < kappa; ++k) {
        const bool kept = k < candidates.count;
        out_ids[n * kappa + k] = kept ? candidates.ids[k] : 0;
        out_logps[n * kappa + k] = kept ? candidates.logps[k] : -std::numeric_limits<float>::infinity();
        if (kept) total += std::exp(double(candidates.logps[k]));
      }
      out_mass[n] = float(total);
    }
  });
  return {kept_ids, kept_logps, mass};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("teacher_mixture_cpu", TORCH_BOX(&teacher_mixture_cpu));
}

}  // namespace smopd
