#include "gemm.h"

#include <ATen/ops/empty.h>

#include "../shaders/params.h"
#include "geometry.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

constexpr int64_t kBatchDims = 3;

// A matrix [rows, columns] of a batch, as the kernels read it: lines of neighbouring elements, `stride` apart. Lines
// are rows, or columns where `transposed`.
struct Operand {
  at::Tensor tensor;  // [batch of d..., rows, columns]
  bool transposed;
  int64_t stride;

  bool aligned() const {
    if (tensor.storage_offset() % 4 != 0 || (stride % 4 != 0 && tensor.size(transposed ? -1 : -2) > 1)) {
      return false;
    }
    for (int64_t dim = 0; dim < tensor.dim() - 2; ++dim) {
      if (tensor.stride(dim) % 4 != 0 && tensor.size(dim) > 1) {
        return false;
      }
    }
    return true;
  }
};

Operand make_operand(at::Tensor t, at::IntArrayRef batch) {
  // Before broadcasting: a copy holds each matrix once.
  const bool row_lines = t.stride(-1) == 1 || t.size(-1) == 1, column_lines = t.stride(-2) == 1 || t.size(-2) == 1;
  if (!row_lines && !column_lines) {
    t = t.contiguous();
  }
  // Of a single column or row either view is right; the longer lines are the better ones.
  const bool transposed = column_lines && (!row_lines || t.size(-1) == 1);
  std::vector<int64_t> sizes(batch.begin(), batch.end());
  sizes.push_back(t.size(-2));
  sizes.push_back(t.size(-1));
  return {t.expand(sizes), transposed, t.stride(transposed ? -1 : -2)};
}

// Kernels read a half precision type beside float32 and itself, not beside the other one.
at::Tensor readable(const at::Tensor& t, at::ScalarType other, at::ScalarType d) {
  const auto foreign = [&](at::ScalarType s) { return s != at::kFloat && s != t.scalar_type(); };
  return t.scalar_type() != at::kFloat && (foreign(other) || foreign(d)) ? t.to(at::kFloat) : t;
}

// The batch's dimensions with those joined that lie alike in all operands, and each operand's strides there.
struct Batch {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // [operand][dimension]

  Batch(at::IntArrayRef batch, const std::vector<const at::Tensor*>& operands) : strides(operands.size()) {
    for (int64_t dim = 0; dim < static_cast<int64_t>(batch.size()); ++dim) {
      if (batch[dim] == 1) {
        continue;
      }
      bool joins = !sizes.empty();
      for (size_t i = 0; i < operands.size(); ++i) {
        joins = joins && strides[i].back() == operands[i]->stride(dim) * batch[dim];
      }
      for (size_t i = 0; i < operands.size(); ++i) {
        if (joins) {
          strides[i].back() = operands[i]->stride(dim);
        } else {
          strides[i].push_back(operands[i]->stride(dim));
        }
      }
      if (joins) {
        sizes.back() *= batch[dim];
      } else {
        sizes.push_back(batch[dim]);
      }
    }
  }

  void write(uint64_t (&to)[kBatchDims], size_t operand) const {
    const int64_t missing = kBatchDims - static_cast<int64_t>(sizes.size());
    for (int64_t i = 0; i < kBatchDims; ++i) {
      to[i] = i < missing ? 0 : static_cast<uint64_t>(strides[operand][i - missing]);
    }
  }
};

