// The support of a forward KL: the distinct ids of a sparse target and their terms.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponent.h"

namespace smopd {

constexpr double kTailFloor = 0x1p-20;  // a smaller teacher mass outside the support counts as 0

// Hash table that finds repeated ids of a row. A new stamp clears it for the next row.
class IdTable {
 public:
  explicit IdTable(int64_t capacity) {
    int64_t size = 8;
    while (size < 2 * capacity) size *= 2;
    slots_.resize(size, Slot{0, 0, 0});
    mask_ = uint32_t(size - 1);
  }

  void start_row() {
    if (++stamp_ == 0) {
      for (Slot& slot : slots_) slot.stamp = 0;
      stamp_ = 1;
    }
  }

  // Returns the place stored for the id. If there is none, stores `place` and returns it.
  int64_t place_of(int32_t id, int64_t place) {
    uint32_t at = uint32_t(id) * 0x9e3779b1u;
    at = (at ^ (at >> 15)) & mask_;
    while (slots_[at].stamp == stamp_) {
      if (slots_[at].id == id) return slots_[at].place;
      at = (at + 1) & mask_;
    }
    slots_[at] = {stamp_, id, int32_t(place)};
    return place;
  }

 private:
  struct Slot {
    uint32_t stamp;
    int32_t id;
    int32_t place;
  };
  std::vector<Slot> slots_;
  uint32_t mask_ = 0;
  uint32_t stamp_ = 0;
};

// Compares all pairs if there are few ids. If there are many, returns false without a comparison.
inline bool all_differ(const int32_t* ids, int64_t count) {
  constexpr int64_t kFew = 32;
  if (count > kFew) return false;
  int32_t same = 0;
  for (int64_t i = 1; i < count; ++i) {
    for (int64_t j = 0; j < i; ++j) same |= int32_t(ids[j] == ids[i]);
  }
  return same == 0;
}

struct Support {
  int64_t count = 0;
  std::vector<int32_t> ids;    // distinct
  std::vector<float> logits;   // of the student
  std::vector<double> q;       // the target's probability, repeats summed
  std::vector<double> logq;    // its logarithm, or NaN if q is a sum
  std::vector<double> p;       // the student's probability at the KL's temperature
  double mass = 0.0;           // Q, the sum over all slots
  double q_logq = 0.0;         // sum of q log q over slots, or over distinct ids with tail
  double tail_q = 0.0;         // 1 - Q, or 0 if below the floor or without tail
  IdTable table;

  explicit Support(int64_t capacity)
      : ids(capacity), logits(capacity), q(capacity), logq(capacity), p(capacity), table(capacity) {}
};

// Sums the probabilities of repeated ids at their first place, and sets the logarithm there to NaN.
inline void join_repeats(Support& s) {
  const int64_t live = s.count;
  s.count = 0;
  s.table.start_row();
  for (int64_t i = 0; i < live; ++i) {
    const int64_t place = s.table.place_of(s.ids[i], s.count);
    if (place == s.count) {
      s.ids[place] = s.ids[i];
      s.q[place] = s.q[i];
      s.logq[place] = s.logq[i];
      ++s.count;
    } else {
      s.q[place] += s.q[i];
      s.logq[place] = std::numeric_limits<double>::quiet_NaN();
    }
  }
}

// Fills the support from a row's slots. -inf marks an empty slot. `distinct`: no id repeats.
// With `tail`, all slots of an id are one entry of the KL. Without it, each slot is one entry.
template <typename IdAt, typename LogpAt>
inline void fill_support(Support& s, int64_t slots, bool tail, bool distinct, IdAt id_at, LogpAt logp_at) {
  int64_t live = 0;
  double mass = 0.0, q_logq = 0.0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const double logp = logp_at(slot);
    if (logp == -std::numeric_limits<double>::infinity()) continue;
    if (logp != logp) {  // makes the mass and the gradient NaN
      mass = q_logq = logp;
      continue;
    }
    s.ids[live] = id_at(slot);
    s.q[live] = logp * kLog2E;
    s.logq[live++] = logp;
  }
  s.count = live;
  exp2_each(s.q.data(), s.q.data(), live);
  for (int64_t i = 0; i < live; ++i) {
    mass += s.q[i];
    if (!tail && s.q[i] > 0.0) q_logq += s.q[i] * s.logq[i];
  }
  if (!distinct && !all_differ(s.ids.data(), live)) join_repeats(s);
  for (int64_t i = 0; tail && i < s.count; ++i) {
    if (s.q[i] > 0.0) q_logq += s.q[i] * (s.logq[i] == s.logq[i] ? s.logq[i] : std::log(s.q[i]));
  }
  s.mass = mass;
  s.q_logq = q_logq;
  s.tail_q = tail && !(1.0 - mass < kTailFloor) ? 1.0 - mass : 0.0;
}

}  // namespace smopd
