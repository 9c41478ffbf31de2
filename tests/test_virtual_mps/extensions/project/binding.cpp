#include <Python.h>
#include <torch/library.h>

at::Tensor square(const at::Tensor& input);

TORCH_LIBRARY(square_project, m) { m.def("square(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(square_project, MPS, m) { m.impl("square", &square); }

PyMODINIT_FUNC PyInit_square_project() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "square_project", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
