// The loss's two passes over a tile of logits (rows x a piece of the vocabulary) on the CPU: `scan` takes its
// logits into the rows' sums, `gradient` replaces them by the loss's gradient. The definition is
// kernels/reference/tiles.py; what happens to a row is in rows.h.
//
// Shapes: N rows, P a piece, S support entries, C and K columns. Rows are independent and each is computed by
// one thread in one order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "rows.h"

namespace smopd {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// float64, a column of the rows' numbers after the other.
struct Columns {
  double* data;
  int64_t stride_c;
  int64_t stride_n;

  double& at(int64_t column, int64_t n) const { return data[column * stride_c + n * stride_n]; }
};

// Columns of one level, and those after the levels: of the sums, and of what the gradient takes.
enum Sum { kPeak, kTotal, kSlope, kSums };
enum Part { kBase, kLogTotal, kStreamPeak, kLogStream, kParts };
enum Pull { kLogpPull, kKlPull, kEntropyPull, kEntropy, kMass, kTailQ, kIdle, kPulls };

struct Arguments {
  const char* op;
  Logits tile;
  int64_t column;  // of the vocabulary, where the piece begins
  Ids token_ids;
  Ids ids;
  int64_t slots;
  const bool* live;  // whether a row has any support
  int64_t stride_live;
  const double* q;
  int64_t stride_q_n;
  int64_t stride_q_s;
  Columns columns;
  RowSettings row;

  bool has_target() const { return ids.data != nullptr; }
  int64_t levels() const { return has_target() && row.temperature != row.kl_temperature ? 2 : 1; }
  bool is_live(int64_t n) const { return live[n * stride_live]; }

