#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include "checks.h"
#include "gemm.h"
#include "layout.h"
#include "matmul.h"
#include "metal.h"

namespace torch_metalk {
namespace {

at::Tensor transposed_if(const at::Tensor& t, bool transpose) { return transpose ? t.mT() : t; }

std::vector<int64_t> with_matrix(at::IntArrayRef batch, int64_t rows, int64_t columns) {
  std::vector<int64_t> sizes(batch.begin(), batch.end());
  sizes.push_back(rows);
  sizes.push_back(columns);
  return sizes;
}

at::IntArrayRef batch_of(const at::Tensor& t) { return t.sizes().slice(0, t.dim() - 2); }

// Of a matrix multiplied with every matrix of a batch, there is one.
bool is_single(const at::Tensor& t) { return c10::multiply_integers(batch_of(t)) == 1; }

}  // namespace

MatmulShape check_matmul(const char* op,
                         const at::Tensor& a,
                         const at::Tensor& b,
                         bool transpose_a,
                         bool transpose_b,
                         const std::optional<at::Tensor>& bias) {
  check_tensor(op, "a", a, a);
  check_tensor(op, "b", b, a);
  CHECK_VALUE(a.dim() >= 2, op, "a", shape_of(a), "at least two dimensions");
  CHECK_VALUE(b.dim() >= 2, op, "b", shape_of(b), "at least two dimensions");
  const int64_t m = a.size(transpose_a ? -1 : -2), k = a.size(transpose_a ? -2 : -1);
  const int64_t n = b.size(transpose_b ? -2 : -1);
  CHECK_VALUE(b.size(transpose_b ? -1 : -2) == k, op, "b", shape_of(b),
              transpose_b ? c10::str("[..., N, ", k, "]") : c10::str("[..., ", k, ", N]"), ", as a has K = ", k);
  CHECK_VALUE(at::is_expandable_to(batch_of(a), batch_of(b)) || at::is_expandable_to(batch_of(b), batch_of(a)) ||
                  at::are_expandable(batch_of(a), batch_of(b)),
              op, "b", shape_of(b), "batch dimensions that broadcast with a's, ", tuple(batch_of(a)));
  CHECK_VALUE(std::max({m, n, k}) <= kMaxCount, op, "a", shape_of(a), "at most 2^31 - 1 rows and columns");
  at::ScalarType dtype = c10::promoteTypes(a.scalar_type(), b.scalar_type());
  if (bias) {
    check_tensor(op, "bias", *bias, a);
    CHECK_VALUE(bias->dim() == 1 && bias->size(0) == n, op, "bias", shape_of(*bias), "shape [", n,
                "], the columns of the result");
    dtype = c10::promoteTypes(dtype, bias->scalar_type());
  }
  return {at::infer_size(batch_of(a), batch_of(b)), m, n, k, dtype};
}

namespace {

at::Tensor matmul(const at::Tensor& a,
                  const at::Tensor& b,
                  bool transpose_a,
                  bool transpose_b,
                  const std::optional<at::Tensor>& bias) {
  const MatmulShape shape = check_matmul("matmul", a, b, transpose_a, transpose_b, bias);
  at::Tensor d = at::empty(with_matrix(shape.batch, shape.m, shape.n), a.options().dtype(shape.dtype));
  const at::Tensor left = transposed_if(a, transpose_a), right = transposed_if(b, transpose_b);
  if (is_single(b) && !transpose_a && d.numel()) {
    // One tall product has fewer ragged tiles than many.
    gemm(as_matrix(left), right.reshape({shape.k, shape.n}), d.view({-1, shape.n}), {1, std::nullopt, bias});
  } else {
    gemm(left, right, d, {1, std::nullopt, bias});
  }
  return d;
}

// The product of one operand's gradient, summed over the dimensions that this operand was broadcast along.
at::Tensor gradient(const at::Tensor& left, const at::Tensor& right, const MatmulShape& shape, const at::Tensor& of) {
  at::Tensor full = at::empty(with_matrix(shape.batch, left.size(-2), right.size(-1)),
                              of.options().dtype(batch_of(of).equals(shape.batch) ? of.scalar_type() : at::kFloat));
  gemm(left, right, full);
  return at::sum_to(full, of.sizes()).to(of.scalar_type());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> matmul_backward(const at::Tensor& dy,
                                                               const at::Tensor& a,
                                                               const at::Tensor& b,
                                                               bool transpose_a,
                                                               bool transpose_b,
                                                               const std::optional<at::Tensor>& bias,
                                                               std::array<bool, 3> output_mask) {
  const char* op = "matmul_backward";
  const MatmulShape shape = check_matmul(op, a, b, transpose_a, transpose_b, bias);
  check_tensor(op, "dy", dy, a);
  const std::vector<int64_t> sizes = with_matrix(shape.batch, shape.m, shape.n);
  CHECK_VALUE(dy.sizes().equals(sizes), op, "dy", shape_of(dy), "the shape of the output, ", tuple(sizes));
  const at::Tensor left = transposed_if(a, transpose_a), right = transposed_if(b, transpose_b);
  at::Tensor da, db, dbias;
  if (output_mask[0]) {
    da = transpose_a ? gradient(right, dy.mT(), shape, a) : gradient(dy, right.mT(), shape, a);
  }
  if (output_mask[1] && is_single(b) && !transpose_a) {
    // The sum over the batch is a part of the sum over K then.
    const at::Tensor rows = as_matrix(left), dy_rows = as_matrix(dy);
    db = empty_contiguous(b);
    gemm(transpose_b ? dy_rows.mT() : rows.mT(), transpose_b ? rows : dy_rows, db.view({b.size(-2), b.size(-1)}));
  } else if (output_mask[1]) {
    db = transpose_b ? gradient(dy.mT(), left, shape, b) : gradient(left.mT(), dy, shape, b);
  }
  if (output_mask[2] && bias) {
    dbias = as_matrix(dy).sum(0, false, at::kFloat).to(bias->scalar_type());
  }
  return {da, db, dbias};
}

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("matmul", &matmul);
  m.impl("matmul_backward", &matmul_backward);
}

}  // namespace torch_metalk
