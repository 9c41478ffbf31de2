// Ops that the fallback cannot serve: those that allocate on the device, and those that only PyTorch's MPS backend has.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/mps/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_for_mps.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "memory.h"
#include "messages.h"

namespace vmps {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorOptions;
using OptionalTensor = std::optional<Tensor>;

at::ScalarType checked_dtype(std::optional<at::ScalarType> dtype) {
  const auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(type != at::kDouble, kNoFloat64);
  return type;
}

Tensor empty(IntArrayRef size,
             std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout,
             std::optional<at::Device>,
             std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
  constexpr size_t kMaxDims = 16;  // a limit of MPSGraph
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::Layout::Strided,
                              "only strided tensors are supported on MPS");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(size.size() <= kMaxDims, "MPS supports tensors with dimensions <= 16, but got ", size.size(), ".");
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS),
                                   checked_dtype(dtype), format);
}

Tensor empty_strided(IntArrayRef size,
                     IntArrayRef stride,
                     std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>,
                     std::optional<at::Device>,
                     std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::MPS), checked_dtype(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  destination.copy_(source, non_blocking);
  return destination;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  if (destination.sizes() != source.sizes()) destination.resize_(source.sizes());
  destination.copy_(source);
  return destination;
}

// The composite op asks a table of fused kernels that this build of PyTorch does not have for MPS. This takes the
// branch that it takes on a Mac.
Tensor attention(const Tensor& query,
                 const Tensor& key,
                 const Tensor& value,
                 const OptionalTensor& attn_mask,
                 double dropout_p,
                 bool is_causal,
                 std::optional<double> scale,
                 bool enable_gqa) {
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "scaled_dot_product_attention: Expected query, key, and value to all be at least 2 dimensional, but got ",
              query.dim(), ", ", key.dim(), " and ", value.dim());
  TORCH_CHECK(query.dtype() == key.dtype() && query.dtype() == value.dtype(),
              "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
              " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.device() == key.device() && query.device() == value.device(),
              "Expected query, key, and value to have the same device type, but got ", query.device(), ", ",
              key.device(), " and ", value.device());
  OptionalTensor mask = attn_mask && attn_mask->defined() ? attn_mask : std::nullopt;
  if (mask && mask->scalar_type() == at::kBool)
    mask = at::zeros_like(*mask, query.options())
               .masked_fill_(mask->logical_not(), -std::numeric_limits<float>::infinity());
  const bool needs_grad =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  const bool contiguous = query.is_contiguous() && key.is_contiguous() && value.is_contiguous();
  if (!needs_grad && dropout_p == 0.0 && contiguous)
    return std::get<0>(at::_scaled_dot_product_attention_math_for_mps(query, key, value, mask, dropout_p, is_causal,
                                                                      std::nullopt, scale, enable_gqa));
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, std::nullopt,
                                                            scale, enable_gqa));
}

// CPU kernels for ops that only MPS has; the fallback finds them on the CPU key.

