// loss_rows on the CPU; see kernels/reference/loss.py.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "rows.h"

namespace smopd {
namespace {

constexpr double kLogRatioBound = 20.0;

// CLIP_* of kernels/types.py.
constexpr int8_t kClipLow = 1;
constexpr int8_t kClipHigh = 2;
constexpr int8_t kClipDual = 4;
constexpr int8_t kClipLogRatio = 8;
constexpr int8_t kClipReverseLow = 16;
constexpr int8_t kClipReverseHigh = 32;

struct PolicySettings {
  double clip_low;
  double clip_high;
  double dual_clip;  // infinite if off
  bool reverse_ppo;
};

struct PolicyTerms {
  double surrogate = 0.0;
  double slope = 0.0;  // of the surrogate in the log-probability
  double reverse = 0.0;
  double reverse_slope = 0.0;
  int8_t clipped = 0;
};

// log_ratio is log pi - log pi_old, or 0 without an old policy. A NaN sets no clip bit and propagates.
PolicyTerms policy_terms(
    double log_ratio, double adv, const double* reverse_adv, const PolicySettings& settings) {
  const double low = 1.0 - settings.clip_low;
  const double high = 1.0 + settings.clip_high;
  const double bounded = log_ratio < -kLogRatioBound ? -kLogRatioBound
                         : log_ratio > kLogRatioBound ? kLogRatioBound
                                                      : log_ratio;
  const double ratio = std::exp(bounded);
  const bool saturated = std::fabs(log_ratio) > kLogRatioBound;
  const bool below = ratio < low;
  const bool above = ratio > high;
  const double clipped_ratio = below ? low : above ? high : ratio;

  PolicyTerms terms;
  terms.surrogate = std::max(-adv * ratio, -adv * clipped_ratio);
  const bool is_low = below && adv < 0.0;
  const bool is_high = above && adv > 0.0;
  const bool is_dual = adv < 0.0 && terms.surrogate > -settings.dual_clip * adv;
  if (is_dual) terms.surrogate = -settings.dual_clip * adv;
  if (!(is_low || is_high || is_dual || saturated)) terms.slope = -adv * ratio;
  terms.clipped = int8_t((is_low ? kClipLow : 0) | (is_high ? kClipHigh : 0) | (is_dual ? kClipDual : 0) |
                         (saturated ? kClipLogRatio : 0));
  if (reverse_adv == nullptr) return terms;

  const double gain = *reverse_adv;
  bool reverse_low = below;
  bool reverse_high = above;
  terms.reverse = -gain * clipped_ratio;
  if (settings.reverse_ppo) {
    terms.reverse = std::max(-gain * ratio, -gain * clipped_ratio);
    reverse_low = below && gain < 0.0;
    reverse_high = above && gain > 0.0;
  }
  if (!(reverse_low || reverse_high || saturated)) terms.reverse_slope = -gain * ratio;
  terms.clipped |= int8_t((reverse_low ? kClipReverseLow : 0) | (reverse_high ? kClipReverseHigh : 0));
  return terms;
}

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

// Whether token n has a nonzero weight.
bool counts(const Tokens& t, int64_t n) {
  return t.pg_weight.at(n) != 0.0 || t.kl_weight.at(n) != 0.0 ||
         t.ent_weight.at(n) != 0.0 || t.reverse_weight.at(n) != 0.0;
}

// Returns weight * value. A weight of 0 gives 0, even if the value is NaN.
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

