// The union of several teachers' sparse log-probabilities: pooled (repeats stay) or merged by logsumexp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support.h"
#include "topk.h"

namespace smopd {

// sorted becomes the places 0..count-1 by descending key; the first `kept` of them at least. Keys differ.
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

  // Keeps the `kappa` best of the candidates. Ties go to the lower id when merged, else to the lower teacher
  // and then to its own order; NaN comes first. -inf is no candidate.
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

  // Where an id came more than once its largest log-probability becomes the logsumexp of them all.
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
      sums_[place] = 1.0f;  // once
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

}  // namespace smopd
