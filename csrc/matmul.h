// What operators that are products share with matmul: its checks and its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace torch_metalk {

struct MatmulShape {
  std::vector<int64_t> batch;
  int64_t m, n, k;
  at::ScalarType dtype;  // of the result
};

MatmulShape check_matmul(const char* op,
                         const at::Tensor& a,
                         const at::Tensor& b,
                         bool transpose_a,
                         bool transpose_b,
                         const std::optional<at::Tensor>& bias);

// da, db and dbias as output_mask asks for them; the operator matmul_backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> matmul_backward(const at::Tensor& dy,
                                                               const at::Tensor& a,
                                                               const at::Tensor& b,
                                                               bool transpose_a,
                                                               bool transpose_b,
                                                               const std::optional<at::Tensor>& bias,
                                                               std::array<bool, 3> output_mask);

}  // namespace torch_metalk
