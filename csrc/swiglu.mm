#include <torch/library.h>

#include "gated.h"

namespace torch_metalk {
namespace {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return gated("swiglu", "swiglu", "swiglu", gate, up);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy,
                                                   const at::Tensor& gate,
                                                   const at::Tensor& up,
                                                   std::array<bool, 2> output_mask) {
  return gated_backward("swiglu_backward", "swiglu", "swiglu", dy, gate, up, output_mask);
}

at::Tensor swiglu_packed(const at::Tensor& gate_up) {
  return gated_packed("swiglu_packed", "swiglu", "swiglu", gate_up);
}

at::Tensor swiglu_packed_backward(const at::Tensor& dy, const at::Tensor& gate_up) {
  return gated_packed_backward("swiglu_packed_backward", "swiglu", "swiglu", dy, gate_up);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
  m.impl("swiglu_packed", &swiglu_packed);
  m.impl("swiglu_packed_backward", &swiglu_packed_backward);
}

}  // namespace torch_metalk