Tensor convolution_on_cpu(const Tensor& input,
                          const Tensor& weight,
                          const OptionalTensor& bias,
                          IntArrayRef padding,
                          IntArrayRef stride,
                          IntArrayRef dilation,
                          int64_t groups) {
  const std::vector<int64_t> no_output_padding(padding.size(), 0);
  return at::convolution(input, weight, bias, stride, padding, dilation, false, no_output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward_on_cpu(const Tensor& input,
                                                               const Tensor& grad_output,
                                                               const Tensor& weight,
                                                               IntArrayRef padding,
                                                               IntArrayRef stride,
                                                               IntArrayRef dilation,
                                                               int64_t groups,
                                                               std::array<bool, 3> mask) {
  const std::vector<int64_t> no_output_padding(padding.size(), 0);
  return at::convolution_backward(grad_output, input, weight, IntArrayRef{weight.size(0)}, stride, padding, dilation,
                                  false, no_output_padding, groups, mask);
}

Tensor transposed_convolution_on_cpu(const Tensor& input,
                                     const Tensor& weight,
                                     IntArrayRef padding,
                                     IntArrayRef output_padding,
                                     IntArrayRef stride,
                                     IntArrayRef dilation,
                                     int64_t groups) {
  return at::convolution(input, weight, {}, stride, padding, dilation, true, output_padding, groups);
}

std::tuple<Tensor, Tensor> transposed_convolution_backward_on_cpu(const Tensor& input,
                                                                  const Tensor& grad_output,
                                                                  const Tensor& weight,
                                                                  IntArrayRef padding,
                                                                  IntArrayRef output_padding,
                                                                  IntArrayRef stride,
                                                                  IntArrayRef dilation,
                                                                  int64_t groups,
                                                                  std::array<bool, 2> mask) {
  auto [grad_input, grad_weight, none] =
      at::convolution_backward(grad_output, input, weight, at::OptionalIntArrayRef(), stride, padding, dilation, true,
                               output_padding, groups, {mask[0], mask[1], false});
  return {grad_input, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_on_cpu(const Tensor& input,
                                                          const Tensor& grad_output,
                                                          const Tensor& weight,
                                                          std::array<bool, 3> mask) {
  Tensor grad_input, grad_weight, grad_bias;
  const Tensor grad_rows = grad_output.reshape({-1, grad_output.size(-1)});
  if (mask[0]) grad_input = at::matmul(grad_output, weight);
  if (mask[1]) grad_weight = at::matmul(grad_rows.t(), input.reshape({-1, input.size(-1)}));
  if (mask[2]) grad_bias = grad_rows.sum(0);
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor> attention_on_cpu(const Tensor& query,
                                            const Tensor& key,
                                            const Tensor& value,
                                            const OptionalTensor& mask,
                                            double dropout_p,
                                            bool is_causal,
                                            const OptionalTensor& dropout_mask,
                                            std::optional<double> scale,
                                            bool enable_gqa) {
  return at::_scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, dropout_mask, scale,
                                                enable_gqa);
}

Tensor max_pool2d_backward_on_cpu(const Tensor& grad_output,
                                  const Tensor& input,
                                  IntArrayRef kernel,
                                  IntArrayRef stride,
                                  IntArrayRef padding,
                                  IntArrayRef dilation,
                                  bool ceil_mode) {
  const Tensor indices = std::get<1>(at::max_pool2d_with_indices(input, kernel, stride, padding, dilation, ceil_mode));
  return at::max_pool2d_with_indices_backward(grad_output, input, kernel, stride, padding, dilation, ceil_mode,
                                              indices);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_mps_convolution", convolution_on_cpu);
  m.impl("mps_convolution_backward", convolution_backward_on_cpu);
  m.impl("_mps_convolution_transpose", transposed_convolution_on_cpu);
  m.impl("mps_convolution_transpose_backward", transposed_convolution_backward_on_cpu);
  m.impl("linear_backward", linear_backward_on_cpu);
  m.impl("_scaled_dot_product_attention_math_for_mps", attention_on_cpu);
  m.impl("max_pool2d_backward", max_pool2d_backward_on_cpu);
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("scaled_dot_product_attention", attention);
  // Views need no memory, so they need no CPU alias either: PyTorch's own functions serve every device.
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", attention); }

}  // namespace
}  // namespace vmps

namespace at::detail {

TensorBase empty_mps(IntArrayRef size,
                     std::optional<ScalarType> dtype,
                     std::optional<Layout> layout,
                     std::optional<Device> device,
                     std::optional<bool> pinned,
                     std::optional<c10::MemoryFormat> format) {
  return vmps::empty(size, dtype, layout, device, pinned, format);
}

TensorBase empty_mps(IntArrayRef size, const TensorOptions& options) {
  return vmps::empty(size, optTypeMetaToScalarType(options.dtype_opt()), options.layout_opt(), options.device_opt(),
                     options.pinned_memory_opt(), options.memory_format_opt());
}

TensorBase empty_strided_mps(IntArrayRef size, IntArrayRef stride, ScalarType dtype, std::optional<Device> device) {
  return vmps::empty_strided(size, stride, dtype, std::nullopt, device, std::nullopt);
}

TensorBase empty_strided_mps(IntArrayRef size, IntArrayRef stride, const TensorOptions& options) {
  return vmps::empty_strided(size, stride, optTypeMetaToScalarType(options.dtype_opt()), options.layout_opt(),
                             options.device_opt(), options.pinned_memory_opt());
}

}  // namespace at::detail
