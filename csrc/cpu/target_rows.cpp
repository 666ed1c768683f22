// A sparse target made ready for many rows on the CPU: kernels/reference/topk.py's target_of, in float64.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "targets.h"

namespace smopd {
namespace {

constexpr int64_t kElementsPerSlot = 64;  // of a row of logits, that are as much work

// Pointers to one row.
struct ReadyRow {
  int64_t* ids;
  double* logps;
  double* q;
  bool* first;
  bool* live;
  double* mass;
};

// As fill_support does; a slot that holds no id of its own takes that of the first one.
template <typename IdAt, typename LogpAt>
void ready_row(
    const ReadyRow& row, IdTable& table, int64_t count, int64_t slots, bool tail, IdAt id_at,
    LogpAt logp_at) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  int64_t kept = 0;
  double mass = 0.0;
  table.start_row();
  for (int64_t slot = 0; slot < count; ++slot) {
    const double logp = logp_at(slot);
    if (logp == kNothing) continue;
    const double q = std::exp(logp);
    mass += q;
    if (logp != logp) continue;
    const int32_t id = id_at(slot);
    const int64_t place = table.place_of(id, kept);
    if (tail && place != kept) {
      row.q[place] += q;
      row.logps[place] = std::log(row.q[place]);
      continue;
    }
    row.ids[kept] = id;
    row.logps[kept] = logp;
    row.q[kept] = q;
    row.first[kept] = place == kept;
    ++kept;
  }
  *row.live = kept > 0;
  *row.mass = mass;
  for (int64_t slot = kept; slot < slots; ++slot) {
    row.ids[slot] = kept > 0 ? row.ids[0] : 0;
    row.logps[slot] = kNothing;
    row.q[slot] = 0.0;
    row.first[slot] = false;
  }
}

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The target as in loss_rows_cpu. Returns the fields of terms.Target: ids int64, logps, q float64,
// first bool, (N, S) each; live bool, mass float64, (N,) each. With tail repeats are one slot.
Results target_rows_cpu(
    const Tensor& ids, const Tensor& logps, const std::optional<Tensor>& log_alpha, int64_t kappa, bool merge,
    bool tail) {
  const char* op = "target_rows_cpu";
  SMOPD_REQUIRE(op, ids.dim() >= 2, "ids has ", ids.dim(), " dimensions, expected at least 2");
  const int64_t rows = ids.size(0);
  const Target target = read_target(op, ids, logps, log_alpha, rows, kappa, merge);
  const int64_t pool = target.teachers * target.slots;
  const int64_t slots = target.is_union() ? std::min(kappa, pool) : target.slots;
  const auto make = [&](const std::vector<int64_t>& shape, ScalarType type) {
    return torch::stable::empty(shape, type, std::nullopt, ids.device());
  };
  const std::vector<int64_t> shape{rows, slots}, column{rows};
  Results results{make(shape, ScalarType::Long),   make(shape, ScalarType::Double),
                  make(shape, ScalarType::Double), make(shape, ScalarType::Bool),
                  make(column, ScalarType::Bool),  make(column, ScalarType::Double)};
  const auto& [out_ids, out_logps, out_q, out_first, out_live, out_mass] = results;
  const ReadyRow out{
      static_cast<int64_t*>(out_ids.data_ptr()), static_cast<double*>(out_logps.data_ptr()),
      static_cast<double*>(out_q.data_ptr()),    static_cast<bool*>(out_first.data_ptr()),
      static_cast<bool*>(out_live.data_ptr()),   static_cast<double*>(out_mass.data_ptr())};
  const int64_t grain = rows_per_thread(kElementsPerSlot * (target.is_union() ? pool : slots));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    TeacherUnion candidates(target.is_union() ? pool : 0);
    IdTable table(slots);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t at = n * slots;
      const ReadyRow row{out.ids + at,   out.logps + at, out.q + at,
                         out.first + at, out.live + n,   out.mass + n};
      if (target.is_union()) {
        unite(candidates, target, n);
        ready_row(
            row, table, candidates.count, slots, tail, [&](int64_t s) { return candidates.ids[s]; },
            [&](int64_t s) { return candidates.logps[s]; });
      } else {
        ready_row(
            row, table, slots, slots, tail, [&](int64_t s) { return narrow_id(target.ids.at(n, 0, s)); },
            [&](int64_t s) { return target.logps.at(n, 0, s); });
      }
    }
  });
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("target_rows_cpu", TORCH_BOX(&target_rows_cpu));
}

}  // namespace smopd
