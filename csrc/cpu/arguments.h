// Tensor arguments of the CPU operations: checks and element access.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace smopd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrainElements = 32768;  // least work of a thread, in elements

inline Tensor make(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type) {
  return torch::stable::empty(shape, type, std::nullopt, like.device());
}

#define SMOPD_REQUIRE(op, condition, ...) STD_TORCH_CHECK(condition, op, ": ", __VA_ARGS__)

inline int64_t rows_per_thread(int64_t row_elements) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_elements));
}

// (N, V) float32, bfloat16 or float16 with unit stride along V.
struct Logits {
  void* data;
  ScalarType type;
  int64_t rows;
  int64_t vocab;
  int64_t stride;

  template <typename T>
  T* row(int64_t n) const {
    return static_cast<T*>(data) + n * stride;
  }
};

inline Logits read_logits(const char* op, const char* name, const Tensor& t) {
  SMOPD_REQUIRE(op, t.is_cpu(), name, " is not on the CPU");
  SMOPD_REQUIRE(op, t.dim() == 2, name, " has ", t.dim(), " dimensions, expected (N, V)");
  const ScalarType type = t.scalar_type();
  const bool half = type == ScalarType::BFloat16 || type == ScalarType::Half;
  SMOPD_REQUIRE(op, half || type == ScalarType::Float, name, " is not float32, bfloat16 or float16");
  const int64_t vocab = t.size(1);
  SMOPD_REQUIRE(op, vocab >= 1 && vocab < int64_t(1) << 31, "V is ", vocab, ", expected 1 to 2^31 - 1");
  SMOPD_REQUIRE(op, vocab == 1 || t.stride(1) == 1, name, " has stride ", t.stride(1),
                " along V, expected 1");
  return {t.data_ptr(), type, t.size(0), vocab, t.stride(0)};
}

inline void check_temperature(const char* op, const char* name, double temperature) {
  SMOPD_REQUIRE(op, temperature > 0.0 && std::isnormal(float(temperature)), name, " is ", temperature,
                ", expected a positive number");
}

// Reads the gradient's buffer, which has the shape and dtype of the logits, or is the logits themselves.
inline Logits read_gradient(const char* op, const Tensor& t, const Logits& logits) {
  const Logits out = read_logits(op, "grad", t);
  SMOPD_REQUIRE(op, out.type == logits.type && out.rows == logits.rows && out.vocab == logits.vocab,
                "grad differs from logits in shape or dtype");
  SMOPD_REQUIRE(op, out.data != logits.data || out.stride == logits.stride || out.rows <= 1,
                "grad overlaps the logits with another stride");
  return out;
}

// A (N,) float32 column. An absent column is 0.
struct Column {
  const float* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data != nullptr; }
  double at(int64_t n) const { return data == nullptr ? 0.0 : double(data[n * stride]); }
};

inline Column read_column(const char* op, const char* name, const std::optional<Tensor>& t, int64_t rows) {
  if (!t.has_value()) return {};
  SMOPD_REQUIRE(op, t->is_cpu() && t->dim() == 1 && t->size(0) == rows, name,
                " has to be a CPU tensor of shape (N,) = (", rows, ",)");
  SMOPD_REQUIRE(op, t->scalar_type() == ScalarType::Float, name, " is not float32");
  static const float none = 0.0f;  // an empty tensor has a null pointer but is present
  return {rows == 0 ? &none : static_cast<const float*>(t->data_ptr()), t->stride(0)};
}

// int32 or int64 ids with two or three dimensions. (N, S) is read as (N, 1, S).
struct Ids {
  const void* data = nullptr;
  bool wide = false;
  int64_t stride_n = 0;
  int64_t stride_m = 0;
  int64_t stride_s = 0;

  int64_t at(int64_t n, int64_t m, int64_t s) const {
    const int64_t place = n * stride_n + m * stride_m + s * stride_s;
    return wide ? static_cast<const int64_t*>(data)[place]
                : int64_t(static_cast<const int32_t*>(data)[place]);
  }
};

struct Logps {
  const float* data = nullptr;
  int64_t stride_n = 0;
  int64_t stride_m = 0;
  int64_t stride_s = 0;

  float at(int64_t n, int64_t m, int64_t s) const { return data[n * stride_n + m * stride_m + s * stride_s]; }
};

