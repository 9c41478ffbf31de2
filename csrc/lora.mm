#include "lora.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "checks.h"
#include "gemm.h"
#include "layout.h"

namespace torch_metalk {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

std::vector<int64_t> with_last(const at::Tensor& x, int64_t features) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = features;
  return sizes;
}

void check_adapter(const char* op,
                   size_t i,
                   int64_t features,
                   int64_t outputs,
                   const at::Tensor& a,
                   const at::Tensor& b,
                   double scaling,
                   const at::Tensor& x) {
  check_tensor(op, item("lora_a", i).c_str(), a, x);
  check_tensor(op, item("lora_b", i).c_str(), b, x);
  CHECK_VALUE(a.dim() == 2 && a.size(1) == features, op, item("lora_a", i), shape_of(a), "[R, ", features,
              "], the features of its input");
  CHECK_VALUE(a.size(0) > 0, op, item("lora_a", i), "of rank 0", "a rank of at least 1");
  CHECK_VALUE(b.dim() == 2 && b.size(1) == a.size(0), op, item("lora_b", i), shape_of(b), "[N, ", a.size(0),
              "], the rank of ", item("lora_a", i));
  CHECK_VALUE(b.size(0) == outputs, op, item("lora_b", i), shape_of(b), "[", outputs, ", ", a.size(0), "], from ",
              item("weights", i));
  CHECK_VALUE(std::isfinite(scaling), op, item("scalings", i), scaling, "a finite number");
}

// The adapters of several layers one below the other, [sum of R, K], and where each begins.
struct Stack {
  std::vector<size_t> layers;
  std::vector<int64_t> first;
  int64_t rank = 0;
  at::Tensor a;

  template <typename Predicate>
  Stack(const std::vector<AdaptedLayer>& all, Predicate belongs) {
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].a && belongs(i)) {
        layers.push_back(i);
        first.push_back(rank);
        rank += all[i].a->size(0);
        parts.push_back(*all[i].a);
      }
    }
    if (!parts.empty()) {
      a = parts.size() == 1 ? parts[0] : at::cat(parts);
    }
  }

  bool empty() const { return layers.empty(); }
  at::Tensor columns(const at::Tensor& h, size_t k, const std::vector<AdaptedLayer>& all) const {
    return h.narrow(1, first[k], all[layers[k]].a->size(0));
  }
};

// What the frozen layers hand back to x, [rows, K], rounded to its dtype after each as autograd does.
at::Tensor frozen_dx(const std::vector<at::Tensor>& dy_rows, const std::vector<AdaptedLayer>& layers, bool own_matmul) {
  at::Tensor dx;
  for (size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor &dy = dy_rows[i], &weight = layers[i].weight;
    if (!dy.defined()) {
      continue;
    }
    if (own_matmul) {
      const bool first = !dx.defined();
      dx = first ? at::empty({dy.size(0), weight.size(1)}, dy.options()) : dx;
      gemm(dy, weight, dx, {1, first ? std::nullopt : std::optional<at::Tensor>(dx)}, true);
    } else {
      dx = dx.defined() ? at::addmm(dx, dy, weight) : at::mm(dy, weight);
    }
  }
  return dx;
}

}  // namespace

std::string item(const char* list, size_t index) { return std::string(list) + "[" + std::to_string(index) + "]"; }

void check_length(const char* op, const char* list, size_t length, size_t expected) {
  CHECK_VALUE(length == expected, op, list, c10::str("a list of length ", length), "one for each of the ", expected,
              " weights");
}

void check_output_gradient(
    const char* op, const std::string& name, const at::Tensor& dy, const at::Tensor& x, int64_t features) {
  const std::vector<int64_t> expected = with_last(x, features);
  check_tensor(op, name.c_str(), dy, x);
  CHECK_VALUE(dy.sizes().equals(expected), op, name, shape_of(dy), "the shape of the output, ", tuple(expected));
  check_same_dtype(op, name.c_str(), dy, "x", x);
}

std::vector<AdaptedLayer> make_layers(const char* op,
                                      const at::Tensor& x,
                                      const std::vector<int64_t>& features,
                                      at::TensorList weights,
                                      const OptionalTensors& biases,
                                      const OptionalTensors& lora_a,
                                      const OptionalTensors& lora_b,
                                      at::ArrayRef<double> scalings) {
  const size_t n = weights.size();
  check_tensor(op, "x", x, x);
  CHECK_VALUE(n > 0, op, "weights", "an empty list", "at least one tensor");
  if (!biases.empty()) {
    check_length(op, "biases", biases.size(), n);
  }
  check_length(op, "lora_a", lora_a.size(), n);
  check_length(op, "lora_b", lora_b.size(), n);
  check_length(op, "scalings", scalings.size(), n);
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  std::vector<AdaptedLayer> layers;
  for (size_t i = 0; i < n; ++i) {
    AdaptedLayer layer{weights[i], std::nullopt, lora_a.get(i), lora_b.get(i), scalings[i]};
    check_tensor(op, item("weights", i).c_str(), layer.weight, x);
    check_same_dtype(op, item("weights", i).c_str(), layer.weight, "x", x);
    CHECK_VALUE(layer.weight.dim() == 2 && layer.weight.size(1) == features[i], op, item("weights", i),
                shape_of(layer.weight), "[N, ", features[i], "]");
    const int64_t outputs = layer.weight.size(0);
    if (!biases.empty() && biases.get(i)) {
      layer.bias = biases.get(i);
      check_tensor(op, item("biases", i).c_str(), *layer.bias, x);
      check_same_dtype(op, item("biases", i).c_str(), *layer.bias, "x", x);
      CHECK_VALUE(layer.bias->dim() == 1 && layer.bias->size(0) == outputs, op, item("biases", i),
                  shape_of(*layer.bias), "[", outputs, "], from ", item("weights", i));
    }
    CHECK_VALUE(layer.b || !layer.a, op, item("lora_b", i), "None", "a tensor, as ", item("lora_a", i), " is one");
    CHECK_VALUE(layer.a || !layer.b, op, item("lora_a", i), "None", "a tensor, as ", item("lora_b", i), " is one");
    if (layer.a) {
      check_adapter(op, i, features[i], outputs, *layer.a, *layer.b, layer.scaling, x);
    }
    CHECK_VALUE(std::max({rows, features[i], outputs}) <= kMaxCount, op, "x", shape_of(x),
                "at most 2^31 - 1 rows and columns");
    layers.push_back(std::move(layer));
  }
  return layers;
}

