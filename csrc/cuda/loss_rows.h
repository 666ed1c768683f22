// The kernel of smopd::loss_rows_cuda, written once for the GPU (hopper.cuh) and for threads of the host
// (emulated.h), which differ in the Machine: barriers, bulk copies, shuffles.
//
// NEVER RUN ON A GPU SO FAR: compiled for sm_90, and run, also under ThreadSanitizer, in the emulation alone.
//
// A cluster of two thread blocks takes one row at a time, each block half of it, and walks over the rows
// n = cluster, cluster + clusters, ... The logits are read from device memory once and the gradient is written
// once, in place or not. A half is a number of chunks that pass through a ring of slots in shared memory:
//
//     statistics   wait for each chunk as it arrives; every thread keeps its own running sums
//     merge        threads, warps, then the two blocks, which write their sums into each other's memory
//     result       warp 0 of both blocks: target, policy terms, coefficients of the gradient
//     gradient     chunk by chunk from shared memory to device memory; a chunk that is done makes room for
//                  the load of the chunk one ring further, which belongs to a row to come
//     corrections  the support's and the token's entries, again in fp32, over what the pass wrote there
//
// The support's entries are read from device memory ahead, while the gradient of the row before is made, and
// left out of the statistics by one bit each (holes), so that the sum is the student's tail itself.
// Nothing is summed by atomics and every order is fixed: repeated runs agree bitwise, and a row depends on no
// other row. Each chunk's load completes on a barrier of its own; a use u of the ring is slot u % kRing in its
// phase u / kRing, and is issued only after every thread has left use u - kRing.
//
// Not done: rows of weight zero are loaded like others; vocabularies above capacity() are not served; the merge's
// cluster barrier is a full fence in each row, which st.async onto an mbarrier would avoid.

#pragma once

#include "row_layout.h"

namespace smopd::cuda {

constexpr int32_t kWarp = 32;
constexpr int32_t kVectorsPerThread = 2;  // of a chunk

struct Arguments {
  const uint16_t* logits;  // bf16
  int64_t logits_stride;   // elements between rows
  uint16_t* grad;          // null: no gradient; may be the logits
  int64_t grad_stride;
  int32_t rows, vocab, support;
  const int32_t* token_ids;        // (N,)
  const int32_t* target_ids;       // (N, S)
  const float* target_logps;       // (N, S)
  const float* columns[kColumns];  // (N,) each; null: absent, read as 0
  float* terms[kTerms];            // (N,) each
  int8_t* clipped;                 // (N,)
  Objective objective;
};

template <typename Machine>
struct Geometry {
  static constexpr int32_t kWarps = Machine::kThreads / kWarp;
  static constexpr int32_t kChunkVectors = Machine::kThreads * kVectorsPerThread;
  static constexpr int32_t kHoleWords = Machine::kRing * kChunkVectors * kVector / 32;

