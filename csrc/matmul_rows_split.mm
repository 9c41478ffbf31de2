#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "checks.h"
#include "gemm.h"
#include "layout.h"
#include "matmul.h"
#include "metal.h"

namespace torch_metalk {
namespace {

using Optional = std::optional<at::Tensor>;

void check_twin(const char* op, const char* name, const at::Tensor& twin, const at::Tensor& of, at::Device device) {
  CHECK_TYPE(twin.scalar_type() == at::kFloat, op, name, dtype_of(twin), "torch.float32");
  CHECK_TYPE(twin.layout() == at::kStrided, op, name, c10::str("of layout ", twin.layout()), "strided tensors");
  CHECK_VALUE(twin.sizes() == of.sizes(), op, name, shape_of(twin), "the shape of its original, ", tuple(of.sizes()));
  CHECK_VALUE(twin.device() == device, op, name, c10::str("on ", twin.device()), device);
  check_constant(op, name, twin);
}

void check_weight(const char* op, const at::Tensor& b, const Optional& b_float32) {
  CHECK_VALUE(b.dim() == 2, op, "b", shape_of(b), "two dimensions");
  if (b_float32) {
    check_twin(op, "b_float32", *b_float32, b, at::kCPU);
  }
}

void check_rows(const char* op, const char* name, int64_t cpu_rows, int64_t rows) {
  CHECK_VALUE(cpu_rows >= 0 && cpu_rows <= rows, op, name, cpu_rows, "0 to ", rows, ", the rows there are");
}

// A tensor as the CPU sees it: the same memory, or a copy of it where that is not visible.
at::Tensor on_host(const at::Tensor& t) {
  void* memory = host_memory(t);
  return memory ? at::from_blob(memory, t.sizes(), t.strides(), t.options().device(at::kCPU)) : t.to(at::kCPU);
}

// y = x op(w) + bias, the last `cpu_rows` rows of it on the CPU, in float32, while the GPU makes the others. The twins
// hold the values of x, and of w on the CPU, in float32.
void product(const at::Tensor& x,
             const at::Tensor& w,
             bool transpose,
             const Optional& bias,
             const Optional& x_float32,
             const Optional& w_float32,
             int64_t cpu_rows,
             const at::Tensor& y) {
  const at::Tensor a = as_matrix(x), b = transpose ? w.mT() : w, d = as_matrix(y);
  const int64_t gpu_rows = d.size(0) - cpu_rows;
  if (cpu_rows == 0 || d.numel() == 0) {
    gemm(a, b, d, {1, std::nullopt, bias});
    return;
  }
  const at::Tensor cpu_a = (x_float32 ? as_matrix(*x_float32) : a).narrow(0, gpu_rows, cpu_rows);
  // The CPU half is float32 whatever autocast would make of it.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor rows = d.narrow(0, gpu_rows, cpu_rows);
  // What the GPU has still to do may write the operands, and read what stood in the memory of the result before.
  commit(true);
  // Copies of what the CPU cannot see wait for the GPU, so they come before its own half.
  const at::Tensor host_a = on_host(cpu_a), host_w = w_float32 ? *w_float32 : on_host(w);
  const at::Tensor host_bias = bias ? on_host(*bias) : at::Tensor();
  if (gpu_rows > 0) {
    gemm(a.narrow(0, 0, gpu_rows), b, d.narrow(0, 0, gpu_rows), {1, std::nullopt, bias});
    commit(false);
  }
  const at::Tensor left = host_a.to(at::kFloat), whole_w = host_w.to(at::kFloat);
  const at::Tensor right = transpose ? whole_w.mT() : whole_w;
  const bool visible = host_memory(rows) != nullptr;
  const bool in_place = visible && rows.scalar_type() == at::kFloat;
  at::Tensor sums = in_place ? on_host(rows) : at::empty(rows.sizes(), left.options());
  if (bias) {
    at::addmm_out(sums, host_bias.to(at::kFloat), left, right);
  } else {
    at::mm_out(sums, left, right);
  }
  if (!in_place) {
    (visible ? on_host(rows) : rows).copy_(sums.to(rows.scalar_type()));
  }
}

at::Tensor matmul_rows_split(const at::Tensor& a,
                             const at::Tensor& b,
                             bool transpose_b,
                             const Optional& bias,
                             const Optional& a_float32,
                             const Optional& b_float32,
                             int64_t cpu_rows,
                             int64_t backward_cpu_rows) {
  const char* op = "matmul_rows_split";
  const MatmulShape shape = check_matmul(op, a, b, false, transpose_b, bias);
  check_weight(op, b, b_float32);
  if (a_float32) {
    check_twin(op, "a_float32", *a_float32, a, a.device());
  }
  std::vector<int64_t> sizes = a.sizes().vec();
  sizes.back() = shape.n;
  const at::Tensor d = at::empty(sizes, a.options().dtype(shape.dtype));
  const int64_t rows = c10::multiply_integers(shape.batch) * shape.m;
  check_rows(op, "cpu_rows", cpu_rows, rows);
  check_rows(op, "backward_cpu_rows", backward_cpu_rows, rows);
  product(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, d);
  return d;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> matmul_rows_split_backward(const at::Tensor& dy,
                                                                          const Optional& a,
                                                                          const at::Tensor& b,
                                                                          bool transpose_b,
                                                                          const Optional& bias,
                                                                          const Optional& b_float32,
                                                                          at::ScalarType a_dtype,
                                                                          int64_t cpu_rows,
                                                                          std::array<bool, 3> output_mask) {
  const char* op = "matmul_rows_split_backward";
  check_tensor(op, "dy", dy, dy);
  // The gradient of a is a product with the other form of b.
  const MatmulShape shape = check_matmul(op, dy, b, false, !transpose_b, std::nullopt);
  check_weight(op, b, b_float32);
  at::Tensor da, db, dbias;
  if (output_mask[1] || output_mask[2]) {
    CHECK_VALUE(a.has_value(), op, "a", "None", "a tensor, for the gradients of b and bias");
    std::tie(da, db, dbias) =
        matmul_backward(dy, *a, b, false, transpose_b, bias, {false, output_mask[1], output_mask[2]});
  }
  if (output_mask[0]) {
    check_rows(op, "cpu_rows", cpu_rows, c10::multiply_integers(shape.batch) * shape.m);
    std::vector<int64_t> sizes = dy.sizes().vec();
    sizes.back() = shape.n;
    da = at::empty(sizes, dy.options().dtype(a_dtype));
    product(dy, b, !transpose_b, std::nullopt, std::nullopt, b_float32, cpu_rows, da);
  }
  return {da, db, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("matmul_rows_split", &matmul_rows_split);
  m.impl("matmul_rows_split_backward", &matmul_rows_split_backward);
}

}  // namespace torch_metalk