std::vector<at::Tensor> project(const at::Tensor& x, const std::vector<AdaptedLayer>& layers, bool own_matmul) {
  const at::Tensor rows = as_matrix(x);
  std::vector<at::Tensor> ys;
  for (const AdaptedLayer& layer : layers) {
    at::Tensor y;
    if (own_matmul) {
      y = at::empty({rows.size(0), layer.weight.size(0)}, x.options());
      gemm(rows, layer.weight.mT(), y, {1, std::nullopt, layer.bias});
    } else {
      y = at::linear(rows, layer.weight, layer.bias).contiguous();
    }
    ys.push_back(y);
  }
  const Stack stack(layers, [](size_t) { return true; });
  if (!stack.empty()) {
    const at::Tensor h = float_rows(rows, stack.rank);
    gemm(rows, stack.a.mT(), h);
    for (size_t k = 0; k < stack.layers.size(); ++k) {
      const AdaptedLayer& layer = layers[stack.layers[k]];
      const at::Tensor& y = ys[stack.layers[k]];
      gemm(stack.columns(h, k, layers), layer.b->mT(), y, {layer.scaling, y}, true);
    }
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    ys[i] = ys[i].view(with_last(x, layers[i].weight.size(0)));
  }
  return ys;
}

ProjectionGradients project_backward(const std::vector<at::Tensor>& dys,
                                     const at::Tensor& x,
                                     const std::vector<AdaptedLayer>& layers,
                                     bool own_matmul,
                                     bool wants_dx,
                                     const std::vector<bool>& wants_da,
                                     const std::vector<bool>& wants_db) {
  const size_t n = layers.size();
  const at::Tensor rows = as_matrix(x);
  std::vector<at::Tensor> dy_rows(n);
  ProjectionGradients gradients{{}, std::vector<at::Tensor>(n), std::vector<at::Tensor>(n)};
  for (size_t i = 0; i < n; ++i) {
    if (dys[i].defined()) {
      dy_rows[i] = as_matrix(dys[i]);
      continue;
    }
    if (wants_da[i]) {
      gradients.da[i] = at::zeros(layers[i].a->sizes(), layers[i].a->options());
    }
    if (wants_db[i]) {
      gradients.db[i] = at::zeros(layers[i].b->sizes(), layers[i].b->options());
    }
  }
  const auto given = [&](size_t i) { return dy_rows[i].defined(); };

  if (wants_dx) {
    gradients.dx = frozen_dx(dy_rows, layers, own_matmul);
    if (!gradients.dx.defined()) {
      gradients.dx = at::zeros(rows.sizes(), x.options());
    }
  }
  // dh = scaling * dy b, of every layer side by side, so that one product hands it back to x.
  const Stack back(layers, [&](size_t i) { return given(i) && (wants_dx || wants_da[i]); });
  if (!back.empty()) {
    const at::Tensor dh = float_rows(rows, back.rank);
    for (size_t k = 0; k < back.layers.size(); ++k) {
      const size_t i = back.layers[k];
      gemm(dy_rows[i], *layers[i].b, back.columns(dh, k, layers), {layers[i].scaling}, true);
    }
    if (wants_dx) {
      gemm(dh, back.a, gradients.dx, {1, gradients.dx}, true);
    }
    for (size_t k = 0; k < back.layers.size(); ++k) {
      const size_t i = back.layers[k];
      if (wants_da[i]) {
        gradients.da[i] = empty_contiguous(*layers[i].a);
        gemm(back.columns(dh, k, layers).mT(), rows, gradients.da[i], {}, true);
      }
    }
  }
  const Stack again(layers, [&](size_t i) { return given(i) && wants_db[i]; });
  if (!again.empty()) {
    const at::Tensor h = float_rows(rows, again.rank);
    gemm(rows, again.a.mT(), h);
    for (size_t k = 0; k < again.layers.size(); ++k) {
      const size_t i = again.layers[k];
      gradients.db[i] = empty_contiguous(*layers[i].b);
      gemm(dy_rows[i].mT(), again.columns(h, k, layers), gradients.db[i], {layers[i].scaling}, true);
    }
  }
  if (wants_dx) {
    gradients.dx = gradients.dx.view(x.sizes());
  }
  return gradients;
}

std::vector<at::Tensor> only_defined(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> defined;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) {
      defined.push_back(gradient);
    }
  }
  return defined;
}

}  // namespace torch_metalk
