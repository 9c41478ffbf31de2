#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "lora.h"

namespace torch_metalk {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

OptionalTensors optional(at::TensorList tensors) {
  OptionalTensors list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor);
  }
  return list;
}

std::vector<AdaptedLayer> check(const char* op,
                                const at::Tensor& x,
                                at::TensorList weights,
                                const OptionalTensors& biases,
                                at::TensorList lora_a,
                                at::TensorList lora_b,
                                at::ArrayRef<double> scalings) {
  CHECK_VALUE(x.dim() > 0, op, "x", shape_of(x), "at least one dimension");
  return make_layers(op, x, std::vector<int64_t>(weights.size(), x.size(-1)), weights, biases, optional(lora_a),
                     optional(lora_b), scalings);
}

std::vector<at::Tensor> lora_qkv(const at::Tensor& x,
                                 at::TensorList weights,
                                 const OptionalTensors& biases,
                                 at::TensorList lora_a,
                                 at::TensorList lora_b,
                                 at::ArrayRef<double> scalings,
                                 bool own_matmul) {
  const auto layers = check("lora_qkv", x, weights, biases, lora_a, lora_b, scalings);
  check_length("lora_qkv", "biases", biases.size(), weights.size());
  return project(x, layers, own_matmul);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> lora_qkv_backward(const OptionalTensors& dys,
                                                                  const at::Tensor& x,
                                                                  at::TensorList weights,
                                                                  at::TensorList lora_a,
                                                                  at::TensorList lora_b,
                                                                  at::ArrayRef<double> scalings,
                                                                  bool own_matmul,
                                                                  const c10::List<bool>& mask) {
  const char* op = "lora_qkv_backward";
  const std::vector<bool> output_mask = mask.vec();
  const auto layers = check(op, x, weights, OptionalTensors(), lora_a, lora_b, scalings);
  const size_t n = layers.size();
  check_length(op, "dys", dys.size(), n);
  CHECK_VALUE(output_mask.size() == 1 + 2 * n, op, "output_mask", c10::str("a list of length ", output_mask.size()),
              1 + 2 * n, " booleans");
  std::vector<at::Tensor> given(n);
  for (size_t i = 0; i < n; ++i) {
    if (const std::optional<at::Tensor> dy = dys.get(i)) {
      check_output_gradient(op, item("dys", i), *dy, x, layers[i].weight.size(0));
      given[i] = *dy;
    }
  }
  const auto wanted = output_mask.begin() + 1;
  auto [dx, da, db] = project_backward(given, x, layers, own_matmul, output_mask[0], {wanted, wanted + n},
                                       {wanted + n, output_mask.end()});
  da.insert(da.end(), db.begin(), db.end());
  return {dx, only_defined(da)};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("lora_qkv", &lora_qkv);
  m.impl("lora_qkv_backward", &lora_qkv_backward);
}

}  // namespace torch_metalk
