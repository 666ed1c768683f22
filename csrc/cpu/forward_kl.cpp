// Forward KL on the CPU: each token's log-probability and KL, and their gradient in the logits. The
// definitions are in kernels/reference/topk.py.

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "rows.h"
#include "targets.h"

namespace smopd {
namespace {

struct Arguments {
  const char* op;
  Logits logits;
  std::vector<int64_t> token_ids;
  Target target;
  RowSettings row;
  std::optional<Logits> grad;  // or the terms
  Column dlogp;
  Column dkl;
  float* logp;
  float* kl;
};

template <typename T>
void forward_kl_row(const Arguments& a, int64_t n, Work& work) {
  Support* support = row_support(work.target, a.target, n, a.row.tail);
  T* grad = a.grad.has_value() ? a.grad->row<T>(n) : nullptr;
  Row<T> row{a.logits.row<T>(n), a.logits.vocab, a.token_ids[n], support, a.row, grad};
  row_terms(row, work.row);
  if (grad != nullptr) {
    row_gradient(row, {a.dlogp ? double(a.dlogp.at(n)) : 0.0, a.dkl ? double(a.dkl.at(n)) : 0.0, 0.0});
    return;
  }
  a.logp[n] = float(row.logp);
  a.kl[n] = float(row.kl_value);
}

template <typename T>
void forward_kl(const Arguments& a) {
  check_target_ids(a.op, a.target, a.logits.rows, a.logits.vocab);
  torch::stable::parallel_for(
      0, a.logits.rows, rows_per_thread(a.logits.vocab), [&](int64_t begin, int64_t end) {
        Work work(a.target);
        for (int64_t n = begin; n < end; ++n) forward_kl_row<T>(a, n, work);
      });
}

Arguments read_arguments(
    const char* op, const Tensor& logits, const Tensor& token_ids, const Tensor& ids, const Tensor& logps,
    const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge, bool tail, double temperature) {
  const Logits rows = read_logits(op, "logits", logits);
  check_temperature(op, "temperature", temperature);
  return {op,
          rows,
          read_token_ids(op, token_ids, rows.rows, rows.vocab),
          read_target(op, ids, logps, log_alpha, rows.rows, kappa, merge),
          {temperature, temperature, tail, false, false},
          std::nullopt,
          {},
          {},
          nullptr,
          nullptr};
}

void run(const Arguments& a) {
  if (a.logits.rows == 0) return;
  switch (a.logits.type) {
    case ScalarType::Float: forward_kl<float>(a); break;
    case ScalarType::BFloat16: forward_kl<BFloat16>(a); break;
    default: forward_kl<Float16>(a); break;
  }
}

std::tuple<Tensor, Tensor> forward_kl_rows_cpu(
    const Tensor& logits, const Tensor& token_ids, const Tensor& ids, const Tensor& logps,
    const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge, bool tail, double temperature) {
  Arguments a = read_arguments(
      "forward_kl_rows_cpu", logits, token_ids, ids, logps, log_alpha, kappa, merge, tail, temperature);
  Tensor logp = torch::stable::empty({a.logits.rows}, ScalarType::Float, std::nullopt, logits.device());
  Tensor kl = torch::stable::empty({a.logits.rows}, ScalarType::Float, std::nullopt, logits.device());
  a.logp = static_cast<float*>(logp.data_ptr());
  a.kl = static_cast<float*>(kl.data_ptr());
  run(a);
  return {logp, kl};
}

Tensor forward_kl_gradient_cpu(
    const Tensor& logits, const Tensor& token_ids, const Tensor& ids, const Tensor& logps,
    const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge, bool tail, double temperature,
    const std::optional<Tensor>& dlogp, const std::optional<Tensor>& dkl) {
  const char* op = "forward_kl_gradient_cpu";
  Arguments a = read_arguments(op, logits, token_ids, ids, logps, log_alpha, kappa, merge, tail, temperature);
  Tensor grad =
      torch::stable::empty({a.logits.rows, a.logits.vocab}, a.logits.type, std::nullopt, logits.device());
  a.grad = read_gradient(op, grad, a.logits);
  a.dlogp = read_column(op, "dlogp", dlogp, a.logits.rows);
  a.dkl = read_column(op, "dkl", dkl, a.logits.rows);
  run(a);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("forward_kl_rows_cpu", TORCH_BOX(&forward_kl_rows_cpu));
  m.impl("forward_kl_gradient_cpu", TORCH_BOX(&forward_kl_gradient_cpu));
}

}  // namespace smopd
