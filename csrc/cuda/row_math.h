// The arithmetic of smopd::loss_rows_cuda: running statistics of a row, the target, the policy terms, the
// gradient. The same functions run in the kernel and, compiled by a host compiler, in its tests.
//
// The definition is loss_rows in kernels/reference_loss.py. A row's sums leave out the target's support: what
// they hold is the student's tail itself, not a difference, and the support is added in one place.
//
// Exponents are differences to the largest logit, (x - max) * scale with scale = log2(e) / temperature, so a
// row of large logits loses nothing and the largest floats do not overflow.

#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define SMOPD_FN __host__ __device__ __forceinline__
#define SMOPD_UNROLL _Pragma("unroll")
#else
#define SMOPD_FN inline
#define SMOPD_UNROLL
#endif

namespace smopd::cuda {

constexpr float kInf = INFINITY;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kDeepest = -1.0e4f;       // exponents below it are as good as -inf, and 0 times it is 0
constexpr float kTailFloor = 0x1p-20f;    // teacher mass outside the support below this counts as 0
constexpr float kLogRatioBound = 20.0f;   // clamp of the log ratio before exp
constexpr int32_t kMaxSupport = 128;      // entries of a target
constexpr int32_t kEmptySlot = -1;        // id of a target's empty slot
constexpr int32_t kBadId = -2;            // an id outside the vocabulary: its logit reads as NaN

enum ClipBit { kClipLow = 1, kClipHigh = 2, kClipDual = 4, kClipLogRatio = 8, kReverseLow = 16, kReverseHigh = 32 };

// A token's inputs beside its logits, in the order in which Arguments::columns holds them.
enum Column { kAdv, kPgWeight, kOldLogp, kKlWeight, kEntWeight, kReverseAdv, kReverseWeight, kColumns };

// The results beside clipped, in the order in which the operator returns them (clipped after the fifth).
enum Term { kLogp, kEntropy, kKl, kTeacherMass, kStudentMass, kSurrogate, kReverse, kTerms };

struct Objective {
  float low, high;  // the ratio's bounds
  float dual;       // +inf: off
  float opd_coef, entropy_coef;
  float temperature, kl_temperature;
  bool has_old, has_target, has_reverse, tail, ppo;

  SMOPD_FN float scale() const { return kLog2E / temperature; }
  SMOPD_FN float kl_scale() const { return kLog2E / kl_temperature; }
};

SMOPD_FN float exp2_of(float t) {
#ifdef __CUDA_ARCH__
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(t));
  return value;
#else
  return t < -126.0f ? 0.0f : exp2f(t);
#endif
}

// Unlike fmaxf and fminf these keep a NaN.
SMOPD_FN float larger(float a, float b) { return a != a || a > b ? a : b; }
SMOPD_FN float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
SMOPD_FN float weighted(float weight, float value) { return weight != 0.0f ? weight * value : 0.0f; }
SMOPD_FN float base_of(float max) { return max == -kInf ? 0.0f : max; }  // -inf less it is -inf, not NaN

SMOPD_FN float bits_as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

SMOPD_FN float from_bf16(uint16_t bits) { return bits_as_float(uint32_t(bits) << 16); }

// Two floats to bf16, nearest even, low in the low half.
SMOPD_FN uint32_t pack_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  const auto rounded = [](float value) -> uint32_t {
    if (value != value) return 0x7fffu;
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
#endif
}

// a row's running statistics, without the target's support

constexpr int32_t kVector = 8;  // elements of 16 bytes

struct alignas(16) Words {
  uint32_t word[kVector / 2];
};

SMOPD_FN void unpack(const Words& words, float (&x)[kVector]) {
  SMOPD_UNROLL
  for (int32_t j = 0; j < kVector / 2; ++j) {
    x[2 * j] = bits_as_float(words.word[j] << 16);
    x[2 * j + 1] = bits_as_float(words.word[j] & 0xffff0000u);
  }
}

struct alignas(16) Stats {
  float max = -kInf;      // of the logits
  float sum = 0.0f;       // of 2^d, d = (x - max) scale
  float weighted = 0.0f;  // of 2^d d
  float kl_sum = 0.0f;    // of 2^d at the scale of the KL; only where it differs
};