  // The place of an id in the piece, or -1.
  int64_t place_of(int64_t id) const {
    const uint64_t place = uint64_t(id) - uint64_t(column);
    return place < uint64_t(tile.vocab) ? int64_t(place) : -1;
  }
};

struct Sums {
  double peak;
  double total;
  double slope;
};

// Relative to the piece's largest logit. A NaN is no peak to a stream, but it is to the sums.
Sums sums_of(const Softmax& z) {
  const double origin = double(z.reference);
  const bool streamed = z.reference > -kInfinity;
  const double unit = streamed ? std::exp2(z.exponent.shift - origin * double(z.scale)) : 1.0;
  Sums sums{origin / z.temperature, unit * z.sum, unit * z.dot / z.temperature};
  if (z.sum != z.sum) {
    sums.total = sums.slope = kNaN;
    if (z.reference < kInfinity) sums.peak = kNaN;
  }
  return sums;
}

Sums moved(const Sums& part, double peak) {
  const double shift = part.peak == kMinusInfinity ? 0.0 : part.peak - peak;
  const double scale = std::exp(shift);
  return {peak, part.total * scale, (part.slope + shift * part.total) * scale};
}

Sums joined(const Sums& one, const Sums& other) {
  const double higher = one.peak > other.peak ? one.peak : other.peak;
  const double peak = one.peak != one.peak ? one.peak : higher;
  const Sums left = moved(one, peak);
  const Sums right = moved(other, peak);
  return {peak, left.total + right.total, left.slope + right.slope};
}

template <typename T>
void scan_row(const Arguments& a, int64_t n, RowWork& work, Support& held_out) {
  const T* const logits = a.tile.row<T>(n);
  const int64_t picked = kSums * a.levels();
  const int64_t token = a.place_of(a.token_ids.at(n, 0, 0));
  if (token >= 0) a.columns.at(picked, n) = double(to_float(logits[token]));
  held_out.count = 0;
  held_out.table.start_row();
  for (int64_t s = 0; s < a.slots; ++s) {
    const int64_t place = a.place_of(a.ids.at(n, 0, s));
    if (place < 0) continue;
    const float logit = to_float(logits[place]);
    a.columns.at(picked + 1 + s, n) = double(logit);
    const int64_t count = held_out.count;
    if (!a.is_live(n) || held_out.table.place_of(int32_t(place), count) != count) continue;
    held_out.ids[count] = int32_t(place);
    held_out.logits[count] = logit;
    ++held_out.count;
  }
  Row<T> row{logits, a.tile.vocab, token, &held_out, a.row, nullptr};
  row.same = a.levels() == 1;
  row.policy = start_softmax(a.row.temperature, &work.shifts);
  if (!row.same) row.kl = start_softmax(a.row.kl_temperature, &work.kl_shifts);
  stream_blocks(row);
  for (int64_t level = 0; level < a.levels(); ++level) {
    const auto known = [&](Sum sum) -> double& { return a.columns.at(kSums * level + sum, n); };
    Sums sums{known(kPeak), known(kTotal), known(kSlope)};
    sums = joined(sums, sums_of(level == 0 ? row.policy : row.kl));
    for (int64_t i = 0; a.row.tail && !row.same && level == 0 && i < held_out.count; ++i) {
      const double logit = double(held_out.logits[i]);
      sums = joined(sums, {logit / a.row.temperature, logit > kMinusInfinity ? 1.0 : 0.0, 0.0});
    }
    known(kPeak) = sums.peak;
    known(kTotal) = sums.total;
    known(kSlope) = sums.slope;
  }
}

// The row's softmax over the whole vocabulary, from the columns.
Softmax softmax_of(
    const Arguments& a, int64_t n, int64_t level, double temperature, bool off_support,
    std::vector<double>* shifts) {
  const auto part = [&](Part index) { return a.columns.at(kParts * level + index, n); };
  Softmax z = start_softmax(temperature, shifts);
  const double peak = part(kStreamPeak);
  const bool streamed = peak > kMinusInfinity;
  z.origin = double(float(part(kBase) * temperature));
  z.base = std::ceil(z.origin * double(z.scale));
  z.reference = streamed ? float(peak * temperature) : float(z.origin);
  z.exponent = exponent_at(z.reference, z.scale);
  const double log_total = part(kLogTotal);
  z.log2_total = log_total > kMinusInfinity ? kLog2E * log_total : kNaN;
  z.log2_stream = z.log2_total;
  if (off_support) {
    const double log2_stream = z.log2_weight(z.reference) + kLog2E * part(kLogStream);
    z.log2_stream = streamed ? log2_stream : kMinusInfinity;
  }
  return z;
}

// The support's entries in the piece, with their logits.
template <typename T>
void find_support(const Arguments& a, int64_t n, const Row<T>& row, Support& s) {
  s.count = 0;
  s.table.start_row();
  for (int64_t slot = 0; slot < a.slots && a.is_live(n); ++slot) {
    const int64_t id = a.place_of(a.ids.at(n, 0, slot));
    if (id < 0) continue;
    const double q = a.q[n * a.stride_q_n + slot * a.stride_q_s];
    const int64_t place = s.table.place_of(int32_t(id), s.count);
    if (place < s.count) {
      s.q[place] += q;
      continue;
    }
    s.ids[place] = int32_t(id);
    s.q[place] = q;
    s.logits[place] = to_float(row.logits[id]);
    s.p[place] = std::exp2(row.kl.log2_p(s.logits[place]));
    ++s.count;
  }
}

template <typename T>
void gradient_row(const Arguments& a, int64_t n, RowWork& work, Support& support) {
  const int64_t levels = a.levels();
  const auto pull = [&](Pull index) { return a.columns.at(kParts * levels + index, n); };
  T* const tile = a.tile.row<T>(n);
  if (pull(kIdle) != 0.0) {
    std::fill(tile, tile + a.tile.vocab, narrow<T>(0.0f));
    return;
  }
  Row<T> row{tile, a.tile.vocab, a.place_of(a.token_ids.at(n, 0, 0)), nullptr, a.row, tile};
  row.same = levels == 1;
  const bool off_support = a.has_target() && a.row.tail;
  row.policy = softmax_of(a, n, 0, a.row.temperature, row.same && off_support, &work.shifts);
  row.kl = row.policy;
  if (!row.same) row.kl = softmax_of(a, n, 1, a.row.kl_temperature, off_support, &work.kl_shifts);
  row.entropy = pull(kEntropy);
  if (row.token >= 0) row.token_logit = to_float(tile[row.token]);
  if (a.has_target()) {
    row.support = &support;
    support.mass = pull(kMass);
    support.tail_q = pull(kTailQ);
    find_support(a, n, row, support);
  }
  place_exponentials(row, work);
  // A support's logit may be above the shift, which is of the stream: its entry and these sums are not used.
  for (int64_t start = 0; start < row.vocab; start += kBlockLength) {
    const int64_t length = std::min(kBlockLength, row.vocab - start);
    const T* const ahead = start + kAhead + kBlockLength <= row.vocab ? tile + start + kAhead : nullptr;
    if (!row.same) {
      block_exponentials(tile + start, row.kl_exponentials + start, length, row.kl.exponent, ahead);
      work.kl_shifts.push_back(row.kl.exponent.shift);
    }
    block_exponentials(tile + start, row.exponentials + start, length, row.policy.exponent, ahead);
    work.shifts.push_back(row.policy.exponent.shift);
  }
  row_gradient(row, {pull(kLogpPull), pull(kKlPull), pull(kEntropyPull)});
}

Arguments read_arguments(
    const char* op, const Tensor& tile, int64_t column, const Tensor& token_ids,
    const std::optional<Tensor>& ids, const std::optional<Tensor>& live, const Tensor& columns,
    const RowSettings& settings) {
  Arguments a{};
  a.op = op;
  a.tile = read_logits(op, "tile", tile);
  a.column = column;
  a.row = settings;
  check_temperature(op, "temperature", settings.temperature);
  check_temperature(op, "kl_temperature", settings.kl_temperature);
  const int64_t rows = a.tile.rows;
  SMOPD_REQUIRE(op, column >= 0, "column is ", column, ", expected at least 0");
  SMOPD_REQUIRE(op, token_ids.dim() == 1 && token_ids.size(0) == rows,
                "token_ids has to be of shape (N,) = (", rows, ",)");
  a.token_ids = read_ids(op, "token_ids", token_ids);
  SMOPD_REQUIRE(op, ids.has_value() == live.has_value(), "ids and live have to come together");
  if (ids.has_value()) {
    static const int64_t no_id = 0;
    SMOPD_REQUIRE(op, ids->dim() == 2 && ids->size(0) == rows,
                  "ids has to have two dimensions and N = ", rows, " rows");
    a.ids = read_ids(op, "ids", *ids);
    if (a.ids.data == nullptr) a.ids.data = &no_id;  // an empty tensor has no memory, yet it is present
    a.slots = ids->size(1);
    SMOPD_REQUIRE(op, live->is_cpu() && live->dim() == 1 && live->size(0) == rows &&
                      live->scalar_type() == ScalarType::Bool,
                  "live has to be a CPU tensor of bool and shape (N,) = (", rows, ",)");
    a.live = static_cast<const bool*>(live->data_ptr());
    a.stride_live = live->stride(0);
  }
  SMOPD_REQUIRE(op, columns.is_cpu() && columns.dim() == 2 && columns.scalar_type() == ScalarType::Double &&
                    columns.size(1) == rows,
                "the columns have to be a CPU tensor of float64 and shape (columns, N = ", rows, ")");
  a.columns = {static_cast<double*>(columns.data_ptr()), columns.stride(0), columns.stride(1)};
  return a;
}

void check_columns(const Arguments& a, const Tensor& columns, int64_t expected) {
  SMOPD_REQUIRE(a.op, columns.size(0) == expected, "there are ", columns.size(0), " columns, expected ",
                expected);
}

using RowFunction = void (*)(const Arguments&, int64_t, RowWork&, Support&);

void each_row(const Arguments& a, RowFunction function) {
  torch::stable::parallel_for(
      0, a.tile.rows, rows_per_thread(a.tile.vocab), [&](int64_t begin, int64_t end) {
        RowWork work;
        Support support(a.slots);
        for (int64_t n = begin; n < end; ++n) function(a, n, work, support);
      });
}

// tile (N, P) float32, bfloat16 or float16, unit stride along P: the vocabulary from `column` on. token_ids
// (N,), ids (N, S) int64 or int32, of the whole vocabulary; live (N,) bool. sums (C, N) float64, as
// head.tiles.Plan lays them out: one level, or two if there are ids and the temperatures differ.
void tile_scan_cpu(
    const Tensor& tile, int64_t column, const Tensor& token_ids, const std::optional<Tensor>& ids,
    const std::optional<Tensor>& live, double temperature, double kl_temperature, bool tail,
    const Tensor& sums) {
  const RowSettings settings{temperature, kl_temperature, tail, true, false};
  const Arguments a =
      read_arguments("tile_scan_cpu", tile, column, token_ids, ids, live, sums, settings);
  check_columns(a, sums, kSums * a.levels() + 1 + a.slots);
  switch (a.tile.type) {
    case ScalarType::Float: return each_row(a, scan_row<float>);
    case ScalarType::BFloat16: return each_row(a, scan_row<BFloat16>);
    default: return each_row(a, scan_row<Float16>);
  }
}

// As above, with q (N, S) float64, 0 in an empty slot, and columns (K, N) float64 as head.tiles.Merged
// lays them out. entropy: whether the entropy's gradient may differ from 0.
void tile_gradient_cpu(
    const Tensor& tile, int64_t column, const Tensor& token_ids, const std::optional<Tensor>& ids,
    const std::optional<Tensor>& live, const std::optional<Tensor>& q, double temperature,
    double kl_temperature, bool tail, bool entropy, const Tensor& columns) {
  const char* op = "tile_gradient_cpu";
  const RowSettings settings{temperature, kl_temperature, tail, true, entropy};
  Arguments a = read_arguments(op, tile, column, token_ids, ids, live, columns, settings);
  check_columns(a, columns, kParts * a.levels() + kPulls);
  SMOPD_REQUIRE(op, ids.has_value() == q.has_value(), "ids and q have to come together");
  if (q.has_value()) {
    SMOPD_REQUIRE(op, q->is_cpu() && q->dim() == 2 && q->scalar_type() == ScalarType::Double &&
                      q->size(0) == a.tile.rows && q->size(1) == a.slots,
                  "q has to be a CPU tensor of float64 and ids' shape");
    a.q = static_cast<const double*>(q->data_ptr());
    a.stride_q_n = q->stride(0);
    a.stride_q_s = q->stride(1);
  }
  switch (a.tile.type) {
    case ScalarType::Float: return each_row(a, gradient_row<float>);
    case ScalarType::BFloat16: return each_row(a, gradient_row<BFloat16>);
    default: return each_row(a, gradient_row<Float16>);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("tile_scan_cpu", TORCH_BOX(&tile_scan_cpu));
  m.impl("tile_gradient_cpu", TORCH_BOX(&tile_gradient_cpu));
}

}  // namespace smopd