void encode(const Operand& a,
            const Operand& b,
            const at::Tensor& d,
            const std::optional<at::Tensor>& addend,
            const std::optional<at::Tensor>& bias,
            double scale,
            const Batch& batch,
            bool after_previous) {
  const int64_t m = d.size(-2), n = d.size(-1), k = a.tensor.size(-1), matrices = d.numel() / (m * n);
  const GemmPlan plan = plan_gemm(m, n, k, matrices, !a.transposed && b.transposed, is_large_chip());
  const std::string d_type = metal_type(d.scalar_type());
  GemmParams params{};
  params.a_stride = a.stride;
  params.b_stride = b.stride;
  batch.write(params.a_batch, 0);
  batch.write(params.b_batch, 1);
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t dim = static_cast<int64_t>(batch.sizes.size()) - 2 + i;
    params.batch[i] = dim < 0 ? 1 : static_cast<uint32_t>(batch.sizes[dim]);
  }
  params.d_stride = n;
  params.d_matrix = static_cast<uint64_t>(m) * n;
  params.m = static_cast<uint32_t>(m);
  params.n = static_cast<uint32_t>(n);
  params.k = static_cast<uint32_t>(k);
  params.chunks = plan.chunks;
  params.span = plan.span;

  // Of a product that is split, the sums alone go through the epilogue.
  GemmParams last = params;
  last.scale = static_cast<float>(scale);
  last.has_addend = addend.has_value();
  last.has_bias = bias.has_value();
  last.d_stride = static_cast<uint64_t>(d.stride(-2));
  bool aligned =
      n % 4 == 0 && last.d_stride % 4 == 0 && d.storage_offset() % 4 == 0 && (!bias || bias->storage_offset() % 4 == 0);
  if (addend) {
    batch.write(last.addend_batch, 2);
    const Operand rows{*addend, false, addend->stride(-2)};
    aligned = aligned && rows.aligned();
    last.addend_stride = rows.stride;
  }
  last.aligned_d = aligned;

  const bool split = plan.chunks > 1;
  params.scale = 1;
  params.aligned_d = n % 4 == 0;
  GemmParams& first = split ? params : last;
  at::Tensor partial;
  if (split) {
    partial = at::empty({matrices * plan.chunks, m, n}, d.options().dtype(at::kFloat));
  }
  Launch launch{"matmul",
                "",
                {a.transposed, b.transposed, a.aligned() && b.aligned()},
                {0, 0, 0},
                plan.side / 32 * (plan.side / 32) * kSimdWidth};
  launch.kernel = std::string("gemm_") + metal_type(a.tensor.scalar_type()) + "_" + metal_type(b.tensor.scalar_type()) +
                  "_" + (split ? "float" : d_type) + "_" + std::to_string(plan.side);
  launch.after_previous = after_previous;
  for (const GridPart& part : gemm_dispatches(plan, m, n, matrices)) {
    first.first_column_tile = static_cast<uint32_t>(part.first[0]);
    first.first_row_tile = static_cast<uint32_t>(part.first[1]);
    first.first_matrix = static_cast<uint32_t>(part.first[2]);
    launch.threadgroups = {part.count[0], part.count[1], part.count[2]};
    if (split) {
      dispatch(launch, {a.tensor, b.tensor, std::optional<at::Tensor>(), std::optional<at::Tensor>(), partial, params});
    } else {
      dispatch(launch, {a.tensor, b.tensor, addend, bias, d, last});
    }
  }
  if (split) {
    Launch sum{"matmul", "gemm_sum_" + d_type, {}, {0, 0, 0}, 0};
    const auto geometry = elementwise_geometry(m * ((n + 3) / 4), max_threads(sum));
    sum.threads = geometry.threads;
    sum.threadgroups = {geometry.groups, static_cast<uint64_t>(matrices), 1};
    sum.after_previous = true;
    dispatch(sum, {partial, addend, bias, d, last});
  }
}

}  // namespace

void gemm(
    const at::Tensor& a, const at::Tensor& b, const at::Tensor& d, const GemmEpilogue& epilogue, bool after_previous) {
  if (d.numel() == 0) {
    return;
  }
  TORCH_INTERNAL_ASSERT(d.is_contiguous() || (d.dim() == 2 && d.stride(1) == 1));
  const at::IntArrayRef batch = d.sizes().slice(0, d.dim() - 2);
  const Operand left = make_operand(readable(a, b.scalar_type(), d.scalar_type()), batch);
  const Operand right = make_operand(readable(b, a.scalar_type(), d.scalar_type()), batch);
  std::optional<at::Tensor> addend, bias;
  if (epilogue.addend) {
    addend = epilogue.addend->to(d.scalar_type()).expand(d.sizes());
    if (addend->stride(-1) != 1 && addend->size(-1) != 1) {
      addend = addend->contiguous();
    }
  }
  if (epilogue.bias) {
    bias = epilogue.bias->to(d.scalar_type()).contiguous();
  }
  std::vector<const at::Tensor*> operands{&left.tensor, &right.tensor};
  if (addend) {
    operands.push_back(&*addend);
  }
  const Batch joined(batch, operands);
  if (static_cast<int64_t>(joined.sizes.size()) > kBatchDims) {
    for (int64_t i = 0; i < batch[0]; ++i) {
      gemm(left.tensor[i], right.tensor[i], d[i],
           {epilogue.scale, addend ? std::optional<at::Tensor>((*addend)[i]) : std::nullopt, bias}, after_previous);
    }
    return;
  }
  encode(left, right, d, addend, bias, epilogue.scale, joined, after_previous);
}

at::Tensor as_matrix(const at::Tensor& t) {
  int64_t rows = 1;
  for (int64_t size : t.sizes().slice(0, t.dim() - 1)) {
    rows *= size;
  }
  return (t.numel() ? as_rows(t).tensor : t).view({rows, t.size(-1)});
}

}  // namespace torch_metalk
