// Where the elements of a row lie: which vectors of 16 bytes each of the two thread blocks holds, which of
// them may be copied in bulk, and which slot of the ring a chunk of them goes to.
//
// Vectors are counted from the 16-byte boundary at or before the row's first element, so the first and the
// last may be partial where the row does not begin or end on a boundary (an odd vocabulary, a view).

#pragma once

#include "row_math.h"

namespace smopd::cuda {

constexpr int32_t kBlocks = 2;  // thread blocks of a cluster; each holds one half of the row

struct Range {
  int32_t begin, end;

  SMOPD_FN int32_t size() const { return end > begin ? end - begin : 0; }
  SMOPD_FN bool holds(int32_t i) const { return i >= begin && i < end; }
};

struct Layout {
  int32_t shift;  // elements of vector 0 that lie before the row
  int32_t vocab;
  Range half;     // this block's vectors
  Range full;     // those of them that lie in the row whole

  SMOPD_FN Layout(uint64_t address, int32_t vocab, int32_t rank)
      : shift(int32_t(address % 16 / 2)), vocab(vocab) {
    const int32_t vectors = (shift + vocab + kVector - 1) / kVector;
    const int32_t middle = (vectors + 1) / 2;
    half = rank == 0 ? Range{0, middle} : Range{middle, vectors};
    const int32_t first = shift > 0 ? 1 : 0, last = (shift + vocab) / kVector;
    full = {half.begin > first ? half.begin : first, half.end < last ? half.end : last};
  }

  SMOPD_FN int32_t vector_of(int32_t id) const { return (id + shift) / kVector; }
  SMOPD_FN int32_t lane_of(int32_t id) const { return (id + shift) % kVector; }
  SMOPD_FN int32_t first_id(int32_t vector) const { return vector * kVector - shift; }  // may be < 0

  SMOPD_FN Range chunk(int32_t c, int32_t chunk_vectors) const {
    const int32_t begin = half.begin + c * chunk_vectors;
    const int32_t end = begin + chunk_vectors;
    return {begin, end < half.end ? end : half.end};
  }

  // The part of a chunk that is copied in bulk.
  SMOPD_FN Range bulk(const Range& chunk) const {
    return {chunk.begin > full.begin ? chunk.begin : full.begin, chunk.end < full.end ? chunk.end : full.end};
  }
};

// Chunks of a half, the same for every row however it is aligned.
SMOPD_FN int32_t chunks_of(int32_t vocab, int32_t chunk_vectors) {
  const int32_t vectors = (kVector - 1 + vocab + kVector - 1) / kVector;
  return ((vectors + 1) / 2 + chunk_vectors - 1) / chunk_vectors;
}

}  // namespace smopd::cuda
