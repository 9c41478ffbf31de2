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

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
}

}  // namespace torch_metalk
