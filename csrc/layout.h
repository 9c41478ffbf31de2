// How tensors lie in memory, as far as kernels care.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace torch_metalk {

// A tensor as rows of its last dimension, `stride` elements apart. Elements of a row are neighbours.
struct Rows {
  at::Tensor tensor;
  int64_t count;
  int64_t columns;
  int64_t stride;

  // Whether every row starts at a multiple of four elements, here and in a contiguous tensor of the same rows.
  bool aligned() const {
    return tensor.storage_offset() % 4 == 0 && (count == 1 || (columns % 4 == 0 && stride % 4 == 0));
  }
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

// What operators return: contiguous whatever `like` is.
inline at::Tensor empty_contiguous(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().memory_format(at::MemoryFormat::Contiguous));
}

// Scratch in float32 for as many rows as a matrix has: what adapters make of them.
inline at::Tensor float_rows(const at::Tensor& rows, int64_t columns) {
  return at::empty({rows.size(0), columns}, rows.options().dtype(at::kFloat));
}

// Kernels count elements of a row, and rows, with 32 bits, and add a few before they compare.
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;

}  // namespace torch_metalk
