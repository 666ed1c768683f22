// loss_rows on the CPU: a token's whole objective and its gradient. Its definition is in
// kernels/reference/loss.py.

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "policy.h"
#include "rows.h"
#include "targets.h"

namespace smopd {
namespace {

constexpr const char* kOp = "loss_rows_cpu";
enum Term { kLogp, kEntropy, kKl, kTeacherMass, kStudentMass, kSurrogate, kReverse, kColumns };

struct Tokens {
  std::vector<int64_t> ids;
  Column adv, pg_weight, old_logp, kl_weight, ent_weight, reverse_adv, reverse_weight;
};

struct Arguments {
  Logits logits;
  std::optional<Logits> grad;
  Tokens tokens;
  Target target;
  PolicySettings policy;
  RowSettings row;
  double opd_coef;
  double entropy_coef;
  std::array<float*, kColumns> columns;  // (N,) each
  int8_t* clipped;
};

double weight_at(const Column& column, int64_t n) { return column ? double(column.at(n)) : 0.0; }

// Whether any weight of token n is not 0.
bool counts(const Tokens& t, int64_t n) {
  return weight_at(t.pg_weight, n) != 0.0 || weight_at(t.kl_weight, n) != 0.0 ||
         weight_at(t.ent_weight, n) != 0.0 || weight_at(t.reverse_weight, n) != 0.0;
}

// weight * value, 0 where the weight is 0 whatever the value.
double weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

template <typename T>
void loss_row(const Arguments& a, int64_t n, Work& work) {
  const Tokens& t = a.tokens;
  const T* logits = a.logits.row<T>(n);
  T* grad = a.grad.has_value() ? a.grad->row<T>(n) : nullptr;
  const auto clear = [&] {
    if (grad != nullptr) std::fill(grad, grad + a.logits.vocab, narrow<T>(0.0f));
  };
  if (!counts(t, n)) {
    for (float* const column : a.columns) column[n] = 0.0f;
    a.clipped[n] = 0;
    return clear();
  }

  const double pg_weight = weight_at(t.pg_weight, n);
  const double kl_weight = weight_at(t.kl_weight, n);
  const double ent_weight = weight_at(t.ent_weight, n);
  const double reverse_weight = weight_at(t.reverse_weight ? t.reverse_weight : t.kl_weight, n);
  Support* support = row_support(work.target, a.target, n, a.row.tail);
  const double kl_coef = a.target.present() ? a.opd_coef * kl_weight : 0.0;
  const double reverse_coef = t.reverse_adv ? a.opd_coef * reverse_weight : 0.0;
  const double entropy_coef = -a.entropy_coef * ent_weight;
  const bool idle = pg_weight == 0.0 && kl_coef == 0.0 && reverse_coef == 0.0 && entropy_coef == 0.0;
  Row<T> row{logits, a.logits.vocab, t.ids[n], support, a.row, idle ? nullptr : grad};
  row_terms(row, work.row);
  const double reverse_adv = weight_at(t.reverse_adv, n);
  const double log_ratio = t.old_logp ? row.logp - double(t.old_logp.at(n)) : 0.0;
  const PolicyTerms policy =
      policy_terms(log_ratio, double(t.adv.at(n)), t.reverse_adv ? &reverse_adv : nullptr, a.policy);
  if (row.out != nullptr) {
    const double logp = weighted(pg_weight, policy.slope) + weighted(reverse_coef, policy.reverse_slope);
    row_gradient(row, {logp, kl_coef, entropy_coef});
  } else {
    clear();
  }

  std::array<double, kColumns> values{};
  values[kLogp] = row.logp;
  values[kEntropy] = row.entropy;
  values[kSurrogate] = policy.surrogate;
  values[kReverse] = policy.reverse;
  if (support != nullptr) {
    values[kKl] = row.kl_value;
    values[kTeacherMass] = support->mass;
    values[kStudentMass] = row.student_mass;
  }
  for (size_t column = 0; column < kColumns; ++column) a.columns[column][n] = float(values[column]);
  a.clipped[n] = policy.clipped;
}

template <typename T>
void loss_rows(const Arguments& a) {
  const auto counted = [&](int64_t n) { return counts(a.tokens, n); };
  check_target_ids(kOp, a.target, a.logits.rows, a.logits.vocab, counted);
  torch::stable::parallel_for(
      0, a.logits.rows, rows_per_thread(a.logits.vocab), [&](int64_t begin, int64_t end) {
        Work work(a.target);
        for (int64_t n = begin; n < end; ++n) loss_row<T>(a, n, work);
      });
}

// The schema in module.cpp names the arguments and the results, (N,) each: float32, the clip bits int8.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results loss_rows_cpu(
    const Tensor& logits, const Tensor& token_ids, const Tensor& adv, const Tensor& pg_weight,
    const std::optional<Tensor>& old_logp, const std::optional<Tensor>& kl_weight,
    const std::optional<Tensor>& ent_weight, const std::optional<Tensor>& reverse_adv,
    const std::optional<Tensor>& reverse_weight, const std::optional<Tensor>& ids,
    const std::optional<Tensor>& logps, const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge,
    bool tail, double clip_low, double clip_high, double dual_clip, double opd_coef, double entropy_coef,
    double temperature, double kl_temperature, bool reverse_ppo, const std::optional<Tensor>& grad) {
  const Logits rows = read_logits(kOp, "logits", logits);
  check_temperature(kOp, "temperature", temperature);
  check_temperature(kOp, "kl_temperature", kl_temperature);
  const auto device = logits.device();
  const auto empty_column = [&] {
    return torch::stable::empty({rows.rows}, ScalarType::Float, std::nullopt, device);
  };
  std::vector<Tensor> columns;
  for (int64_t i = 0; i < kColumns; ++i) columns.push_back(empty_column());
  std::array<float*, kColumns> pointers{};
  for (size_t i = 0; i < kColumns; ++i) pointers[i] = static_cast<float*>(columns[i].data_ptr());
  Tensor clipped = torch::stable::empty({rows.rows}, ScalarType::Char, std::nullopt, device);
  const auto column = [&](const char* name, const std::optional<Tensor>& t) {
    return read_column(kOp, name, t, rows.rows);
  };
  Tokens tokens{{}, column("adv", adv), column("pg_weight", pg_weight), column("old_logp", old_logp),
                column("kl_weight", kl_weight), column("ent_weight", ent_weight),
                column("reverse_adv", reverse_adv), column("reverse_weight", reverse_weight)};
  const auto counted = [&](int64_t n) { return counts(tokens, n); };
  tokens.ids = read_token_ids(kOp, token_ids, rows.rows, rows.vocab, counted);
  const Arguments arguments{
      rows,
      grad.has_value() ? std::optional<Logits>(read_gradient(kOp, *grad, rows)) : std::nullopt,
      tokens,
      read_target(kOp, ids, logps, log_alpha, rows.rows, kappa, merge),
      {clip_low, clip_high, dual_clip, reverse_ppo},
      {temperature, kl_temperature, tail, true, entropy_coef != 0.0},
      opd_coef,
      entropy_coef,
      pointers,
      static_cast<int8_t*>(clipped.data_ptr())};
  const Results results{columns[kLogp],        columns[kEntropy], columns[kKl],        columns[kTeacherMass],
                        columns[kStudentMass], clipped,           columns[kSurrogate], columns[kReverse]};
  if (rows.rows == 0) return results;
  switch (rows.type) {
    case ScalarType::Float: loss_rows<float>(arguments); break;
    case ScalarType::BFloat16: loss_rows<BFloat16>(arguments); break;
    default: loss_rows<Float16>(arguments); break;
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("loss_rows_cpu", TORCH_BOX(&loss_rows_cpu));
}

}  // namespace smopd
