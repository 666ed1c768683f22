// The Python module smopd._C. It has no Python functions: importing it runs the registrations of the
// sources in this folder with torch.library, and they are called as torch.ops.smopd.<name>.
// The schemas stand here; each source registers its own implementation.

#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(smopd, m) {
  m.def(
      "topk_logprobs_cpu(Tensor logits, int kappa, Tensor? token_ids, float temperature)"
      " -> (Tensor ids, Tensor logps, Tensor token_logp)");
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", "Compiled operations of SMOPD; see torch.ops.smopd.", -1,
      nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
