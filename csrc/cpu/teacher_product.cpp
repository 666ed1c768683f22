// teacher_product on the CPU: a reference and what each teacher changed of it, together. Its definition is in
// kernels/reference/topk.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "pool.h"
#include "support.h"
#include "targets.h"
#include "topk.h"
#include "union.h"

namespace smopd {
namespace {

constexpr int64_t kElementsPerEntry = 32;  // an entry costs about as much as so many logits

struct Limits {
  double clip;
  double keep_raised;
};

double joined(double a, double b) {  // logsumexp of two; -inf is none
  if (a == -kInf) return b;
  return std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
}

// One thread's working memory: what the models say of the reference's ids, by their place.
class Product {
 public:
  Product(int64_t models, int64_t slots)
      : ids_(slots),
        said_by_(slots),
        base_(slots),
        said_(slots),
        total_(slots),
        raises_(slots),
        highest_(slots),
        keys_(slots),
        sorted_(slots),
        table_(models * slots) {}

  // Row n's kappa best to ids and logps; returns their mass.
  double fill(const Target& target, int64_t reference, Limits limits, int64_t n, int32_t* ids, float* logps) {
    table_.start_row();
    distinct_ = 0;
    read(target, n, reference);
    const int64_t known = distinct_;
    for (int64_t i = 0; i < known; ++i) {
      base_[i] = said_[i];
      said_by_[i] = 1;
      total_[i] = raises_[i] = 0.0;
      highest_[i] = -kInf;
    }
    for (int64_t m = 0; m < target.teachers; ++m) {
      if (m == reference) continue;
      std::fill(said_.begin(), said_.begin() + known, -double(kInf));
      read(target, n, m, known);
      add(target.log_alpha.at(n, m, 0), limits.clip, known);
    }
    return cut(target.teachers, target.kappa, limits.keep_raised, known, ids, logps);
  }

 private:
  // What model m says, to said_. known: how many of the reference's ids there are; without, it is the reference.
  void read(const Target& target, int64_t n, int64_t m, int64_t known = -1) {
    for (int64_t s = 0; s < target.slots; ++s) {
      const float logp = target.logps.at(n, m, s);
      if (logp == -kInf) continue;
      const int64_t place = table_.place_of(narrow_id(target.ids.at(n, m, s)), distinct_);
      const bool is_new = place == distinct_;
      if (is_new) ++distinct_;
      if (known >= 0 && place >= known) continue;
      if (known < 0 && is_new) ids_[place] = narrow_id(target.ids.at(n, m, s));
      said_[place] = known < 0 && is_new ? double(logp) : joined(said_[place], logp);
    }
  }

  void add(float weight, double clip, int64_t known) {
    for (int64_t i = 0; i < known; ++i) {
      if (said_[i] == -kInf) continue;
      ++said_by_[i];
      double change = said_[i] - base_[i];
      change = change < -clip ? -clip : change > clip ? clip : change;  // NaN stays
      change *= weight;
      total_[i] += change;
      raises_[i] += change < 0.0 ? 0.0 : change;
      highest_[i] = change > highest_[i] ? change : highest_[i];
    }
  }

  double cut(int64_t models, int64_t kappa, double keep_raised, int64_t known, int32_t* ids, float* logps) {
    int64_t count = 0;
    double peak = -kInf;
    for (int64_t i = 0; i < known; ++i) {
      if (said_by_[i] != models) continue;
      const double value = base_[i] + (highest_[i] > keep_raised ? raises_[i] : total_[i]);
      ids_[count] = ids_[i];
      total_[count] = value;
      peak = value > peak ? value : peak;
      ++count;
    }
    const double shift = peak == -kInf ? 0.0 : peak;  // all are NaN
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += std::exp(total_[i] - shift);
    const double lse = shift + std::log(sum);
    for (int64_t i = 0; i < count; ++i) {
      base_[i] = total_[i] - lse;
      keys_[i] = make_key(float(base_[i]), ids_[i]);
    }
    const int64_t kept = std::min(kappa, count);
    rank_keys(keys_.data(), count, kept, sorted_.data());
    double mass = 0.0;
    for (int64_t k = 0; k < kappa; ++k) {
      ids[k] = k < kept ? ids_[sorted_[k]] : 0;
      logps[k] = k < kept ? float(base_[sorted_[k]]) : -kInf;
      if (k < kept) mass += std::exp(base_[sorted_[k]]);
    }
    return mass;
  }

  int64_t distinct_ = 0;
  std::vector<int32_t> ids_;
  std::vector<int32_t> said_by_;  // how many models gave the id
  std::vector<double> base_;
  std::vector<double> said_;
  std::vector<double> total_;
  std::vector<double> raises_;
  std::vector<double> highest_;
  std::vector<int64_t> keys_;
  std::vector<int32_t> sorted_;
  IdTable table_;
};

// ids and logps (N, M, S), weights (N, M), the reference's own not used. Returns ids (N, kappa) int32, logps (N, kappa), mass (N,).
std::tuple<Tensor, Tensor, Tensor> teacher_product_cpu(
    const Tensor& ids, const Tensor& logps, const Tensor& weights, int64_t kappa, int64_t reference,
    double clip, double keep_raised) {
  const char* op = "teacher_product_cpu";
  SMOPD_REQUIRE(op, ids.dim() == 3, "ids has ", ids.dim(), " dimensions, expected (N, M, S)");
  SMOPD_REQUIRE(op, reference >= 0 && reference < ids.size(1), "reference is ", reference,
                ", expected 0 to M - 1 = ", ids.size(1) - 1);
  const int64_t rows = ids.size(0);
  const Target target = read_target(op, ids, logps, weights, rows, kappa, true);
  Tensor kept_ids = torch::stable::empty({rows, kappa}, ScalarType::Int, std::nullopt, ids.device());
  Tensor kept_logps = torch::stable::empty({rows, kappa}, ScalarType::Float, std::nullopt, ids.device());
  Tensor mass = torch::stable::empty({rows}, ScalarType::Float, std::nullopt, ids.device());
  int32_t* const out_ids = static_cast<int32_t*>(kept_ids.data_ptr());
  float* const out_logps = static_cast<float*>(kept_logps.data_ptr());
  float* const out_mass = static_cast<float*>(mass.data_ptr());
  const int64_t grain = rows_per_thread(kElementsPerEntry * target.teachers * target.slots);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    Product product(target.teachers, target.slots);
    for (int64_t n = begin; n < end; ++n) {
      const Limits limits{clip, keep_raised};
      out_mass[n] = float(
          product.fill(target, reference, limits, n, out_ids + n * kappa, out_logps + n * kappa));
    }
  });
  return {kept_ids, kept_logps, mass};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("teacher_product_cpu", TORCH_BOX(&teacher_product_cpu));
}

}  // namespace smopd
