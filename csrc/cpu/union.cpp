// The order of candidates, and the merge of sorted lists with one row per lane.

#include "union.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace smopd {
namespace {

// A key's place is the number of larger keys. This avoids mispredicted branches and is vectorized.
SMOPD_CLONES void count_larger(const int64_t* keys, int64_t count, int32_t* sorted) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t key = keys[i];
    int64_t place = 0;
    for (int64_t j = 0; j < count; ++j) place += keys[j] > key ? 1 : 0;
    sorted[place] = int32_t(i);
  }
}

constexpr int32_t kNone = -1;  // no entry was taken
constexpr int32_t kOver = -2;  // place of an exhausted list
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

using Floats __attribute__((vector_size(kRowLanes * sizeof(float)))) = float;
using Ints __attribute__((vector_size(kRowLanes * sizeof(int32_t)))) = int32_t;

// Writes the entries after the first to `next`. Returns whether the list does not descend.
template <int64_t kStride>
SMOPD_INLINE bool read_list(const float* logps, int64_t stride, float alpha, int64_t slots, float* next) {
  const int64_t step = kStride > 0 ? kStride : stride;
  int32_t rises = 0;
  for (int64_t s = 1; s < slots; ++s) {
    const float before = logps[(s - 1) * step] + alpha;
    const float value = logps[s * step] + alpha;
    next[s - 1] = value;
    rises |= before >= value ? 0 : 1;
  }
  return rises != 0;
}

}  // namespace

void rank_keys(const int64_t* keys, int64_t count, int64_t kept, int32_t* sorted) {
  if (count <= kMaxRanked) return count_larger(keys, count, sorted);
  for (int64_t i = 0; i < count; ++i) sorted[i] = int32_t(i);
  const auto larger = [keys](int32_t a, int32_t b) { return keys[a] > keys[b]; };
  std::partial_sort(sorted, sorted + kept, sorted + count, larger);
}

SMOPD_CLONES uint32_t read_lists(Pool& pool, const Target& target, int64_t n, int64_t n_rows) {
  const int64_t slots = pool.slots;
  const Logps& from = target.logps;
  uint32_t left_out = 0;
  for (int64_t l = 0; l < kRowLanes; ++l) {
    bool merges = l < n_rows && slots > 0;
    for (int64_t m = 0; m < pool.teachers && merges; ++m) {
      const float alpha = target.log_alpha.at(n + l, m, 0);
      const float* const logps = from.data + (n + l) * from.stride_n + m * from.stride_m;
      float* const next = pool.next.data() + (l * pool.teachers + m) * slots;
      const float head = logps[0] + alpha;
      merges = head == head && !(from.stride_s == 1 ? read_list<1>(logps, 1, alpha, slots, next)
                                                    : read_list<0>(logps, from.stride_s, alpha, slots, next));
      next[slots - 1] = kMinusInfinity;
      pool.heads[m * kRowLanes + l] = head;
      pool.places[m * kRowLanes + l] = int32_t(m * slots);
    }
    if (merges) continue;
    for (int64_t m = 0; m < pool.teachers; ++m) pool.heads[m * kRowLanes + l] = kMinusInfinity;
    for (int64_t m = 0; m < pool.teachers; ++m) pool.places[m * kRowLanes + l] = kOver;
    if (l < n_rows) left_out |= uint32_t(1) << l;
  }
  return left_out;
}

SMOPD_CLONES void merge_lists(Pool& pool) {
  const int64_t row = pool.teachers * pool.slots;
  const Floats nothing = Floats{} + kMinusInfinity;
  Floats head = nothing;  // replaces the last taken entry
  Ints place = Ints{} + kOver;
  Ints last = Ints{} + kNone;
  for (int64_t k = 0; k < pool.kappa; ++k) {
    Floats best = nothing;
    Ints best_place = Ints{} + kNone;
    for (int64_t m = 0; m < pool.teachers; ++m) {
      Floats value;
      Ints at;
      std::memcpy(&value, &pool.heads[m * kRowLanes], sizeof(value));
      std::memcpy(&at, &pool.places[m * kRowLanes], sizeof(at));
      const Ints moves = at == last;
      value = moves ? head : value;
      at = moves ? place : at;
      std::memcpy(&pool.heads[m * kRowLanes], &value, sizeof(value));
      std::memcpy(&pool.places[m * kRowLanes], &at, sizeof(at));
      const Ints larger = value > best;
      best = larger ? value : best;
      best_place = larger ? at : best_place;
    }
    std::memcpy(&pool.logps[k * kRowLanes], &best, sizeof(best));
    std::memcpy(&pool.taken[k * kRowLanes], &best_place, sizeof(best_place));
    last = best_place;
    const Ints from = last < 0 ? Ints{} : last;
    const float* const next = pool.next.data();
    for (int64_t l = 0; l < kRowLanes; ++l) head[l] = next[l * row + from[l]];
    head = last < 0 ? nothing : head;
    place = head > nothing ? last + 1 : Ints{} + kOver;
  }
}

SMOPD_CLONES void sum_lanes(Pool& pool, double* mass) {
  const int64_t entries = pool.kappa * kRowLanes;
  double* const e = pool.exponentials.data();
  for (int64_t i = 0; i < entries; ++i) e[i] = double(pool.logps[i]) * kLog2E;
  exp2_each(e, e, entries);
  double sums[kRowLanes] = {};
  for (int64_t k = 0; k < pool.kappa; ++k) {
    for (int64_t l = 0; l < kRowLanes; ++l) sums[l] += e[k * kRowLanes + l];
  }
  for (int64_t l = 0; l < kRowLanes; ++l) mass[l] = sums[l];
}

}  // namespace smopd
