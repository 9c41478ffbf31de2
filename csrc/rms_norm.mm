#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "../shaders/params.h"
#include "checks.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

// Rows whose weight gradient one threadgroup adds up: 4 bytes a column, written and read again, for 6 that each of
// these rows takes in half precision (dy, x and dx) are 5.6 % of the traffic, and 512 rows still make 22 threadgroups.
constexpr uint32_t kRowsPerGroup = 24;

void check(const char* op, const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
  check_tensor(op, "x", x, x);
  CHECK_VALUE(x.dim() > 0, op, "x", shape_of(x), "at least one dimension");
  if (weight) {
    check_tensor(op, "weight", *weight, x);
    CHECK_VALUE(weight->dim() == 1 && weight->size(0) == x.size(-1), op, "weight", shape_of(*weight), "shape [",
                x.size(-1), "], the last dimension of x");
  }
  CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, "eps", eps, "a finite number that is not negative");
  CHECK_VALUE(x.size(-1) <= kMaxCount && (x.size(-1) == 0 || x.numel() / x.size(-1) <= kMaxCount), op, "x", shape_of(x),
              "at most 2^31 - 1 rows and columns");
}

// Kernels exist for a weight of x's type and for float32; the other pairs of types are rare, and a weight is small.
std::optional<at::Tensor> kernel_weight(const at::Tensor& x, const std::optional<at::Tensor>& weight) {
  if (!weight) {
    return weight;
  }
  const bool as_it_is = weight->scalar_type() == x.scalar_type() || weight->scalar_type() == at::kFloat;
  return (as_it_is ? *weight : weight->to(at::kFloat)).contiguous();
}

// Without a weight the weight's type in the name is x's; nothing of that type is read.
std::string types(const at::Tensor& x, const std::optional<at::Tensor>& weight, at::ScalarType y) {
  const at::ScalarType w = weight ? weight->scalar_type() : x.scalar_type();
  return std::string("_") + metal_type(x.scalar_type()) + "_" + metal_type(w) + "_" + metal_type(y);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm(const at::Tensor& x,
                                                        const std::optional<at::Tensor>& weight,
                                                        double eps,
                                                        double weight_offset,
                                                        bool round_before_weight,
                                                        bool also_float32) {
  check("rms_norm", x, weight, eps);
  const at::ScalarType y_dtype =
      weight && round_before_weight ? c10::promoteTypes(x.scalar_type(), weight->scalar_type()) : x.scalar_type();
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(y_dtype).memory_format(at::MemoryFormat::Contiguous));
  at::Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  at::Tensor y_float32;
  if (also_float32) {
    y_float32 = at::empty(x.sizes(), y.options().dtype(at::kFloat));
  }
  const Rows rows = as_rows(x);
  if (rows.columns == 0) {
    rstd.fill_(1 / std::sqrt(eps));
    return {y, rstd, y_float32};
  }
  if (rows.count == 0) {
    return {y, rstd, y_float32};
  }
  const std::optional<at::Tensor> w = kernel_weight(x, weight);
  const bool vectorized = rows.aligned() && (!w || w->storage_offset() % 4 == 0);
  const RMSNormParams params{static_cast<uint64_t>(rows.stride),  0, static_cast<uint32_t>(rows.count),
                             static_cast<uint32_t>(rows.columns), 1, static_cast<float>(eps),
                             static_cast<float>(weight_offset),   0};
  Launch launch{"rms_norm",
                "",
                {w.has_value(), round_before_weight, vectorized, false, false, also_float32},
                {static_cast<uint64_t>(rows.count), 1, 1},
                0};
  choose_row_kernel(launch, "rms_norm", types(x, w, y_dtype), rows.columns);
  dispatch(launch, {rows.tensor, w, y, rstd, y_float32, params});
  return {y, rstd, y_float32};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy,
                                                     const at::Tensor& x,
                                                     const std::optional<at::Tensor>& weight,
                                                     const at::Tensor& rstd,
                                                     double weight_offset,
                                                     std::array<bool, 2> output_mask) {
  const char* op = "rms_norm_backward";
  check(op, x, weight, 0);
  check_tensor(op, "dy", dy, x);
  check_tensor(op, "rstd", rstd, x);
  check_gradient_shape(op, dy, x);
  CHECK_VALUE(rstd.sizes() == x.sizes().slice(0, x.dim() - 1), op, "rstd", shape_of(rstd), "one per row of x");
  const bool wants_dx = output_mask[0], wants_dweight = output_mask[1] && weight;
  at::Tensor dx, dweight;
  if (wants_dx) {
    dx = empty_contiguous(x);
  }
  if (wants_dweight) {
    dweight = at::empty(weight->sizes(), weight->options());
  }
  if (x.numel() == 0) {
    if (wants_dweight) {
      dweight.zero_();
    }
    return {dx, dweight};
  }
  const std::optional<at::Tensor> w = kernel_weight(x, weight);
  // y had x's dtype, or float32 where a float32 weight made it so; other mixes arrive here as one of the two.
  const at::ScalarType dy_dtype =
      w && w->scalar_type() == at::kFloat && dy.scalar_type() != x.scalar_type() ? at::kFloat : x.scalar_type();
  const Rows x_rows = as_rows(x), dy_rows = as_rows(dy.to(dy_dtype));
  const at::Tensor rstd_rows = rstd.to(at::kFloat).contiguous();
  const bool vectorized = x_rows.aligned() && dy_rows.aligned() && (!w || w->storage_offset() % 4 == 0);
  const uint32_t rows_per_group = wants_dweight ? kRowsPerGroup : 1;
  const int64_t groups = (x_rows.count + rows_per_group - 1) / rows_per_group;
  const RMSNormParams params{static_cast<uint64_t>(x_rows.stride),
                             static_cast<uint64_t>(dy_rows.stride),
                             static_cast<uint32_t>(x_rows.count),
                             static_cast<uint32_t>(x_rows.columns),
                             rows_per_group,
                             0,
                             static_cast<float>(weight_offset),
                             0};
  at::Tensor partial;
  if (wants_dweight) {
    partial = at::empty({groups, x_rows.columns}, x.options().dtype(at::kFloat));
  }
  Launch launch{"rms_norm",
                "",
                {w.has_value(), false, vectorized, wants_dx, wants_dweight, false},
                {static_cast<uint64_t>(groups), 1, 1},
                0};
  choose_row_kernel(launch, "rms_norm_backward", types(x, w, dy_dtype), x_rows.columns);
  dispatch(launch, {dy_rows.tensor, x_rows.tensor, w, rstd_rows, dx, partial, params});
  if (wants_dweight) {
    constexpr uint32_t threads = 256;
    const uint32_t columns = params.columns, count = static_cast<uint32_t>(groups);
    Launch sum{"rms_norm",
               std::string("rms_norm_dweight_") + metal_type(dweight.scalar_type()),
               {},
               {(columns + threads - 1) / threads, 1, 1},
               threads};
    sum.after_previous = true;
    dispatch(sum, {partial, dweight, columns, count});
  }
  return {dx, dweight};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_backward", &rms_norm_backward);
}

}  // namespace torch_metalk
