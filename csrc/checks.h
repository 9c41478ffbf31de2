// Argument checks, in the words of torch_metalk/ops/_checks.py: op, argument, what came, what is accepted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

namespace torch_metalk {

#define METALK_REFUSE_UNLESS(check, condition, op, argument, got, ...) \
  check(condition, "torch_metalk.", op, ": argument '", argument, "' is ", got, "; accepted: ", __VA_ARGS__)
#define CHECK_VALUE(condition, op, argument, got, ...) \
  METALK_REFUSE_UNLESS(TORCH_CHECK_VALUE, condition, op, argument, got, __VA_ARGS__)
#define CHECK_TYPE(condition, op, argument, got, ...) \
  METALK_REFUSE_UNLESS(TORCH_CHECK_TYPE, condition, op, argument, got, __VA_ARGS__)

// As Python prints a tuple.
inline std::string tuple(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string shape_of(const at::Tensor& t) { return "a tensor of shape " + tuple(t.sizes()); }

inline std::string dtype_name(at::ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

inline std::string dtype_of(const at::Tensor& t) { return "of dtype " + dtype_name(t.scalar_type()); }

// One of several tensors, all of which must be on the device of the first.
inline void check_device(const char* op, const char* name, const at::Tensor& t, const at::Tensor& first) {
  CHECK_VALUE(t.device() == first.device(), op, name, c10::str("on ", t.device()), "the device of the other tensors, ",
              first.device());
}

inline void check_same_dtype(
    const char* op, const char* name, const at::Tensor& t, const char* first_name, const at::Tensor& first) {
  CHECK_TYPE(t.scalar_type() == first.scalar_type(), op, name, dtype_of(t), "the dtype of '", first_name, "', ",
             dtype_name(first.scalar_type()));
}

// The incoming gradient must look like the output it belongs to.
inline void check_gradient_shape(const char* op, const at::Tensor& dy, const at::Tensor& like) {
  CHECK_VALUE(dy.sizes() == like.sizes(), op, "dy", shape_of(dy), "the shape of the output, ", tuple(like.sizes()));
}

// An argument that the operator has no gradient for.
inline void check_constant(const char* op, const char* name, const at::Tensor& t) {
  CHECK_VALUE(!t.requires_grad(), op, name, "a tensor that requires a gradient", "constants; detach it");
}

// A tensor that kernels can read: of a dtype they have, strided, on the device of the first argument.
inline void check_tensor(const char* op, const char* name, const at::Tensor& t, const at::Tensor& first) {
  const at::ScalarType dtype = t.scalar_type();
  CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op, name, dtype_of(t),
             "float32, float16, bfloat16");
  CHECK_TYPE(t.layout() == at::kStrided, op, name, c10::str("of layout ", t.layout()), "strided tensors");
  check_device(op, name, t, first);
}

}  // namespace torch_metalk
