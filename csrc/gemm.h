// Matrix products for operators: chooses tiles and chunks, and takes any strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torch_metalk {

// What happens to the sums on their way out, in float32: scale * sum + addend + bias.
struct GemmEpilogue {
  double scale = 1;
  std::optional<at::Tensor> addend = std::nullopt;  // [..., m, n], broadcast; may be the result itself
  std::optional<at::Tensor> bias = std::nullopt;    // [n]
};

// d = scale * a b + addend + bias, sums in float32 and in a fixed order, rounded once to d's dtype. a is [..., m, k]
// and b is [..., k, n], views of any strides: a transposed weight is its `mT`. Their batch dimensions broadcast to
// those of d,
// [..., m, n], which is contiguous, or some columns of a wider [m, ...]. float32, float16 and bfloat16 may be mixed. k
// may be 0.
//
// after_previous: reads what an earlier dispatch of the same operator wrote.
void gemm(const at::Tensor& a,
          const at::Tensor& b,
          const at::Tensor& d,
          const GemmEpilogue& epilogue = {},
          bool after_previous = false);

// A tensor [..., columns] as [rows, columns], without a copy where its strides allow that.
at::Tensor as_matrix(const at::Tensor& t);

}  // namespace torch_metalk
