// Frozen linear layers with low-rank adapters, several of one input: what lora_qkv and lora_mlp are made of.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace torch_metalk {

struct AdaptedLayer {
  at::Tensor weight;               // [N, K]
  std::optional<at::Tensor> bias;  // [N]
  std::optional<at::Tensor> a, b;  // [R, K] and [N, R], of a layer with an adapter
  double scaling = 0;
};

// The lists of an operator's arguments, checked: layers that take `features` of x's dtype each, none for `features`
// being those of x. Absent biases are an empty list.
std::vector<AdaptedLayer> make_layers(const char* op,
                                      const at::Tensor& x,
                                      const std::vector<int64_t>& features,
                                      at::TensorList weights,
                                      const c10::List<std::optional<at::Tensor>>& biases,
                                      const c10::List<std::optional<at::Tensor>>& lora_a,
                                      const c10::List<std::optional<at::Tensor>>& lora_b,
                                      at::ArrayRef<double> scalings);

// "weights[2]": one tensor of a list, in errors.
std::string item(const char* list, size_t index);

// Whether there is one value for each of `expected`.
void check_length(const char* op, const char* list, size_t length, size_t expected);

// The gradients of an output like x, but for its last dimension.
void check_output_gradient(
    const char* op, const std::string& name, const at::Tensor& dy, const at::Tensor& x, int64_t features);

// What each layer makes of x [..., K]: linear(x, weight, bias) + scaling * (x a^T) b^T, the frozen product rounded, and
// the sum. own_matmul: that product by our kernels instead of torch's.
std::vector<at::Tensor> project(const at::Tensor& x, const std::vector<AdaptedLayer>& layers, bool own_matmul);

struct ProjectionGradients {
  at::Tensor dx;
  std::vector<at::Tensor> da, db;  // undefined where it is not wanted
};

// An undefined dy counts as zero.
ProjectionGradients project_backward(const std::vector<at::Tensor>& dys,
                                     const at::Tensor& x,
                                     const std::vector<AdaptedLayer>& layers,
                                     bool own_matmul,
                                     bool wants_dx,
                                     const std::vector<bool>& wants_da,
                                     const std::vector<bool>& wants_db);

// The gradients that are there.
std::vector<at::Tensor> only_defined(const std::vector<at::Tensor>& gradients);

}  // namespace torch_metalk