// The same statistics told from a larger maximum.
template <bool kTwo>
SMOPD_FN Stats lifted(const Stats& s, float max, float scale, float kl_scale) {
  const float base = base_of(max);
  const float lift = fmaxf((s.max - base) * scale, kDeepest);
  const float factor = exp2_of(lift);
  Stats out;
  out.max = max;
  out.sum = s.sum * factor;
  out.weighted = factor * fmaf(lift, s.sum, s.weighted);
  out.kl_sum = kTwo ? s.kl_sum * exp2_of(fmaxf((s.max - base) * kl_scale, kDeepest)) : 0.0f;
  return out;
}

template <bool kTwo>
SMOPD_FN Stats merged(const Stats& a, const Stats& b, float scale, float kl_scale) {
  const float max = fmaxf(a.max, b.max);
  Stats left = lifted<kTwo>(a, max, scale, kl_scale);
  const Stats right = lifted<kTwo>(b, max, scale, kl_scale);
  left.sum += right.sum;
  left.weighted += right.weighted;
  left.kl_sum += right.kl_sum;
  return left;
}

// NaN: fmaxf passes over it, its 2^d is NaN and stays in the sums. -inf: 2^d is 0.
template <bool kTwo>
SMOPD_FN void add_vector(Stats& s, const float (&x)[kVector], float scale, float kl_scale) {
  float max = x[0];
  SMOPD_UNROLL
  for (int32_t j = 1; j < kVector; ++j) max = fmaxf(max, x[j]);
  if (max > s.max) s = lifted<kTwo>(s, max, scale, kl_scale);
  const float base = base_of(s.max);
  float sum = 0.0f, weighted_sum = 0.0f, kl_sum = 0.0f;
  SMOPD_UNROLL
  for (int32_t j = 0; j < kVector; ++j) {
    const float gap = x[j] - base;
    const float d = gap * scale;
    const float e = exp2_of(d);
    sum += e;
    weighted_sum = fmaf(e, fmaxf(d, kDeepest), weighted_sum);
    if (kTwo) kl_sum += exp2_of(gap * kl_scale);
  }
  s.sum += sum;
  s.weighted += weighted_sum;
  if (kTwo) s.kl_sum += kl_sum;
}

// the target

struct Slot {
  float logq = -kInf;   // of the slot; with tail its first slot holds all repeats, the others nothing
  float q = 0.0f;       // exp(logq)
  float q_sum = 0.0f;   // over the repeats of the id, in its first slot
  bool first = false;   // the first live slot of its id
};

SMOPD_FN Slot slot_of(const int32_t* ids, const float* logqs, int32_t support, int32_t s, bool tail) {
  Slot slot;
  const int32_t id = ids[s];
  if (id == kEmptySlot) {
    if (logqs[s] != logqs[s]) slot.q = logqs[s];  // and with it the teacher's mass
    return slot;
  }
  slot.first = true;
  float peak = -kInf;
  for (int32_t j = 0; j < support; ++j) {
    if (ids[j] != id) continue;
    if (j < s) slot.first = false;
    peak = fmaxf(peak, logqs[j]);
  }
  float mass = 0.0f;
  for (int32_t j = 0; j < support; ++j) {
    if (ids[j] == id) mass += expf(logqs[j] - peak);
  }
  const float all = peak + logf(mass);
  slot.logq = tail ? (slot.first ? all : -kInf) : logqs[s];
  slot.q = expf(slot.logq);
  slot.q_sum = slot.first ? expf(all) : 0.0f;
  return slot;
}

// policy terms of one token: kernels/reference_policy.py

struct Policy {
  float surrogate = 0.0f, slope = 0.0f;
  float reverse = 0.0f, reverse_slope = 0.0f;
  int32_t clipped = 0;
};

