// A row's support from the operations' target argument, and the working memory of one thread.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "arguments.h"
#include "rows.h"
#include "support.h"
#include "union.h"

namespace smopd {

struct TargetWork {
  TeacherUnion candidates;
  Support support;

  explicit TargetWork(const Target& target)
      : candidates(target.is_union() ? target.teachers * target.slots : 0),
        support(target.is_union() ? std::min(target.kappa, target.teachers * target.slots) : target.slots) {}
};

struct Work {
  TargetWork target;
  RowWork row;

  explicit Work(const Target& t) : target(t) {}
};

// -1, which is in no vocabulary, for what is no int32.
inline int32_t narrow_id(int64_t id) { return id == int64_t(int32_t(id)) ? int32_t(id) : -1; }

// The union of row n's teachers. -inf is no candidate, whatever its id.
inline void unite(TeacherUnion& candidates, const Target& target, int64_t n) {
  candidates.fill(
      target.teachers, target.slots, target.kappa, target.merge,
      [&](int64_t m, int64_t s) { return narrow_id(target.ids.at(n, m, s)); },
      [&](int64_t m, int64_t s) { return target.logps.at(n, m, s) + target.log_alpha.at(n, m, 0); });
}

// Row n's support, or null without a target. Its ids are in the vocabulary where check_target_ids has passed.
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

// Before anything is written: every id that the rows which count will use is in the vocabulary.
template <typename Counts = EveryRow>
inline void check_target_ids(
    const char* op, const Target& target, int64_t rows, int64_t vocab, Counts counts = {}) {
  TargetWork work(target);
  const auto all_inside = [&](int64_t n) {
    for (int64_t m = 0; m < target.teachers; ++m) {
      for (int64_t s = 0; s < target.slots; ++s) {
        if (uint64_t(target.ids.at(n, m, s)) >= uint64_t(vocab)) return false;
      }
    }
    return true;
  };
  for (int64_t n = 0; n < rows && target.present(); ++n) {
    if (!counts(n) || all_inside(n)) continue;
    const Support& used = *row_support(work, target, n, false);  // what is outside may be empty or not kept
    const auto inside = [&](int32_t id) { return id >= 0 && id < vocab; };
    const bool fine = std::all_of(used.ids.begin(), used.ids.begin() + used.count, inside);
    SMOPD_REQUIRE(op, fine, "ids of row ", n, " hold an id outside 0 to V - 1 = ", vocab - 1);
  }
}

}  // namespace smopd
