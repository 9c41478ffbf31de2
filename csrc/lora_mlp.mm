#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "gated.h"
#include "lora.h"

namespace torch_metalk {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

struct Activation {
  const char* name;
  const char* library;
  const char* kernel;
};

constexpr Activation kActivations[] = {
    {"silu", "swiglu", "swiglu"}, {"gelu_tanh", "geglu", "geglu_tanh"}, {"gelu", "geglu", "geglu_none"}};

const Activation& activation_of(const char* op, std::string_view name) {
  for (const Activation& activation : kActivations) {
    if (activation.name == name) {
      return activation;
    }
  }
  CHECK_VALUE(false, op, "activation", c10::str("'", name, "'"), "'silu', 'gelu_tanh', 'gelu'");
}

// gate and up, and down.
struct Layers {
  std::vector<AdaptedLayer> in, out;
};

Layers check(const char* op,
             const at::Tensor& x,
             at::TensorList weights,
             const OptionalTensors& biases,
             const OptionalTensors& lora_a,
             const OptionalTensors& lora_b,
             at::ArrayRef<double> scalings) {
  CHECK_VALUE(x.dim() > 0, op, "x", shape_of(x), "at least one dimension");
  CHECK_VALUE(weights.size() == 3, op, "weights", c10::str("a list of length ", weights.size()),
              "those of gate, up and down");
  const int64_t hidden = weights[0].dim() ? weights[0].size(0) : 0;
  auto layers = make_layers(op, x, {x.size(-1), x.size(-1), hidden}, weights, biases, lora_a, lora_b, scalings);
  CHECK_VALUE(weights[1].size(0) == hidden, op, "weights[1]", shape_of(weights[1]), "[", hidden, ", ", x.size(-1),
              "], as weights[0]");
  return {{layers[0], layers[1]}, {layers[2]}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lora_mlp(const at::Tensor& x,
                                                        at::TensorList weights,
                                                        const OptionalTensors& biases,
                                                        const OptionalTensors& lora_a,
                                                        const OptionalTensors& lora_b,
                                                        at::ArrayRef<double> scalings,
                                                        std::string_view activation,
                                                        bool own_matmul) {
  const char* op = "lora_mlp";
  const Activation& gating = activation_of(op, activation);
  const Layers layers = check(op, x, weights, biases, lora_a, lora_b, scalings);
  check_length(op, "biases", biases.size(), weights.size());
  const auto in = project(x, layers.in, own_matmul);
  const at::Tensor product = gated(op, gating.library, gating.kernel, in[0], in[1]);
  return {project(product, layers.out, own_matmul)[0], in[0], in[1]};
}

std::tuple<at::Tensor, std::vector<at::Tensor>> lora_mlp_backward(const at::Tensor& dy,
                                                                  const at::Tensor& x,
                                                                  const at::Tensor& gate,
                                                                  const at::Tensor& up,
                                                                  at::TensorList weights,
                                                                  const OptionalTensors& lora_a,
                                                                  const OptionalTensors& lora_b,
                                                                  at::ArrayRef<double> scalings,
                                                                  std::string_view activation,
                                                                  bool own_matmul,
                                                                  const c10::List<bool>& mask) {
  const char* op = "lora_mlp_backward";
  const std::vector<bool> output_mask = mask.vec();
  const Activation& gating = activation_of(op, activation);
  const Layers layers = check(op, x, weights, OptionalTensors(), lora_a, lora_b, scalings);
  CHECK_VALUE(output_mask.size() == 7, op, "output_mask", c10::str("a list of length ", output_mask.size()),
              "7 booleans");
  const int64_t hidden = weights[0].size(0);
  check_output_gradient(op, "gate", gate, x, hidden);
  check_output_gradient(op, "up", up, x, hidden);
  check_output_gradient(op, "dy", dy, x, weights[2].size(0));
  for (size_t i = 1; i < 7; ++i) {
    CHECK_VALUE(!output_mask[i] || lora_a.get((i - 1) % 3), op, item("output_mask", i), "True",
                "False, as this projection has no adapter");
  }
  const bool wants_da_down = output_mask[3], wants_db_down = output_mask[6];
  const bool wants_inner = output_mask[0] || output_mask[1] || output_mask[2] || output_mask[4] || output_mask[5];
  // Without a gradient of down's adapter only the product's shape and dtype are read.
  const at::Tensor product = wants_da_down || wants_db_down ? gated(op, gating.library, gating.kernel, gate, up) : gate;
  const auto out =
      project_backward({dy}, product, layers.out, own_matmul, wants_inner, {wants_da_down}, {wants_db_down});
  ProjectionGradients in{{}, std::vector<at::Tensor>(2), std::vector<at::Tensor>(2)};
  if (wants_inner) {
    const auto [dgate, dup] = gated_backward(op, gating.library, gating.kernel, out.dx, gate, up, {true, true});
    in = project_backward({dgate, dup}, x, layers.in, own_matmul, output_mask[0], {output_mask[1], output_mask[2]},
                          {output_mask[4], output_mask[5]});
  }
  return {in.dx, only_defined({in.da[0], in.da[1], out.da[0], in.db[0], in.db[1], out.db[0]})};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("lora_mlp", &lora_mlp);
  m.impl("lora_mlp_backward", &lora_mlp_backward);
}

}  // namespace torch_metalk
