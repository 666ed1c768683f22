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

// Row n's support, or null without a target. An id outside the vocabulary is a fault and leaves no support.
inline Support* row_support(
    TargetWork& work, const Target& target, int64_t n, int64_t vocab, bool tail, Fault& fault) {
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
  for (int64_t i = 0; i < support.count; ++i) {
    if (support.ids[i] < 0 || support.ids[i] >= vocab) {
      fault.set(n);
      support.count = 0;
      break;
    }
  }
  return &support;
}

inline void check_fault(const char* op, const Fault& fault, int64_t vocab) {
  const int64_t row = fault.row.load();
  SMOPD_REQUIRE(op, row < 0, "ids of row ", row, " hold an id outside 0 to V - 1 = ", vocab - 1);
}

}  // namespace smopd
