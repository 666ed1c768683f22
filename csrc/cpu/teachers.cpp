// teacher_mixture and teacher_product on the CPU; see kernels/reference/topk.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "topk.h"
#include "union.h"

namespace smopd {
namespace {

constexpr int64_t kElementsPerCandidate = 16;  // cost of a candidate in logits

using Results = std::tuple<Tensor, Tensor, Tensor>;

// Results ids (N, kappa) int32, logps (N, kappa) and mass (N,) float32.
struct Kept {
  Results results;
  int32_t* ids;
  float* logps;
  float* mass;

  Kept(const Tensor& like, int64_t rows, int64_t kappa)
      : results(make(like, {rows, kappa}, ScalarType::Int), make(like, {rows, kappa}, ScalarType::Float),
                make(like, {rows}, ScalarType::Float)),
        ids(static_cast<int32_t*>(std::get<0>(results).data_ptr())),
        logps(static_cast<float*>(std::get<1>(results).data_ptr())),
        mass(static_cast<float*>(std::get<2>(results).data_ptr())) {}
};

// Computes row n by TeacherUnion and writes its log-probabilities to a lane.
void unite_lane(TeacherUnion& candidates, const Target& target, int64_t n, float* logps, int32_t* ids) {
  unite(candidates, target, n);
  for (int64_t k = 0; k < target.kappa; ++k) {
    const bool kept = k < candidates.count;
    ids[k] = kept ? candidates.ids[k] : 0;
    logps[k * kRowLanes] = kept ? candidates.logps[k] : -std::numeric_limits<float>::infinity();
  }
}

// Looks up the ids of the entries taken from row n's lists.
template <typename T>
void taken_ids(const Pool& pool, const Ids& from, int64_t n, int64_t lane, int32_t* ids) {
  const T* const row = static_cast<const T*>(from.data) + n * from.stride_n;
  const bool one_list = from.stride_m == pool.slots * from.stride_s;  // contiguous lists
  for (int64_t k = 0; k < pool.kappa; ++k) {
    const int64_t place = pool.taken[k * kRowLanes + lane];
    const int64_t m = one_list || place < 0 ? 0 : place / pool.slots;
    const int64_t at = m * from.stride_m + (place - m * pool.slots) * from.stride_s;
    ids[k] = place < 0 ? 0 : narrow_id(row[at]);
  }
}

// ids and logps (N, M, S), log_alpha (N, M).
Results teacher_mixture_cpu(
    const Tensor& ids, const Tensor& logps, const Tensor& log_alpha, int64_t kappa, bool merge) {
  const char* op = "teacher_mixture_cpu";
  SMOPD_REQUIRE(op, ids.dim() == 3, "ids has ", ids.dim(), " dimensions, expected (N, M, S)");
  const int64_t rows = ids.size(0);
  const Target target = read_target(op, ids, logps, log_alpha, rows, kappa, merge);
  const Kept kept(ids, rows, kappa);

  const int64_t blocks = (rows + kRowLanes - 1) / kRowLanes;
  const int64_t grain = rows_per_thread(kElementsPerCandidate * target.teachers * target.slots * kRowLanes);
  const bool pooled = !merge && fits_pool(target);
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    TeacherUnion candidates(target.teachers * target.slots);
    Pool pool(target.teachers, target.slots, kappa);
    double sums[kRowLanes];
    for (int64_t first = begin * kRowLanes; first < std::min(end * kRowLanes, rows); first += kRowLanes) {
      const int64_t live = std::min(kRowLanes, rows - first);
      uint32_t left_out = ~uint32_t(0);
      if (pooled) {
        left_out = read_lists(pool, target, first, live);
        merge_lists(pool);
      }
      for (int64_t l = 0; l < live; ++l) {
        int32_t* const ids_at = kept.ids + (first + l) * kappa;
        if (left_out >> l & 1) {
          unite_lane(candidates, target, first + l, pool.logps.data() + l, ids_at);
        } else {
          const auto taken = target.ids.wide ? taken_ids<int64_t> : taken_ids<int32_t>;
          taken(pool, target.ids, first + l, l, ids_at);
        }
        for (int64_t k = 0; k < kappa; ++k) {
          kept.logps[(first + l) * kappa + k] = pool.logps[k * kRowLanes + l];
        }
      }
      sum_lanes(pool, sums);
      for (int64_t l = 0; l < live; ++l) kept.mass[first + l] = float(sums[l]);
    }
  });
  return kept.results;
}

