// The Python module smopd._C. Importing it registers the operators torch.ops.smopd.<name>. Their schemas are
// here, and their implementations are in cpu/.

#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(smopd, m) {
  m.def(
      "topk_logprobs_cpu(Tensor logits, int kappa, Tensor? token_ids, float temperature)"
      " -> (Tensor ids, Tensor logps, Tensor token_logp)");
  // These three operators compute topk_logprobs from consecutive pieces of the vocabulary.
  m.def("topk_begin_cpu(Tensor like, int n_rows, int kappa) -> (Tensor rows, Tensor keys)");
  m.def(
      "topk_piece_cpu(Tensor logits, int first, int kappa, Tensor? token_ids, float temperature,"
      " Tensor(a!) rows, Tensor(b!) keys) -> ()");
  m.def(
      "topk_end_cpu(Tensor rows, Tensor(a!) keys, int kappa, bool has_token, float temperature)"
      " -> (Tensor ids, Tensor logps, Tensor token_logp, Tensor valid)");
  m.def(
      "teacher_mixture_cpu(Tensor ids, Tensor logps, Tensor log_alpha, int kappa, bool merge)"
      " -> (Tensor ids, Tensor logps, Tensor mass)");
  // Target: ids and logps (N, S), or (N, M, S) with log_alpha (N, M).
  m.def(
      "loss_rows_cpu(Tensor logits, Tensor token_ids, Tensor adv, Tensor pg_weight, Tensor? old_logp,"
      " Tensor? kl_weight, Tensor? ent_weight, Tensor? reverse_adv, Tensor? reverse_weight, Tensor? ids,"
      " Tensor? logps, Tensor? log_alpha, int kappa, bool merge, bool tail, float clip_low, float clip_high,"
      " float dual_clip, float opd_coef, float entropy_coef, float temperature, float kl_temperature,"
      " bool reverse_ppo, bool entropy, Tensor(a!)? grad) -> (Tensor logp, Tensor entropy, Tensor kl, Tensor teacher_mass,"
      " Tensor student_mass, Tensor clipped, Tensor surrogate, Tensor reverse)");
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", "Compiled operations of SMOPD; see torch.ops.smopd.", -1,
      nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