SMOPD_FN Policy policy_of(const Objective& o, const float* columns, float logp) {
  const float adv = columns[kAdv];
  const float raw = o.has_old ? logp - columns[kOldLogp] : 0.0f;
  const float ratio = expf(clamped(raw, -kLogRatioBound, kLogRatioBound));
  const float clipped_ratio = clamped(ratio, o.low, o.high);
  const bool saturated = fabsf(raw) > kLogRatioBound;
  const bool below = ratio < o.low, above = ratio > o.high;

  Policy p;
  p.surrogate = larger(-adv * ratio, -adv * clipped_ratio);
  const bool is_low = below && adv < 0.0f, is_high = above && adv > 0.0f;
  const float bound = -o.dual * adv;
  const bool is_dual = adv < 0.0f && p.surrogate > bound;
  if (is_dual) p.surrogate = bound;
  p.slope = is_low || is_high || is_dual || saturated ? 0.0f : -adv * ratio;
  p.clipped = (is_low ? kClipLow : 0) + (is_high ? kClipHigh : 0) + (is_dual ? kClipDual : 0) +
              (saturated ? kClipLogRatio : 0);
  if (!o.has_reverse) return p;

  const float reverse_adv = columns[kReverseAdv];
  bool reverse_low = below, reverse_high = above;
  if (o.ppo) {
    p.reverse = larger(-reverse_adv * ratio, -reverse_adv * clipped_ratio);
    reverse_low = below && reverse_adv < 0.0f;
    reverse_high = above && reverse_adv > 0.0f;
  } else {
    p.reverse = -reverse_adv * clipped_ratio;
  }
  p.reverse_slope = reverse_low || reverse_high || saturated ? 0.0f : -reverse_adv * ratio;
  p.clipped += (reverse_low ? kReverseLow : 0) + (reverse_high ? kReverseHigh : 0);
  return p;
}

// a row's normalisation

// How a logit becomes a log-probability, and the student's share off the support, at both temperatures.
struct Softmax {
  float max;
  float log_sum, kl_log_sum;  // of exp((x - max) / temperature) over the whole row
  float inverse, kl_inverse;  // 1 / temperature

  SMOPD_FN float logp(float x) const { return (x - max) * inverse - log_sum; }
  SMOPD_FN float kl_logp(float x) const { return (x - max) * kl_inverse - kl_log_sum; }
};

// gradient

// One row's gradient in its logits. Off the support, with d = (x - base) scale,
//     2^d (off + curve d) + 2^d' kl_off,
// at the support and at the token by the functions below, in fp32 from the logit itself.
struct Gradient {
  Softmax softmax;
  float base, scale, kl_scale;
  float off, curve, kl_off;
  float slope;      // coefficient of p at the ratio's temperature (and of the KL where there is one temperature)
  float kl_slope;   // coefficient of p at the KL's, where there are two
  float q_coef;     // coefficient of q
  float dentropy, entropy;
  float dlogp;      // over the temperature
  bool zero;        // the token pulls nowhere
};

template <bool kTwo, bool kEntropyGradient>
SMOPD_FN float gradient_off(const Gradient& g, float x) {
  const float gap = x - g.base;
  const float d = gap * g.scale;
  float factor = g.off;
  if (kEntropyGradient) factor = fmaf(g.curve, fmaxf(d, kDeepest), factor);
  float value = exp2_of(d) * factor;
  if (kTwo) value = fmaf(exp2_of(gap * g.kl_scale), g.kl_off, value);
  return value;
}

template <bool kTwo, bool kEntropyGradient>
SMOPD_FN float gradient_at(const Gradient& g, float x, const Slot& slot) {
  const float logp = g.softmax.logp(x);
  float slope = g.slope;
  if (kEntropyGradient) slope -= g.dentropy * (larger(logp, kDeepest) + g.entropy);
  float value = slope * expf(logp) * g.softmax.inverse;
  if (kTwo) value += weighted(g.kl_slope, expf(g.softmax.kl_logp(x)) * g.softmax.kl_inverse);
  return value - weighted(g.q_coef, slot.q_sum);
}

// What a row's terms and gradient are made of, beside its columns.
struct RowSums {
  Stats off;              // both halves
  Softmax softmax;
  float off_logp;         // log of the student's mass off the support
  float off_kl_logp;      // the same at the KL's temperature
  float inside_plogp;     // sum of p log p over the support's ids
  float kl;               // sum of q (log q - log p) over the target's slots
  float teacher_mass, student_mass;
  float target_off;       // the target's mass off the support
};