constexpr int64_t kElementsPerEntry = 32;  // cost of an entry in logits

struct Limits {
  double clip;
  double keep_raised;
};

double joined(double a, double b) {  // logsumexp of two
  if (a == -kInf) return b;
  return std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
}

// Working memory of one thread: the models' log-probabilities of the reference's ids.
class Product {
 public:
  Product(int64_t models, int64_t slots)
      : ids_(slots),
        n_models_(slots),
        base_(slots),
        model_(slots),
        total_(slots),
        raises_(slots),
        highest_(slots),
        keys_(slots),
        sorted_(slots),
        table_(models * slots) {}

  // Writes the kappa best of row n to ids and logps; returns their mass.
  double fill(const Target& target, int64_t reference, Limits limits, int64_t n, int32_t* ids, float* logps) {
    table_.start_row();
    distinct_ = 0;
    read(target, n, reference);
    const int64_t known = distinct_;
    for (int64_t i = 0; i < known; ++i) {
      base_[i] = model_[i];
      n_models_[i] = 1;
      total_[i] = raises_[i] = 0.0;
      highest_[i] = -kInf;
    }
    for (int64_t m = 0; m < target.teachers; ++m) {
      if (m == reference) continue;
      std::fill(model_.begin(), model_.begin() + known, -double(kInf));
      read(target, n, m, known);
      add(target.log_alpha.at(n, m, 0), limits.clip, known);
    }
    return cut(target.teachers, target.kappa, limits.keep_raised, known, ids, logps);
  }

 private:
  // Reads the log-probabilities of model m. known: number of the reference's ids; -1 reads the reference.
  void read(const Target& target, int64_t n, int64_t m, int64_t known = -1) {
    for (int64_t s = 0; s < target.slots; ++s) {
      const float logp = target.logps.at(n, m, s);
      if (logp == -kInf) continue;
      const int64_t place = table_.place_of(narrow_id(target.ids.at(n, m, s)), distinct_);
      const bool is_new = place == distinct_;
      if (is_new) ++distinct_;
      if (known >= 0 && place >= known) continue;
      if (known < 0 && is_new) ids_[place] = narrow_id(target.ids.at(n, m, s));
      model_[place] = known < 0 && is_new ? double(logp) : joined(model_[place], logp);
    }
  }

  void add(float weight, double clip, int64_t known) {
    for (int64_t i = 0; i < known; ++i) {
      if (model_[i] == -kInf) continue;
      ++n_models_[i];
      double change = model_[i] - base_[i];
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
      if (n_models_[i] != models) continue;
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
  std::vector<int32_t> n_models_;  // that gave the id
  std::vector<double> base_;
  std::vector<double> model_;
  std::vector<double> total_;
  std::vector<double> raises_;
  std::vector<double> highest_;
  std::vector<int64_t> keys_;
  std::vector<int32_t> sorted_;
  IdTable table_;
};

// ids and logps (N, M, S), weights (N, M); the reference's weight is not used.
Results teacher_product_cpu(
    const Tensor& ids, const Tensor& logps, const Tensor& weights, int64_t kappa, int64_t reference,
    double clip, double keep_raised) {
  const char* op = "teacher_product_cpu";
  SMOPD_REQUIRE(op, ids.dim() == 3, "ids has ", ids.dim(), " dimensions, expected (N, M, S)");
  SMOPD_REQUIRE(op, reference >= 0 && reference < ids.size(1), "reference is ", reference,
                ", expected 0 to M - 1 = ", ids.size(1) - 1);
  const int64_t rows = ids.size(0);
  const Target target = read_target(op, ids, logps, weights, rows, kappa, true);
  const Kept kept(ids, rows, kappa);
  const int64_t grain = rows_per_thread(kElementsPerEntry * target.teachers * target.slots);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    Product product(target.teachers, target.slots);
    for (int64_t n = begin; n < end; ++n) {
      int32_t* const ids_at = kept.ids + n * kappa;
      kept.mass[n] =
          float(product.fill(target, reference, {clip, keep_raised}, n, ids_at, kept.logps + n * kappa));
    }
  });
  return kept.results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("teacher_mixture_cpu", TORCH_BOX(&teacher_mixture_cpu));
  m.impl("teacher_product_cpu", TORCH_BOX(&teacher_product_cpu));
}

}  // namespace smopd
