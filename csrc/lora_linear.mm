#include <torch/library.h>

#include <array>
#include <cmath>
#include <tuple>

#include "checks.h"
#include "gemm.h"
#include "layout.h"

namespace torch_metalk {
namespace {

void check(const char* op,
           const at::Tensor& x,
           const char* y_name,
           const at::Tensor& y,
           const at::Tensor& lora_a,
           const at::Tensor& lora_b,
           double scaling) {
  check_tensor(op, "x", x, x);
  check_tensor(op, y_name, y, x);
  check_tensor(op, "lora_a", lora_a, x);
  check_tensor(op, "lora_b", lora_b, x);
  CHECK_VALUE(x.dim() > 0, op, "x", shape_of(x), "at least one dimension");
  CHECK_VALUE(lora_a.dim() == 2 && lora_a.size(1) == x.size(-1), op, "lora_a", shape_of(lora_a), "[R, ", x.size(-1),
              "], the last dimension of x");
  CHECK_VALUE(lora_a.size(0) > 0, op, "lora_a", "of rank 0", "a rank of at least 1");
  CHECK_VALUE(lora_b.dim() == 2 && lora_b.size(1) == lora_a.size(0), op, "lora_b", shape_of(lora_b), "[N, ",
              lora_a.size(0), "], the rank of lora_a");
  std::vector<int64_t> expected = x.sizes().vec();
  expected.back() = lora_b.size(0);
  CHECK_VALUE(y.sizes().equals(expected), op, y_name, shape_of(y), tuple(expected), ", from x and lora_b");
  CHECK_VALUE(std::isfinite(scaling), op, "scaling", scaling, "a finite number");
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  CHECK_VALUE(std::max({rows, x.size(-1), lora_a.size(0), lora_b.size(0)}) <= kMaxCount, op, "x", shape_of(x),
              "at most 2^31 - 1 rows and columns");
}

at::Tensor lora_linear(const at::Tensor& x,
                       const at::Tensor& base_out,
                       const at::Tensor& lora_a,
                       const at::Tensor& lora_b,
                       double scaling) {
  check("lora_linear", x, "base_out", base_out, lora_a, lora_b, scaling);
  at::Tensor y = empty_contiguous(base_out);
  const at::Tensor rows = as_matrix(x), base_rows = as_matrix(base_out);
  const at::Tensor h = float_rows(rows, lora_a.size(0));
  gemm(rows, lora_a.mT(), h);
  gemm(h, lora_b.mT(), y.view(base_rows.sizes()), {scaling, base_rows}, true);
  return y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lora_linear_backward(const at::Tensor& dy,
                                                                    const at::Tensor& x,
                                                                    const at::Tensor& lora_a,
                                                                    const at::Tensor& lora_b,
                                                                    double scaling,
                                                                    std::array<bool, 3> output_mask) {
  check("lora_linear_backward", x, "dy", dy, lora_a, lora_b, scaling);
  const auto [wants_dx, wants_da, wants_db] = output_mask;
  const at::Tensor rows = as_matrix(x), dy_rows = as_matrix(dy);
  at::Tensor dx, da, db;
  if (wants_dx || wants_da) {
    const at::Tensor dh = float_rows(rows, lora_a.size(0));
    gemm(dy_rows, lora_b, dh, {scaling});
    if (wants_dx) {
      dx = empty_contiguous(x);
      gemm(dh, lora_a, dx.view(rows.sizes()), {}, true);
    }
    if (wants_da) {
      da = empty_contiguous(lora_a);
      gemm(dh.mT(), rows, da, {}, true);
    }
  }
  if (wants_db) {
    const at::Tensor h = float_rows(rows, lora_a.size(0));
    gemm(rows, lora_a.mT(), h, {scaling});
    db = empty_contiguous(lora_b);
    gemm(dy_rows.mT(), h, db, {}, true);
  }
  return {dx, da, db};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("lora_linear", &lora_linear);
  m.impl("lora_linear_backward", &lora_linear_backward);
}

}  // namespace torch_metalk
