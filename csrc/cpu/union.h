// A mixture of several teachers' sparse log-probabilities. Repeats stay (pooled) or are merged by logsumexp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "arguments.h"
#include "support.h"
#include "topk.h"

namespace smopd {

// Sorts the indices 0..count-1 by descending key into `sorted`, at least the first `kept`. Keys differ.
void rank_keys(const int64_t* keys, int64_t count, int64_t kept, int32_t* sorted);

class TeacherUnion {
 public:
  explicit TeacherUnion(int64_t capacity)
      : ids(capacity),
        logps(capacity),
        keys_(capacity),
        sorted_(capacity),
        pool_ids_(capacity),
        peaks_(capacity),
        firsts_(capacity),
        sums_(capacity),
        repeats_(capacity),
        table_(capacity) {}

  int64_t count = 0;         // entries kept
  std::vector<int32_t> ids;  // by descending log-probability
  std::vector<float> logps;

  // Keeps the `kappa` best candidates. If merged, ties go to the lower id. Otherwise they go to the lower
  // teacher, then to its earlier entry. NaN comes first, and -inf is no candidate.
  template <typename IdAt, typename LogpAt>
  void fill(int64_t teachers, int64_t slots, int64_t kappa, bool merge, IdAt id_at, LogpAt logp_at) {
    int64_t distinct = 0;
    int64_t repeats = 0;
    if (merge) table_.start_row();
    for (int64_t m = 0; m < teachers; ++m) {
      for (int64_t s = 0; s < slots; ++s) {
        const float logp = logp_at(m, s);
        if (logp == -std::numeric_limits<float>::infinity()) continue;
        const int32_t id = id_at(m, s);
        const int64_t place = merge ? table_.place_of(id, distinct) : distinct;
        if (place == distinct) {
          pool_ids_[place] = id;
          peaks_[place] = firsts_[place] = logp;
          ++distinct;
        } else {
          repeats_[repeats++] = {int32_t(place), logp};
          if (logp > peaks_[place]) peaks_[place] = logp;
        }
      }
    }
    sum_repeats(repeats);
    for (int64_t i = 0; i < distinct; ++i) keys_[i] = make_key(peaks_[i], merge ? pool_ids_[i] : i);
    count = std::min(kappa, distinct);
    rank_keys(keys_.data(), distinct, count, sorted_.data());
    for (int64_t k = 0; k < count; ++k) {
      ids[k] = pool_ids_[sorted_[k]];
      logps[k] = peaks_[sorted_[k]];
    }
  }

 private:
  struct Repeat {
    int32_t place;
    float logp;
  };

  // Replaces the largest log-probability of each repeated id by the logsumexp of all of them.
  void sum_repeats(int64_t repeats) {
    for (int64_t i = 0; i < repeats; ++i) {
      const int32_t place = repeats_[i].place;
      sums_[place] = std::exp(firsts_[place] - peaks_[place]);
    }
    for (int64_t i = 0; i < repeats; ++i) {
      const int32_t place = repeats_[i].place;
      sums_[place] += std::exp(repeats_[i].logp - peaks_[place]);
    }
    for (int64_t i = 0; i < repeats; ++i) {
      const int32_t place = repeats_[i].place;
      if (sums_[place] > 1.0f || sums_[place] != sums_[place]) peaks_[place] += std::log(sums_[place]);
      sums_[place] = 1.0f;  // so that this is done once
    }
  }

  std::vector<int64_t> keys_;
  std::vector<int32_t> sorted_;
  std::vector<int32_t> pool_ids_;
  std::vector<float> peaks_;
  std::vector<float> firsts_;
  std::vector<float> sums_;
  std::vector<Repeat> repeats_;
  IdTable table_;
};

// The pooled mixture of several rows at once, one row per lane: a merge of sorted lists, where each step
// takes one entry from each row. TeacherUnion computes rows with a NaN or a list that does not descend.

constexpr int64_t kRowLanes = 8;  // rows at once

// The lists of kRowLanes rows, and the entries taken from them.
struct Pool {
  Pool(int64_t teachers_in, int64_t slots_in, int64_t kappa_in)
      : teachers(teachers_in),
        slots(slots_in),
        kappa(kappa_in),
        next(kRowLanes * teachers_in * slots_in + 1),
        heads(teachers_in * kRowLanes),
        places(teachers_in * kRowLanes),
        logps(kappa_in * kRowLanes),
        taken(kappa_in * kRowLanes),
        exponentials(kappa_in * kRowLanes) {}

  int64_t teachers;
  int64_t slots;
  int64_t kappa;
  std::vector<float> next;      // [lane][teacher][slot]: the entry after this one, -inf after the last
  std::vector<float> heads;     // [teacher][lane]: the largest entry left
  std::vector<int32_t> places;  // [teacher][lane]: teacher * slots + slot of the head
  std::vector<float> logps;     // [kappa][lane]: entries taken, descending, then -inf
  std::vector<int32_t> taken;   // [kappa][lane]: places of these entries, negative for -inf
  std::vector<double> exponentials;  // [kappa][lane]
};

inline bool fits_pool(const Target& target) {
  return target.teachers * target.slots < (int64_t(1) << 31) / kRowLanes;
}

// Reads the lists of n_rows rows from n on. Returns a bit for each row that cannot be merged and stays empty.
uint32_t read_lists(Pool& pool, const Target& target, int64_t n, int64_t n_rows);

// Merges the lists. Ties go to the lower teacher, then to its earlier entry.
void merge_lists(Pool& pool);

// mass[lane] = sum of exp(logps).
void sum_lanes(Pool& pool, double* mass);

struct TargetWork {
  TeacherUnion candidates;
  Support support;

  explicit TargetWork(const Target& target)
      : candidates(target.is_union() ? target.teachers * target.slots : 0),
        support(target.is_union() ? std::min(target.kappa, target.teachers * target.slots) : target.slots) {}
};

// Returns -1, which is in no vocabulary, for an id that does not fit into int32.
inline int32_t narrow_id(int64_t id) { return id == int64_t(int32_t(id)) ? int32_t(id) : -1; }

// Fills the candidates of row n. An entry of -inf is no candidate.
inline void unite(TeacherUnion& candidates, const Target& target, int64_t n) {
  candidates.fill(
      target.teachers, target.slots, target.kappa, target.merge,
      [&](int64_t m, int64_t s) { return narrow_id(target.ids.at(n, m, s)); },
      [&](int64_t m, int64_t s) { return target.logps.at(n, m, s) + target.log_alpha.at(n, m, 0); });
}

// Returns row n's support, null without a target. kernels/checks.py has checked that its ids are in [0, V).
inline Support* row_support(TargetWork& work, const Target& target, int64_t n, bool tail) {
  if (!target.present()) return nullptr;
  Support& support = work.support;
  if (target.is_union()) {
    const TeacherUnion& candidates = work.candidates;
    unite(work.candidates, target, n);
    fill_support(
        support, candidates.count, tail, target.merge, [&](int64_t s) { return candidates.ids[s]; },
        [&](int64_t s) { return candidates.logps[s]; });
  } else {
    fill_support(
        support, target.slots, tail, false,
        [&](int64_t s) { return narrow_id(target.ids.at(n, 0, s)); },
        [&](int64_t s) { return target.logps.at(n, 0, s); });
  }
  return &support;
}

}  // namespace smopd