  const double pg_weight = t.pg_weight.at(n);
  const double kl_weight = t.kl_weight.at(n);
  const double ent_weight = t.ent_weight.at(n);
  const double reverse_weight = (t.reverse_weight ? t.reverse_weight : t.kl_weight).at(n);
  Support* support = row_support(work.target, a.target, n, a.row.tail);
  const double kl_coef = a.target.present() ? a.opd_coef * kl_weight : 0.0;
  const double reverse_coef = t.reverse_adv ? a.opd_coef * reverse_weight : 0.0;
  const double entropy_coef = -a.entropy_coef * ent_weight;
  const bool idle = pg_weight == 0.0 && kl_coef == 0.0 && reverse_coef == 0.0 && entropy_coef == 0.0;
  Row<T> row{logits, a.logits.vocab, t.ids[n], support, a.row, idle ? nullptr : grad};
  row_terms(row, work);
  const double reverse_adv = t.reverse_adv.at(n);
  const double log_ratio = t.old_logp ? row.logp - t.old_logp.at(n) : 0.0;
  const PolicyTerms policy =
      policy_terms(log_ratio, t.adv.at(n), t.reverse_adv ? &reverse_adv : nullptr, a.policy);
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

// Each is (N,) float32, except the int8 clip bits. See the schema in module.cpp.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results loss_rows_cpu(
    const Tensor& logits, const Tensor& token_ids, const Tensor& adv, const Tensor& pg_weight,
    const std::optional<Tensor>& old_logp, const std::optional<Tensor>& kl_weight,
    const std::optional<Tensor>& ent_weight, const std::optional<Tensor>& reverse_adv,
    const std::optional<Tensor>& reverse_weight, const std::optional<Tensor>& ids,
    const std::optional<Tensor>& logps, const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge,
    bool tail, double clip_low, double clip_high, double dual_clip, double opd_coef, double entropy_coef,
    double temperature, double kl_temperature, bool reverse_ppo, bool entropy,
    const std::optional<Tensor>& grad) {
  const Logits rows = read_logits(kOp, "logits", logits);
  check_temperature(kOp, "temperature", temperature);
  check_temperature(kOp, "kl_temperature", kl_temperature);
  std::vector<Tensor> columns;
  for (int64_t i = 0; i < kColumns; ++i) columns.push_back(make(logits, {rows.rows}, ScalarType::Float));
  std::array<float*, kColumns> pointers{};
  for (size_t i = 0; i < kColumns; ++i) pointers[i] = static_cast<float*>(columns[i].data_ptr());
  const Tensor clipped = make(logits, {rows.rows}, ScalarType::Char);
  const auto column = [&](const char* name, const std::optional<Tensor>& t) {
    return read_column(kOp, name, t, rows.rows);
  };
  Tokens tokens{{}, column("adv", adv), column("pg_weight", pg_weight), column("old_logp", old_logp),
                column("kl_weight", kl_weight), column("ent_weight", ent_weight),
                column("reverse_adv", reverse_adv), column("reverse_weight", reverse_weight)};
  tokens.ids = read_token_ids(kOp, token_ids, rows.rows);
  const Arguments arguments{
      rows,
      grad.has_value() ? std::optional<Logits>(read_gradient(kOp, *grad, rows)) : std::nullopt,
      tokens,
      read_target(kOp, ids, logps, log_alpha, rows.rows, kappa, merge),
      {clip_low, clip_high, dual_clip, reverse_ppo},
      {temperature, kl_temperature, tail, entropy, entropy_coef != 0.0},
      opd_coef,
      entropy_coef,
      pointers,
      static_cast<int8_t*>(clipped.data_ptr())};
  const Results results{columns[kLogp],        columns[kEntropy], columns[kKl],        columns[kTeacherMass],
                        columns[kStudentMass], clipped,           columns[kSurrogate], columns[kReverse]};
  const auto loss_of = rows.type == ScalarType::Float      ? loss_row<float>
                       : rows.type == ScalarType::BFloat16 ? loss_row<BFloat16>
                                                           : loss_row<Float16>;
  torch::stable::parallel_for(0, rows.rows, rows_per_thread(rows.vocab), [&](int64_t begin, int64_t end) {
    Work work(arguments.target);
    for (int64_t n = begin; n < end; ++n) loss_of(arguments, n, work);
  });
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("loss_rows_cpu", TORCH_BOX(&loss_rows_cpu));
}

}  // namespace smopd
