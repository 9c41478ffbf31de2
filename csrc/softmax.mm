#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cmath>

#include "../shaders/params.h"
#include "checks.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

void check(const char* op, const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool is_causal) {
  check_tensor(op, "x", x, x);
  CHECK_VALUE(x.dim() >= (is_causal ? 2 : 1), op, "x", shape_of(x),
              is_causal ? "[..., Q, K] with is_causal" : "at least one dimension");
  CHECK_VALUE(std::isfinite(scale), op, "scale", scale, "a finite number");
  CHECK_VALUE(x.size(-1) <= kMaxCount && (x.size(-1) == 0 || x.numel() / x.size(-1) <= kMaxCount), op, "x", shape_of(x),
              "at most 2^31 - 1 rows and columns");
  if (!mask) {
    return;
  }
  CHECK_TYPE(mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()), op, "mask", dtype_of(*mask),
             "bool, or a floating dtype to be added");
  check_device(op, "mask", *mask, x);
  check_constant(op, "mask", *mask);
  bool fits = mask->dim() <= x.dim();
  for (int64_t d = 1; fits && d <= mask->dim(); ++d) {
    fits = mask->size(-d) == 1 || mask->size(-d) == x.size(-d);
  }
  CHECK_VALUE(fits, op, "mask", shape_of(*mask), "a shape that broadcasts to x's, ", tuple(x.sizes()));
}

// Kernels exist for masks of bool, of x's type and of float32.
at::Tensor kernel_mask(const at::Tensor& x, const at::Tensor& mask) {
  const bool as_it_is =
      mask.scalar_type() == at::kBool || mask.scalar_type() == at::kFloat || mask.scalar_type() == x.scalar_type();
  return as_it_is ? mask : mask.to(at::kFloat);
}

// The mask as [batch, heads, queries, keys] of x, broadcast by strides of 0; a copy where it has more dimensions.
at::Tensor four_dimensional(const at::Tensor& mask, const at::Tensor& x) {
  at::Tensor shaped = mask.expand(x.sizes());
  while (shaped.dim() < 4) {
    shaped = shaped.unsqueeze(0);
  }
  return shaped.flatten(0, -4);
}

at::Tensor softmax(
    const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool is_causal, bool lower_right) {
  check("softmax", x, mask, scale, is_causal);
  at::Tensor y = empty_contiguous(x);
  if (x.numel() == 0) {
    return y;
  }
  const Rows rows = as_rows(x);
  const int64_t queries = x.dim() > 1 ? x.size(-2) : 1, keys = x.size(-1);
  SoftmaxParams params{};
  params.x_stride = rows.stride;
  params.heads = static_cast<uint32_t>(x.dim() > 2 ? x.size(-3) : 1);
  params.queries = static_cast<uint32_t>(queries);
  params.keys = static_cast<uint32_t>(keys);
  params.causal_shift = static_cast<int32_t>(lower_right ? keys - queries : 0);
  params.scale = static_cast<float>(scale);
  std::optional<at::Tensor> m;
  if (mask) {
    m = four_dimensional(kernel_mask(x, *mask), x);
    params.mask_batch = m->stride(0);
    params.mask_head = m->stride(1);
    params.mask_query = m->stride(2);
    params.mask_key = m->stride(3);
  }
  const std::string types = std::string("_") + metal_type(x.scalar_type()) + "_" +
                            (!m || m->scalar_type() == at::kBool ? "bool" : metal_type(m->scalar_type()));
  Launch launch{
      "softmax", "", {rows.aligned(), m.has_value(), is_causal}, {static_cast<uint64_t>(rows.count), 1, 1}, 0};
  choose_row_kernel(launch, "softmax", types, keys);
  dispatch(launch, {rows.tensor, m, y, params});
  return y;
}

at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& y, double scale) {
  const char* op = "softmax_backward";
  check(op, y, std::nullopt, scale, false);
  check_tensor(op, "dy", dy, y);
  check_gradient_shape(op, dy, y);
  at::Tensor dx = empty_contiguous(y);
  if (y.numel() == 0) {
    return dx;
  }
  const Rows dy_rows = as_rows(dy.to(y.scalar_type())), y_rows = as_rows(y);
  SoftmaxParams params{};
  params.x_stride = dy_rows.stride;
  params.y_stride = y_rows.stride;
  params.keys = static_cast<uint32_t>(y_rows.columns);
  params.scale = static_cast<float>(scale);
  Launch launch{"softmax",
                "",
                {dy_rows.aligned() && y_rows.aligned(), false, false},
                {static_cast<uint64_t>(y_rows.count), 1, 1},
                0};
  choose_row_kernel(launch, "softmax_backward", std::string("_") + metal_type(y.scalar_type()), y_rows.columns);
  dispatch(launch, {dy_rows.tensor, y_rows.tensor, dx, params});
  return dx;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("softmax", &softmax);
  m.impl("softmax_backward", &softmax_backward);
}

}  // namespace torch_metalk