  static SMOPD_FN constexpr int32_t capacity() {  // the largest vocabulary
    return kBlocks * Machine::kRing * kChunkVectors * kVector - 2 * kVector;
  }
};

// What a block shares beside the ring.
template <typename Machine>
struct Shared {
  alignas(16) typename Machine::Barrier loaded[Machine::kRing];
  Stats warps[Geometry<Machine>::kWarps];
  Stats halves[2][kBlocks];  // [parity of the row][block]: the next row's come while these are read
  RowResult result;
  float columns[kColumns];
  int32_t ids[kMaxSupport + 1];  // the token's stands behind the support's
  float logits[kMaxSupport + 1];
  float logqs[kMaxSupport];
  Slot slots[kMaxSupport];
  uint32_t holes[Geometry<Machine>::kHoleWords];  // a bit for each element of the half
};

// What a thread has read ahead for the next row: a slot of the target (or the token) and a column.
struct Ahead {
  int32_t id = kEmptySlot;
  float logit = 0.0f, logq = -kInf, column = 0.0f;
};

SMOPD_FN const uint16_t* row_of(const Arguments& a, int32_t n) { return a.logits + int64_t(n) * a.logits_stride; }

SMOPD_FN Ahead read_ahead(const Arguments& a, int32_t n, int32_t thread) {
  Ahead ahead;
  if (n >= a.rows) return ahead;
  if (thread < kColumns) {
    const float* column = a.columns[thread];
    if (thread == kReverseWeight && column == nullptr && a.objective.has_reverse) column = a.columns[kKlWeight];
    if (column != nullptr) ahead.column = column[n];
  }
  if (thread > a.support) return ahead;
  if (thread < a.support) {
    const int64_t place = int64_t(n) * a.support + thread;
    ahead.logq = a.target_logps[place];
    if (!(ahead.logq > -kInf)) return ahead;  // NaN too: no entry, but slot_of's q is NaN
    ahead.id = a.target_ids[place];
  } else {
    ahead.id = a.token_ids[n];
  }
  const bool inside = ahead.id >= 0 && ahead.id < a.vocab;
  ahead.logit = inside ? from_bf16(row_of(a, n)[ahead.id]) : NAN;
  if (!inside) ahead.id = kBadId;
  return ahead;
}

// Eight logits of the row; -inf before and behind it.
SMOPD_FN void read_vector(const Layout& layout, const Words* slot, const Range& chunk, const uint16_t* row,
                          int32_t vector, float (&x)[kVector]) {
  if (layout.full.holds(vector)) {
    unpack(slot[vector - chunk.begin], x);
    return;
  }
  SMOPD_UNROLL
  for (int32_t j = 0; j < kVector; ++j) {
    const int32_t id = layout.first_id(vector) + j;
    x[j] = id >= 0 && id < layout.vocab ? from_bf16(row[id]) : -kInf;
  }
}

template <typename Machine>
SMOPD_FN void write_vector(Machine& machine, const Layout& layout, uint16_t* grad_row, int32_t vector,
                           const float (&value)[kVector]) {
  const int32_t id = layout.first_id(vector);
  Words words;
  SMOPD_UNROLL
  for (int32_t j = 0; j < kVector / 2; ++j) words.word[j] = pack_bf16(value[2 * j], value[2 * j + 1]);
  if (layout.full.holds(vector) && uint64_t(grad_row + id) % sizeof(Words) == 0) {  // aligned like the logits
    machine.store(reinterpret_cast<Words*>(grad_row + id), words);
    return;
  }
  SMOPD_UNROLL
  for (int32_t j = 0; j < kVector; ++j) {
    if (id + j >= 0 && id + j < layout.vocab) {
      grad_row[id + j] = uint16_t(words.word[j / 2] >> (j % 2 * 16));
    }
  }
}

template <typename Machine, bool kTwo>
SMOPD_FN Stats over_lanes(Machine& machine, Stats s, float scale, float kl_scale) {
  SMOPD_UNROLL
  for (int32_t mask = kWarp / 2; mask > 0; mask /= 2) {
    Stats other;
    other.max = machine.shuffle_xor(s.max, mask);
    other.sum = machine.shuffle_xor(s.sum, mask);
    other.weighted = machine.shuffle_xor(s.weighted, mask);
    if (kTwo) other.kl_sum = machine.shuffle_xor(s.kl_sum, mask);
    s = merged<kTwo>(s, other, scale, kl_scale);
  }
  return s;
}

template <typename Machine, typename T>
SMOPD_FN T sum_over_lanes(Machine& machine, T value) {
  SMOPD_UNROLL
  for (int32_t mask = kWarp / 2; mask > 0; mask /= 2) value += machine.shuffle_xor(value, mask);
  return value;
}

template <typename Machine>
SMOPD_FN float max_over_lanes(Machine& machine, float value) {
  SMOPD_UNROLL
  for (int32_t mask = kWarp / 2; mask > 0; mask /= 2) value = fmaxf(value, machine.shuffle_xor(value, mask));
  return value;
}

// By the 32 threads of a warp; each takes every 32nd slot. Every lane returns the same.
template <typename Machine, bool kTwo>
SMOPD_FN RowSums sums_of(Machine& machine, const Arguments& a, const Shared<Machine>& shared, const Stats& off,
                         int32_t lane) {
  const Objective& o = a.objective;
  RowSums r;
  r.off = off;
  Softmax& softmax = r.softmax;
  softmax.inverse = 1.0f / o.temperature;
  softmax.kl_inverse = 1.0f / o.kl_temperature;

  float max = off.max;
  for (int32_t s = lane; s < a.support; s += kWarp) {
    if (shared.slots[s].first) max = fmaxf(max, shared.logits[s]);
  }
  softmax.max = max_over_lanes(machine, max);

  float inside = 0.0f, kl_inside = 0.0f;
  double mass = 0.0;  // the mass off the support is 1 less this
  for (int32_t s = lane; s < a.support; s += kWarp) {
    const Slot& slot = shared.slots[s];
    const float gap = shared.logits[s] - softmax.max;
    if (slot.first) inside += expf(gap * softmax.inverse);
    if (slot.first && kTwo) kl_inside += expf(gap * softmax.kl_inverse);
    if (shared.logqs[s] > -kInf) mass += exp(double(shared.logqs[s]));
  }
  const float lift = off.max - softmax.max;  // NaN in a row of nothing but -inf, and so is all below
  softmax.log_sum =
      logf(sum_over_lanes(machine, inside) + (lift == -kInf ? 0.0f : off.sum * expf(lift * softmax.inverse)));
  softmax.kl_log_sum = softmax.log_sum;
  if (kTwo) {
    const float kl_off = lift == -kInf ? 0.0f : off.kl_sum * expf(lift * softmax.kl_inverse);
    softmax.kl_log_sum = logf(sum_over_lanes(machine, kl_inside) + kl_off);
  }
  r.target_off = float(1.0 - sum_over_lanes(machine, mass));
  r.off_logp = lift * softmax.inverse + logf(off.sum) - softmax.log_sum;
  r.off_kl_logp = kTwo ? lift * softmax.kl_inverse + logf(off.kl_sum) - softmax.kl_log_sum : r.off_logp;

  float plogp = 0.0f, kl = 0.0f, teacher_mass = 0.0f, student_mass = 0.0f;
  for (int32_t s = lane; s < a.support; s += kWarp) {
    const Slot& slot = shared.slots[s];
    const float logp = softmax.logp(shared.logits[s]);
    const float kl_logp = kTwo ? softmax.kl_logp(shared.logits[s]) : logp;
    if (slot.first) plogp += expf(logp) * larger(logp, kDeepest);
    if (slot.first) student_mass += expf(kl_logp);
    if (slot.q != 0.0f) kl += slot.q * (slot.logq - kl_logp);  // != 0: NaN is
    teacher_mass += slot.q;
  }
  r.inside_plogp = sum_over_lanes(machine, plogp);
  r.kl = sum_over_lanes(machine, kl);
  r.teacher_mass = sum_over_lanes(machine, teacher_mass);
  r.student_mass = sum_over_lanes(machine, student_mass);
  if (r.teacher_mass != r.teacher_mass) r.student_mass = r.teacher_mass;
  return r;
}

// Starts the load of use u of the ring, if the cluster has a row for it. One thread of each block.
template <typename Machine>
SMOPD_FN void load_use(Machine& machine, const Arguments& a, Shared<Machine>& shared, Words* ring, int32_t chunks,
                       int32_t u) {
  constexpr int32_t kChunkVectors = Geometry<Machine>::kChunkVectors;
  const int32_t n = machine.cluster() + u / chunks * machine.clusters();
  if (n >= a.rows) return;
  const uint16_t* row = row_of(a, n);
  const Layout layout(uint64_t(row), a.vocab, machine.rank());
  const Range chunk = layout.chunk(u % chunks, kChunkVectors);
  const Range bulk = layout.bulk(chunk);
  const int32_t slot = u % Machine::kRing;
  machine.expect(shared.loaded[slot], bulk.size() * int32_t(sizeof(Words)));
  if (bulk.size() == 0) return;
  machine.load(ring + slot * kChunkVectors + (bulk.begin - chunk.begin), row + layout.first_id(bulk.begin),
               bulk.size() * int32_t(sizeof(Words)), shared.loaded[slot]);
}

template <typename Machine, bool kTwo, bool kEntropyGradient>
SMOPD_FN void loss_rows_block(Machine& machine, const Arguments& a, Shared<Machine>& shared, Words* ring) {
  constexpr int32_t kThreads = Machine::kThreads, kRing = Machine::kRing;
  constexpr int32_t kChunkVectors = Geometry<Machine>::kChunkVectors;
  static_assert(kThreads % kWarp == 0 && kThreads / kWarp <= kWarp);
  const int32_t thread = machine.thread(), warp = thread / kWarp, lane = thread % kWarp;
  const float scale = a.objective.scale(), kl_scale = a.objective.kl_scale();
  const int32_t chunks = chunks_of(a.vocab, kChunkVectors);

  for (int32_t i = thread; i < Geometry<Machine>::kHoleWords; i += kThreads) shared.holes[i] = 0;
  if (thread == 0) machine.initialise(shared.loaded, kRing);
  machine.sync_cluster();  // barriers are ready, and the other block runs: its memory may be written
  if (thread == 0) {
    for (int32_t u = 0; u < kRing; ++u) load_use(machine, a, shared, ring, chunks, u);
  }

  Ahead ahead = read_ahead(a, machine.cluster(), thread);
  int32_t first_use = 0, parity = 0;
  for (int32_t n = machine.cluster(); n < a.rows; n += machine.clusters(), first_use += chunks, parity ^= 1) {
    const uint16_t* row = row_of(a, n);
    const Layout layout(uint64_t(row), a.vocab, machine.rank());

    // What was read ahead becomes the block's. Thread s alone touches slot s until the next barrier.
    const bool has_slot = thread <= a.support;
    const int32_t place = (layout.vector_of(ahead.id) - layout.half.begin) * kVector + layout.lane_of(ahead.id);
    const bool mine = has_slot && ahead.id >= 0 && layout.half.holds(layout.vector_of(ahead.id));
    const bool is_hole = mine && thread < a.support;
    const int32_t id = ahead.id;
    const float logit = ahead.logit;
    if (thread < kColumns) shared.columns[thread] = ahead.column;
    if (has_slot) shared.ids[thread] = id, shared.logits[thread] = logit;
    if (thread < a.support) shared.logqs[thread] = ahead.logq;
    if (is_hole) machine.atomic_or(shared.holes[place / 32], 1u << place % 32);
    machine.sync_block();
    Slot slot;
    bool corrects = mine, is_token = mine && id == shared.ids[a.support];
    if (thread < a.support) {
      slot = slot_of(shared.ids, shared.logqs, a.support, thread, a.objective.tail);
      shared.slots[thread] = slot;
      corrects = mine && slot.first;
    } else if (mine) {
      for (int32_t s = 0; s < a.support; ++s) corrects = corrects && shared.ids[s] != id;
    }

    // Statistics of this thread's vectors, off the support.
    Stats stats;
    for (int32_t c = 0; c < chunks; ++c) {
      const int32_t u = first_use + c;
      const int32_t ring_slot = u % kRing;
      const Range chunk = layout.chunk(c, kChunkVectors);
      machine.wait(shared.loaded[ring_slot], u / kRing % 2);
      SMOPD_UNROLL
      for (int32_t k = 0; k < kVectorsPerThread; ++k) {
        const int32_t vector = chunk.begin + k * kThreads + thread;
        if (vector >= chunk.end) continue;
        float x[kVector];
        read_vector(layout, ring + ring_slot * kChunkVectors, chunk, row, vector, x);
        const int32_t local = vector - layout.half.begin;
        const uint32_t holes = shared.holes[local / 4] >> local % 4 * kVector & 0xffu;
        if (holes != 0) {
          SMOPD_UNROLL
          for (int32_t j = 0; j < kVector; ++j) x[j] = holes >> j & 1u ? -kInf : x[j];
        }
        add_vector<kTwo>(stats, x, scale, kl_scale);
      }
    }

    // Threads, warps, blocks, in a fixed order. Both blocks come to the same sums.
    stats = over_lanes<Machine, kTwo>(machine, stats, scale, kl_scale);
    if (lane == 0) shared.warps[warp] = stats;
    machine.sync_block();
    if (is_hole) machine.atomic_and(shared.holes[place / 32], ~(1u << place % 32));
    if (warp == 0) {
      Stats half;
      if (lane < Geometry<Machine>::kWarps) half = shared.warps[lane];
      half = over_lanes<Machine, kTwo>(machine, half, scale, kl_scale);
      if (lane == 0) {
        Stats& own = shared.halves[parity][machine.rank()];
        own = half;
        *machine.in_other_block(&own) = half;
      }
    }
    machine.sync_cluster();  // both blocks are also done with reading what the gradient overwrites
    if (warp == 0) {
      const Stats off =
          merged<kTwo>(shared.halves[parity][0], shared.halves[parity][1], scale, kl_scale);
      const RowSums sums = sums_of<Machine, kTwo>(machine, a, shared, off, lane);
      if (lane == 0) {
        const RowResult result =
            row_result<kTwo>(a.objective, shared.columns, shared.logits[a.support], sums);
        shared.result = result;
        if (machine.rank() == 0) {
          for (int32_t k = 0; k < kTerms; ++k) a.terms[k][n] = result.term[k];
          a.clipped[n] = int8_t(result.clipped);
        }
      }
    }
    machine.sync_block();

    // The gradient off the support; at the support it writes nonsense, which the corrections replace.
    const Gradient gradient = shared.result.gradient;
    uint16_t* grad_row = a.grad == nullptr ? nullptr : a.grad + int64_t(n) * a.grad_stride;
    ahead = read_ahead(a, n + machine.clusters(), thread);
    for (int32_t c = 0; c < chunks; ++c) {
      const int32_t u = first_use + c;
      const int32_t ring_slot = u % kRing;
      const Range chunk = layout.chunk(c, kChunkVectors);
      SMOPD_UNROLL
      for (int32_t k = 0; k < kVectorsPerThread; ++k) {
        const int32_t vector = chunk.begin + k * kThreads + thread;
        if (grad_row == nullptr || vector >= chunk.end) continue;
        float x[kVector];
        read_vector(layout, ring + ring_slot * kChunkVectors, chunk, row, vector, x);
        SMOPD_UNROLL
        for (int32_t j = 0; j < kVector; ++j) {
          x[j] = gradient.zero ? 0.0f : gradient_off<kTwo, kEntropyGradient>(gradient, x[j]);
        }
        write_vector(machine, layout, grad_row, vector, x);
      }
      machine.sync_block();  // the slot is free, and the corrections come after the writes above
      if (thread == 0) load_use(machine, a, shared, ring, chunks, u + kRing);
    }

    // Corrections: thread s for slot s, each id once; the token where the support does not hold it. From here
    // to the next barrier a thread reads nothing that another writes.
    if (grad_row == nullptr || gradient.zero || !corrects) continue;
    float value = is_hole ? gradient_at<kTwo, kEntropyGradient>(gradient, logit, slot)
                          : gradient_off<kTwo, kEntropyGradient>(gradient, logit);
    if (is_token) value += gradient.dlogp;
    grad_row[id] = uint16_t(pack_bf16(value, 0.0f));
  }
  machine.sync_cluster();  // no block leaves before the other is done with its memory
}

}  // namespace smopd::cuda
