#include <torch/library.h>

#include "checks.h"
#include "gated.h"

namespace torch_metalk {
namespace {

std::string kernel(std::string_view approximate) {
  CHECK_VALUE(approximate == "tanh" || approximate == "none", "geglu", "approximate", approximate, "'tanh', 'none'");
  return "geglu_" + std::string(approximate);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate) {
  return gated("geglu", "geglu", kernel(approximate), gate, up);
}

std::tuple<at::Tensor, at::Tensor> geglu_backward(const at::Tensor& dy,
                                                  const at::Tensor& gate,
                                                  const at::Tensor& up,
                                                  std::string_view approximate,
                                                  std::array<bool, 2> output_mask) {
  return gated_backward("geglu_backward", "geglu", kernel(approximate), dy, gate, up, output_mask);
}

at::Tensor geglu_packed(const at::Tensor& gate_up, std::string_view approximate) {
  return gated_packed("geglu_packed", "geglu", kernel(approximate), gate_up);
}

at::Tensor geglu_packed_backward(const at::Tensor& dy, const at::Tensor& gate_up, std::string_view approximate) {
  return gated_packed_backward("geglu_packed_backward", "geglu", kernel(approximate), dy, gate_up);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("geglu", &geglu);
  m.impl("geglu_backward", &geglu_backward);
  m.impl("geglu_packed", &geglu_packed);
  m.impl("geglu_packed_backward", &geglu_packed_backward);
}

}  // namespace torch_metalk