SMOPD_FN float tail_q_of(const Objective& o, float target_off) {
  return o.has_target && o.tail && target_off >= kTailFloor ? target_off : 0.0f;
}

struct RowResult {
  float term[kTerms];
  int32_t clipped;
  Gradient gradient;
};

template <bool kTwo>
SMOPD_FN RowResult row_result(const Objective& o, const float* columns, float token_logit, const RowSums& r) {
  const bool no_off = r.off.sum == 0.0f;  // every logit off the support is -inf, or there is none
  const float off_mass = expf(r.off_logp);
  const float shift = no_off ? 0.0f : (r.off.max - r.softmax.max) * r.softmax.inverse - r.softmax.log_sum;
  const float inverse_off = no_off ? 0.0f : 1.0f / r.off.sum;
  float off_plogp = off_mass * (r.off.weighted * inverse_off * kLn2 + shift);
  if (no_off) off_plogp = off_mass;  // 0, or the NaN of a row of nothing but -inf

  RowResult out;
  out.term[kLogp] = r.softmax.logp(token_logit);
  const float entropy = -(off_plogp + r.inside_plogp);
  out.term[kEntropy] = entropy;
  const float tail_q = tail_q_of(o, r.target_off);
  out.term[kKl] = r.kl + (tail_q > 0.0f ? tail_q * (logf(tail_q) - r.off_kl_logp) : 0.0f);
  out.term[kTeacherMass] = r.teacher_mass;
  out.term[kStudentMass] = r.student_mass;
  const Policy p = policy_of(o, columns, out.term[kLogp]);
  out.term[kSurrogate] = p.surrogate;
  out.term[kReverse] = p.reverse;
  out.clipped = p.clipped;
  const bool idle = columns[kPgWeight] == 0.0f && columns[kKlWeight] == 0.0f &&
                    columns[kEntWeight] == 0.0f && columns[kReverseWeight] == 0.0f;
  if (idle) {
    for (int32_t k = 0; k < kTerms; ++k) out.term[k] = 0.0f;
    out.clipped = 0;
  }

  const float pg = columns[kPgWeight];
  const bool opd = o.opd_coef != 0.0f;
  const float dkl = o.has_target && opd ? o.opd_coef * columns[kKlWeight] : 0.0f;
  const float dreverse = o.has_reverse && opd ? o.opd_coef * columns[kReverseWeight] : 0.0f;
  const float dentropy = o.entropy_coef != 0.0f ? -o.entropy_coef * columns[kEntWeight] : 0.0f;
  const float dlogp = weighted(pg, p.slope) + weighted(dreverse, p.reverse_slope);
  const float kl_slope = weighted(dkl, r.teacher_mass + tail_q);  // a KL without a coefficient has no part
  const float kl_tail = weighted(dkl, tail_q);

  Gradient& g = out.gradient;
  g.softmax = r.softmax;
  g.base = base_of(r.off.max);
  g.scale = o.scale();
  g.kl_scale = o.kl_scale();
  g.slope = kTwo ? -dlogp : kl_slope - dlogp;
  g.kl_slope = kl_slope;
  const float per_off = inverse_off * r.softmax.inverse;  // from dense probability to the logits
  g.off = (kTwo ? g.slope * off_mass : g.slope * off_mass - kl_tail) * per_off;
  g.off -= dentropy * off_mass * (shift + entropy) * per_off;
  g.curve = -dentropy * off_mass * kLn2 * per_off;
  g.kl_off = 0.0f;
  if (kTwo && dkl != 0.0f) {
    const float inverse_kl_off = r.off.kl_sum == 0.0f ? 0.0f : 1.0f / r.off.kl_sum;
    g.kl_off = (kl_slope * expf(r.off_kl_logp) - kl_tail) * inverse_kl_off * r.softmax.kl_inverse;
  }
  g.q_coef = dkl * r.softmax.kl_inverse;
  g.dentropy = dentropy;
  g.entropy = entropy;
  g.dlogp = dlogp * r.softmax.inverse;
  g.zero = pg == 0.0f && dkl == 0.0f && dreverse == 0.0f && dentropy == 0.0f;
  return out;
}

}  // namespace smopd::cuda
