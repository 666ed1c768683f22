// The Python module smopd._C_cuda: schemas of the CUDA operators, as csrc/module.cpp has them for smopd._C.
// Loaded only beside a torch that was built for CUDA.

#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(smopd, m) {
  m.def(
      "loss_rows_cuda(Tensor logits, Tensor token_ids, Tensor adv, Tensor pg_weight, Tensor? old_logp,"
      " Tensor? kl_weight, Tensor? ent_weight, Tensor? target_ids, Tensor? target_logps, Tensor? reverse_adv,"
      " Tensor? reverse_weight, float clip_low, float clip_high, float? dual_clip, float opd_coef,"
      " float entropy_coef, bool tail, float temperature, float kl_temperature, bool ppo, Tensor(a!)? grad)"
      " -> (Tensor logp, Tensor entropy, Tensor kl, Tensor teacher_mass, Tensor student_mass, Tensor clipped,"
      " Tensor surrogate, Tensor reverse)");
}

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA operations of SMOPD; see torch.ops.smopd.", -1,
      nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
