// teacher_mixture on the CPU; see kernels/reference/topk.py.

#include <algorithm>
#include <limits>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "union.h"

namespace smopd {
namespace {

constexpr int64_t kElementsPerCandidate = 16;  // cost of a candidate, in units of a logit's cost

using Results = std::tuple<Tensor, Tensor, Tensor>;

// The results: ids (N, kappa) int32, logps (N, kappa) float32, mass (N,) float32.
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

// Computes row n with TeacherUnion, and writes its log-probabilities to a lane.
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("teacher_mixture_cpu", TORCH_BOX(&teacher_mixture_cpu));
}

}  // namespace smopd
