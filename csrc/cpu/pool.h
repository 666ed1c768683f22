// The pooled union of several rows at once, a row a lane, where every teacher's list descends: a merge of
// sorted lists that takes one entry a step from each row. Rows whose lists do not descend, or that hold a
// NaN, are told apart, and TeacherUnion serves them: which one serves a row depends on that row alone.

#pragma once

#include <cstdint>
#include <vector>

#include "arguments.h"
#include "exponent.h"
#include "simd.h"

namespace smopd {

constexpr int64_t kRowLanes = 8;  // rows at once

// The lists of kRowLanes rows and what was taken of them. Columns are [...][lane].
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
  std::vector<float> next;      // [lane][teacher][slot]: the list's next entry, -inf behind its last
  std::vector<float> heads;     // [teacher][lane]: the largest entry left
  std::vector<int32_t> places;  // [teacher][lane]: teacher * slots + slot of the head
  std::vector<float> logps;     // [kappa][lane]: descending, then -inf
  std::vector<int32_t> taken;   // [kappa][lane]: their places, negative where there is none
  std::vector<double> exponentials;  // [kappa][lane]
};

inline bool fits_pool(const Target& target) {
  return target.teachers * target.slots < (int64_t(1) << 31) / kRowLanes;
}

// Reads the lists of rows n to n + n_rows - 1. Returns a bit for each that a merge cannot serve; it is empty.
uint32_t read_lists(Pool& pool, const Target& target, int64_t n, int64_t n_rows);

// Ties go to the lower teacher, then to its own order.
void merge_lists(Pool& pool);

// mass[lane] = sum of exp(logps).
void sum_lanes(Pool& pool, double* mass);

}  // namespace smopd
