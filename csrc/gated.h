// What SwiGLU and GeGLU share: activation(gate) * up.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <tuple>

namespace torch_metalk {

// `op` names the operator in errors, `library` the shader file, `kernel` the kernel without its dtype.
at::Tensor gated(
    const char* op, const char* library, const std::string& kernel, const at::Tensor& gate, const at::Tensor& up);

// The same of gate_up [..., 2 F], gate and up side by side.
at::Tensor gated_packed(const char* op, const char* library, const std::string& kernel, const at::Tensor& gate_up);

at::Tensor gated_packed_backward(
    const char* op, const char* library, const std::string& kernel, const at::Tensor& dy, const at::Tensor& gate_up);

std::tuple<at::Tensor, at::Tensor> gated_backward(const char* op,
                                                  const char* library,
                                                  const std::string& kernel,
                                                  const at::Tensor& dy,
                                                  const at::Tensor& gate,
                                                  const at::Tensor& up,
                                                  std::array<bool, 2> output_mask);

}  // namespace torch_metalk
