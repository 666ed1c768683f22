// The support of a forward KL: the distinct ids of a sparse target, with what the KL needs of each.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace smopd {

constexpr double kTailFloor = 0x1p-20;  // teacher mass off the support below this counts as 0

// Finds repeats among a row's ids in constant time each. A new row needs no clearing, only a new stamp.
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

  // The place under which this row has seen the id, or `place`, which it has from now on.
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

struct Support {
  int64_t count = 0;
  std::vector<int32_t> ids;    // distinct
  std::vector<float> logits;   // the student's there
  std::vector<double> q;       // the target's probability there, repeats summed
  std::vector<double> logq;    // its logarithm, NaN for a sum
  std::vector<double> p;       // the student's probability there, at the KL's temperature
  double mass = 0.0;           // Q: of all slots
  double q_logq = 0.0;         // sum of q log q over slots, over distinct ids where merged
  double tail_q = 0.0;         // 1 - Q, 0 below the floor; 0 without tail
  IdTable table;

  explicit Support(int64_t capacity)
      : ids(capacity), logits(capacity), q(capacity), logq(capacity), p(capacity), table(capacity) {}
};

// Fills the support from a row's slots; -inf marks an empty one. `distinct`: there are no repeats.
// With tail, repeats are one entry of their summed probability; without, each slot keeps its own term.
template <typename IdAt, typename LogpAt>
inline void fill_support(Support& s, int64_t slots, bool tail, bool distinct, IdAt id_at, LogpAt logp_at) {
  s.count = 0;
  s.mass = 0.0;
  s.q_logq = 0.0;
  if (!distinct) s.table.start_row();
  for (int64_t slot = 0; slot < slots; ++slot) {
    const double logp = logp_at(slot);
    if (logp == -std::numeric_limits<double>::infinity()) continue;
    const double q = std::exp(logp);
    s.mass += q;
    if (logp != logp) {  // the mass is NaN now, and with it the gradient
      s.q_logq = logp;
      continue;
    }
    const int32_t id = id_at(slot);
    const int64_t place = distinct ? s.count : s.table.place_of(id, s.count);
    if (place == s.count) {
      s.ids[place] = id;
      s.q[place] = q;
      s.logq[place] = logp;
      ++s.count;
      if (!tail && q > 0.0) s.q_logq += q * logp;
    } else {
      s.q[place] += q;
      s.logq[place] = std::numeric_limits<double>::quiet_NaN();  // of a sum: taken below
      if (!tail && q > 0.0) s.q_logq += q * logp;
    }
  }
  s.tail_q = 0.0;
  if (!tail) return;
  for (int64_t i = 0; i < s.count; ++i) {
    const double q = s.q[i];
    if (q > 0.0) s.q_logq += q * (s.logq[i] == s.logq[i] ? s.logq[i] : std::log(q));
  }
  const double rest = 1.0 - s.mass;
  s.tail_q = rest < kTailFloor ? 0.0 : rest;
}

}  // namespace smopd
