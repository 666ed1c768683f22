// The order of a row's candidates.

#include "union.h"

#include <algorithm>
#include <cstdint>

namespace smopd {
namespace {

// Every key's place is the number of larger ones: no branch to mispredict, and the compiler vectorises it.
SMOPD_CLONES void count_larger(const int64_t* keys, int64_t count, int32_t* sorted) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t key = keys[i];
    int64_t place = 0;
    for (int64_t j = 0; j < count; ++j) place += keys[j] > key ? 1 : 0;
    sorted[place] = int32_t(i);
  }
}

}  // namespace

void rank_keys(const int64_t* keys, int64_t count, int64_t kept, int32_t* sorted) {
  if (count <= kMaxRanked) return count_larger(keys, count, sorted);
  for (int64_t i = 0; i < count; ++i) sorted[i] = int32_t(i);
  const auto larger = [keys](int32_t a, int32_t b) { return keys[a] > keys[b]; };
  std::partial_sort(sorted, sorted + kept, sorted + count, larger);
}

}  // namespace smopd
