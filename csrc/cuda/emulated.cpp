// Runs the kernel of loss_rows.h on the host, for tests/kernels/test_cuda_build.py:
//
//     emulated INPUT OUTPUT
//
// INPUT is a Header and then, in this order, what it says is there: the memory that holds the logits (bf16),
// token_ids (N,) int32, the columns (N,) fp32, target_ids (N, S) int32, target_logps (N, S) fp32.
// OUTPUT: terms (7, N) fp32, clipped (N,) int8, and the memory that holds the gradient.
// The memory begins at a 16-byte boundary; row n begins at element offset + n * stride.

#include <fstream>
#include <iterator>

#include "emulated.h"

using namespace smopd::cuda;

namespace {

struct Header {
  int32_t threads, clusters, rows, vocab, support;
  int32_t stride, offset, grad_stride, grad_offset;
  int32_t memory, grad_memory;  // elements; the gradient's 0: none, -1: it is written over the logits
  int32_t has_column[kColumns];
  int32_t has_target, tail, ppo;
  float low, high, dual, opd_coef, entropy_coef, temperature, kl_temperature;
};

template <typename T>
const T* take(const char*& place, int64_t count) {
  const T* begin = reinterpret_cast<const T*>(place);
  place += (count * int64_t(sizeof(T)) + 15) / 16 * 16;
  return begin;
}

template <typename Machine>
void run(const Arguments& a, int32_t clusters) {
  const Objective& o = a.objective;
  const bool two = o.has_target && o.temperature != o.kl_temperature, entropy = o.entropy_coef != 0.0f;
  const auto grid = two ? (entropy ? run_grid<Machine, true, true> : run_grid<Machine, true, false>)
                        : (entropy ? run_grid<Machine, false, true> : run_grid<Machine, false, false>);
  grid(a, clusters);
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 3, "expected INPUT OUTPUT");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<Words> aligned(bytes.size() / sizeof(Words) + 1);
  std::memcpy(aligned.data(), bytes.data(), bytes.size());
  const char* place = reinterpret_cast<const char*>(aligned.data());
  const Header& h = *take<Header>(place, 1);

  Arguments a{};
  auto* memory = const_cast<uint16_t*>(take<uint16_t>(place, h.memory));
  a.logits = memory + h.offset;
  a.logits_stride = h.stride;
  a.rows = h.rows;
  a.vocab = h.vocab;
  a.support = h.support;
  a.token_ids = take<int32_t>(place, h.rows);
  for (int32_t c = 0; c < kColumns; ++c) a.columns[c] = h.has_column[c] ? take<float>(place, h.rows) : nullptr;
  a.target_ids = take<int32_t>(place, int64_t(h.rows) * h.support);
  a.target_logps = take<float>(place, int64_t(h.rows) * h.support);
  a.objective = {h.low, h.high, h.dual, h.opd_coef, h.entropy_coef, h.temperature, h.kl_temperature,
                 h.has_column[kOldLogp] != 0, h.has_target != 0, h.has_column[kReverseAdv] != 0,
                 h.tail != 0, h.ppo != 0};
  std::vector<Words> grad(h.grad_memory > 0 ? h.grad_memory / kVector + 1 : 0, Words{{~0u, ~0u, ~0u, ~0u}});
  auto* grad_memory = h.grad_memory < 0 ? memory : reinterpret_cast<uint16_t*>(grad.data());
  if (h.grad_memory != 0) a.grad = grad_memory + h.grad_offset;
  a.grad_stride = h.grad_stride;
  std::vector<float> terms(size_t(kTerms) * h.rows, NAN);
  std::vector<int8_t> clipped(h.rows, -1);
  for (int32_t k = 0; k < kTerms; ++k) a.terms[k] = terms.data() + size_t(k) * h.rows;
  a.clipped = clipped.data();

  switch (h.threads) {
    case 64: run<Emulated<64, 4>>(a, h.clusters); break;
    case 160: run<Emulated<160, 3>>(a, h.clusters); break;
    case 512: run<Emulated<512, 13>>(a, h.clusters); break;  // as Hopper's
    default: require(false, "expected 64, 160 or 512 threads");
  }
  std::ofstream out(argv[2], std::ios::binary);
  out.write(reinterpret_cast<const char*>(terms.data()), std::streamsize(terms.size() * sizeof(float)));
  out.write(reinterpret_cast<const char*>(clipped.data()), std::streamsize(clipped.size()));
  const int64_t written = h.grad_memory < 0 ? h.memory : h.grad_memory;
  out.write(reinterpret_cast<const char*>(grad_memory), std::streamsize(written * 2));
  return 0;
}