inline Ids read_ids(const char* op, const char* name, const Tensor& t) {
  const bool wide = t.scalar_type() == ScalarType::Long;
  SMOPD_REQUIRE(op, t.is_cpu() && (wide || t.scalar_type() == ScalarType::Int), name,
                " has to be a CPU tensor of int64 or int32");
  const int64_t last = t.dim() - 1;
  return {t.data_ptr(), wide, t.stride(0), last == 2 ? t.stride(1) : 0, t.stride(last)};
}

// Reads (N,) token ids of int64 or int32. kernels/checks.py has checked that those used are in [0, V).
inline std::vector<int64_t> read_token_ids(const char* op, const Tensor& t, int64_t rows) {
  SMOPD_REQUIRE(op, t.is_cpu() && t.dim() == 1 && t.size(0) == rows,
                "token_ids has to be a CPU tensor of shape (N,) = (", rows, ",)");
  const bool wide = t.scalar_type() == ScalarType::Long;
  SMOPD_REQUIRE(op, wide || t.scalar_type() == ScalarType::Int, "token_ids is neither int64 nor int32");
  std::vector<int64_t> tokens(rows);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t place = n * t.stride(0);
    tokens[n] = wide ? static_cast<const int64_t*>(t.data_ptr())[place]
                     : static_cast<const int32_t*>(t.data_ptr())[place];
  }
  return tokens;
}

// A sparse target (N, S), or with log_alpha the teachers' candidates (N, M, S).
struct Target {
  Ids ids;
  Logps logps;
  Logps log_alpha;  // (N, M)
  int64_t teachers = 0;
  int64_t slots = 0;
  int64_t kappa = 0;
  bool merge = false;

  bool present() const { return ids.data != nullptr; }
  bool is_union() const { return log_alpha.data != nullptr; }
};

inline Target read_target(
    const char* op, const std::optional<Tensor>& ids, const std::optional<Tensor>& logps,
    const std::optional<Tensor>& log_alpha, int64_t rows, int64_t kappa, bool merge) {
  if (!ids.has_value()) return {};
  static const int32_t no_id = 0;
  static const float no_logp = 0.0f;
  SMOPD_REQUIRE(op, logps.has_value(), "logps is missing beside ids");
  const int64_t dims = log_alpha.has_value() ? 3 : 2;
  SMOPD_REQUIRE(op, ids->dim() == dims && ids->size(0) == rows, "ids has to have ", dims,
                " dimensions and N = ", rows, " rows");
  SMOPD_REQUIRE(op, logps->is_cpu() && logps->scalar_type() == ScalarType::Float && logps->dim() == dims,
                "logps has to be a CPU tensor of float32 and ids' shape");
  for (int64_t d = 0; d < dims; ++d) {
    SMOPD_REQUIRE(op, logps->size(d) == ids->size(d), "logps differs from ids in dimension ", d);
  }
  Target target;
  target.ids = read_ids(op, "ids", *ids);
  if (target.ids.data == nullptr) target.ids.data = &no_id;
  const int64_t last = dims - 1;
  target.logps = {static_cast<const float*>(logps->data_ptr()), logps->stride(0),
                  dims == 3 ? logps->stride(1) : 0, logps->stride(last)};
  target.teachers = dims == 3 ? ids->size(1) : 1;
  target.slots = ids->size(last);
  target.merge = merge;
  target.kappa = kappa;
  if (!log_alpha.has_value()) return target;
  SMOPD_REQUIRE(op, kappa >= 0, "kappa is ", kappa, ", expected at least 0");
  const bool fits =
      log_alpha->dim() == 2 && log_alpha->size(0) == rows && log_alpha->size(1) == target.teachers;
  SMOPD_REQUIRE(op, fits && log_alpha->is_cpu() && log_alpha->scalar_type() == ScalarType::Float,
                "log_alpha has to be a CPU tensor of float32 and shape (", rows, ", ", target.teachers, ")");
  const void* alpha = log_alpha->data_ptr();
  target.log_alpha = {alpha == nullptr ? &no_logp : static_cast<const float*>(alpha), log_alpha->stride(0),
                      log_alpha->stride(1), 0};
  return target;
}

}  // namespace smopd
