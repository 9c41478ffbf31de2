// How tensors lie in memory, as far as kernels care.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace torch_metalk {

// A tensor as rows of its last dimension, `stride` elements apart. Elements of a row are neighbours.
struct Rows {
  at::Tensor tensor;
  int64_t count;
  int64_t columns;
  int64_t stride;

  // Whether loads of four elements are aligned in every row.
  bool aligned() const { return columns % 4 == 0 && stride % 4 == 0 && tensor.storage_offset() % 4 == 0; }
};

// Without a copy where the leading dimensions have one common stride; else of a contiguous copy.
inline Rows as_rows(const at::Tensor& t) {
  const int64_t columns = t.size(-1);
  const int64_t count = columns ? t.numel() / columns : 0;
  bool dense = columns == 1 || t.stride(-1) == 1;
  int64_t stride = columns, expected = -1;
  for (int64_t dim = t.dim() - 2; dim >= 0 && dense; --dim) {
    if (t.size(dim) == 1) {
      continue;
    }
    if (expected < 0) {
      stride = t.stride(dim);
    } else {
      dense = t.stride(dim) == expected;
    }
    expected = t.stride(dim) * t.size(dim);
  }
  return dense ? Rows{t, count, columns, stride} : Rows{t.contiguous(), count, columns, columns};
}

}  // namespace torch_metalk
