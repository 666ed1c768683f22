// topk_logprobs on the CPU, also by pieces of the vocabulary (topk_begin_cpu, topk_piece_cpu, topk_end_cpu).
//
// One thread computes a row in a fixed order, so whole rows and pieces give the same bits. A row with a NaN
// or only -inf is NaN. With +inf, it is NaN there and -inf elsewhere. Shapes: N rows, V vocabulary, P piece.

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "exponent.h"
#include "topk.h"

namespace smopd {
namespace {

constexpr int64_t kRowsPerThread = 64;  // in topk_end_cpu, which sorts a row's keys

struct Arguments {
  const void* logits;
  int64_t stride;  // elements between rows
  int64_t length;  // of a row or of the pieces of rows
  int64_t kappa;
  const int64_t* token_ids;  // null when there are none
  double temperature;
  Outputs outputs;
  // For pieces only:
  int64_t first;
  TopKRow* rows;
  int64_t* keys;  // key_slots(kappa) per row

  template <typename T>
  const T* row(int64_t n) const {
    return static_cast<const T*>(logits) + n * stride;
  }
};

template <typename T>
SMOPD_INLINE void whole_rows(const Arguments& a, int64_t begin, int64_t end) {
  const Exponent exponent = exponent_at(0.0f, exponent_scale(a.temperature));
  Candidates top(a.kappa);
  std::vector<int64_t> keys(key_slots(a.kappa));
  top.keys = keys.data();
  Block block;
  for (int64_t n = begin; n < end; ++n) {
    const T* logits = a.row<T>(n);
    TopKRow row(a.kappa);
    add_piece(row, top, logits, 0, a.length, exponent, block);
    if (a.token_ids != nullptr) row.token = to_float(logits[a.token_ids[n]]);
    if (!is_collected(row, a.kappa)) {
      collect_all(top, logits, a.length);
    } else if (a.kappa > 0) {
      prune(top);
    }
    write_row(row, top, double(exponent.scale), a.token_ids != nullptr, n, a.outputs);
  }
}

template <typename T>
SMOPD_INLINE void pieces_of_rows(const Arguments& a, int64_t begin, int64_t end) {
  const Exponent exponent = exponent_at(0.0f, exponent_scale(a.temperature));
  Candidates top(a.kappa);
  Block block;
  for (int64_t n = begin; n < end; ++n) {
    const T* piece = a.row<T>(n);
    top.keys = a.keys + n * key_slots(a.kappa);
    add_piece(a.rows[n], top, piece, a.first, a.length, exponent, block);
    if (a.token_ids == nullptr) continue;
    const int64_t place = a.token_ids[n] - a.first;
    if (place >= 0 && place < a.length) a.rows[n].token = to_float(piece[place]);
  }
}

template <typename T>
SMOPD_INLINE void compute_rows(const Arguments& a, int64_t begin, int64_t end) {
  a.rows == nullptr ? whole_rows<T>(a, begin, end) : pieces_of_rows<T>(a, begin, end);
}

SMOPD_CLONES void rows_float(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<float>(a, begin, end);
}

SMOPD_CLONES void rows_bfloat16(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<BFloat16>(a, begin, end);
}

SMOPD_CLONES void rows_float16(const Arguments& a, int64_t begin, int64_t end) {
  compute_rows<Float16>(a, begin, end);
}

using RowsFunction = void (*)(const Arguments&, int64_t, int64_t);

void run(const Arguments& a, const Logits& input) {
  const RowsFunction rows = input.type == ScalarType::Float      ? rows_float
                            : input.type == ScalarType::BFloat16 ? rows_bfloat16
                                                                 : rows_float16;
  torch::stable::parallel_for(
      0, input.rows, rows_per_thread(input.vocab), [&](int64_t begin, int64_t end) { rows(a, begin, end); });
}

using Results = std::tuple<Tensor, Tensor, Tensor>;

Results results_for(const Tensor& like, int64_t n_rows, int64_t kappa, bool has_token) {
  return {make(like, {n_rows, kappa}, ScalarType::Int), make(like, {n_rows, kappa}, ScalarType::Float),
          make(like, {has_token ? n_rows : 0}, ScalarType::Float)};
}

Outputs outputs_of(const Results& results) {
  const auto& [ids, logps, token_logp] = results;
  return {static_cast<int32_t*>(ids.data_ptr()), static_cast<float*>(logps.data_ptr()),
          static_cast<float*>(token_logp.data_ptr())};
}

// Returns ids (N, kappa) int32, logps (N, kappa) float32, token_logp (N,) float32 or (0,) without token_ids.
Results topk_logprobs_cpu(
    const Tensor& logits, int64_t kappa, const std::optional<Tensor>& token_ids, double temperature) {
  const char* op = "topk_logprobs_cpu";
  const Logits input = read_logits(op, "logits", logits);
  SMOPD_REQUIRE(op, kappa >= 0 && kappa <= input.vocab, "kappa is ", kappa, ", expected 0 to V = ",
                input.vocab);
  check_temperature(op, "temperature", temperature);

  std::vector<int64_t> tokens;
  if (token_ids.has_value()) tokens = read_token_ids(op, *token_ids, input.rows);
  const Results results = results_for(logits, input.rows, kappa, token_ids.has_value());
  const int64_t* const given = token_ids.has_value() ? tokens.data() : nullptr;
  const Outputs outputs = outputs_of(results);
  run({input.data, input.stride, input.vocab, kappa, given, temperature, outputs, 0, nullptr, nullptr}, input);
  return results;
}

// Returns the state of rows before their first piece: bytes (N, sizeof(TopKRow)) and keys (N, key_slots).
// RunningTopK in kernels/cpp.py passes it to the functions below, which do not check it.
std::tuple<Tensor, Tensor> topk_begin_cpu(const Tensor& like, int64_t n_rows, int64_t kappa) {
  const Tensor rows = make(like, {n_rows, int64_t(sizeof(TopKRow))}, ScalarType::Byte);
  const Tensor keys = make(like, {n_rows, key_slots(kappa)}, ScalarType::Long);
  std::uninitialized_fill_n(static_cast<TopKRow*>(rows.data_ptr()), n_rows, TopKRow(kappa));
  return {rows, keys};
}

// Adds logits (N, P) of the vocabulary from `first` on. Pieces come in order, and the width of each except
// the last is a multiple of kBlockLength. token_ids refer to the whole vocabulary.
void topk_piece_cpu(
    const Tensor& logits, int64_t first, int64_t kappa, const std::optional<Tensor>& token_ids,
    double temperature, const Tensor& rows, const Tensor& keys) {
  const char* op = "topk_piece_cpu";
  const Logits input = read_logits(op, "logits", logits);
  check_temperature(op, "temperature", temperature);
  std::vector<int64_t> tokens;
  if (token_ids.has_value()) tokens = read_token_ids(op, *token_ids, input.rows);
  const int64_t* const given = token_ids.has_value() ? tokens.data() : nullptr;
  TopKRow* const known = static_cast<TopKRow*>(rows.data_ptr());
  int64_t* const all = static_cast<int64_t*>(keys.data_ptr());
  run({input.data, input.stride, input.vocab, kappa, given, temperature, {}, first, known, all}, input);
}

// Returns ids, logps, token_logp and valid, (N,) bool. If kappa is above 0, a row with a NaN or with fewer
// than kappa entries above -inf is not valid.
std::tuple<Tensor, Tensor, Tensor, Tensor> topk_end_cpu(
    const Tensor& rows, const Tensor& keys, int64_t kappa, bool has_token, double temperature) {
  const char* op = "topk_end_cpu";
  check_temperature(op, "temperature", temperature);
  const int64_t n_rows = rows.size(0);
  const Results results = results_for(rows, n_rows, kappa, has_token);
  const Tensor valid = make(rows, {n_rows}, ScalarType::Bool);
  const TopKRow* const known = static_cast<const TopKRow*>(rows.data_ptr());
  int64_t* const all_keys = static_cast<int64_t*>(keys.data_ptr());
  bool* const is_valid = static_cast<bool*>(valid.data_ptr());
  const Outputs outputs = outputs_of(results);
  const double scale = double(exponent_scale(temperature));
  torch::stable::parallel_for(0, n_rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    Candidates top(kappa);
    for (int64_t n = begin; n < end; ++n) {
      is_valid[n] = is_collected(known[n], kappa);
      if (!is_valid[n]) continue;
      top.keys = all_keys + n * key_slots(kappa);
      top.count = known[n].count;
      if (kappa > 0) prune(top);
      write_row(known[n], top, scale, has_token, n, outputs);
    }
  });
  return std::tuple_cat(results, std::make_tuple(valid));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smopd, CPU, m) {
  m.impl("topk_begin_cpu", TORCH_BOX(&topk_begin_cpu));
  m.impl("topk_piece_cpu", TORCH_BOX(&topk_piece_cpu));
  m.impl("topk_end_cpu", TORCH_BOX(&topk_end_cpu));
  m.impl("topk_logprobs_cpu", TORCH_BOX(&topk_logprobs_cpu));
}

}  // namespace smopd
