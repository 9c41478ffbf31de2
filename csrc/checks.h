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

inline std::string shape_of(const at::Tensor& t) { return c10::str("a tensor of shape ", t.sizes()); }

// A tensor that kernels can read: of a dtype they have, strided, on the device of the first argument.
inline void check_tensor(const char* op, const char* name, const at::Tensor& t, const at::Tensor& first) {
  const at::ScalarType dtype = t.scalar_type();
  CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op, name,
             c10::str("of dtype ", dtype), "float32, float16, bfloat16");
  CHECK_TYPE(t.layout() == at::kStrided, op, name, c10::str("of layout ", t.layout()), "strided tensors");
  CHECK_VALUE(t.device() == first.device(), op, name, c10::str("on ", t.device()), "the device of the first tensor, ",
              first.device());
}

}  // namespace torch_metalk
