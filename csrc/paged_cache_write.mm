#include <torch/library.h>

#include "../shaders/params.h"
#include "checks.h"
#include "decode_attention.h"
#include "geometry.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

void check(const at::Tensor& k,
           const at::Tensor& v,
           const at::Tensor& k_pages,
           const at::Tensor& v_pages,
           const at::Tensor& slots) {
  const char* op = "paged_cache_write";
  check_tensor(op, "k", k, k);
  const std::initializer_list<std::pair<const char*, const at::Tensor&>> others = {
      {"v", v}, {"k_pages", k_pages}, {"v_pages", v_pages}};
  for (const auto& [name, t] : others) {
    check_tensor(op, name, t, k);
    check_same_dtype(op, name, t, "k", k);
  }
  CHECK_VALUE(k.dim() == 3, op, "k", shape_of(k), "rank 3, [T, Hkv, D]");
  CHECK_VALUE(v.dim() == 3 && v.sizes().slice(0, 2) == k.sizes().slice(0, 2), op, "v", shape_of(v), "[", k.size(0),
              ", ", k.size(1), ", Dv], from k");
  check_pages(op, k_pages, v_pages);
  CHECK_VALUE(k_pages.sizes().slice(2) == k.sizes().slice(1), op, "k_pages", shape_of(k_pages), "[pages, page_size, ",
              k.size(1), ", ", k.size(2), "], from k");
  CHECK_VALUE(v_pages.size(3) == v.size(2), op, "v_pages", shape_of(v_pages), "as many components as v, ", v.size(2));
  check_index(op, "slots", slots, {k.size(0)}, k);
  CHECK_VALUE(k.numel() <= kMaxCount && v.numel() <= kMaxCount, op, "k", shape_of(k), "at most 2^31 - 1 elements");
}

// What was written elsewhere is copied; what a kernel wrote, autograd has to hear of.
void finish(at::Tensor& pages, const at::Tensor& written) {
  if (!written.is_same(pages)) {
    pages.copy_(written);
  } else if (!pages.is_inference()) {
    pages.unsafeGetTensorImpl()->bump_version();
  }
}

void paged_cache_write(const at::Tensor& keys,
                       const at::Tensor& values,
                       at::Tensor& k_pages,
                       at::Tensor& v_pages,
                       const at::Tensor& slots) {
  check(keys, values, k_pages, v_pages, slots);
  if (keys.numel() + values.numel() == 0) {
    return;
  }
  const at::Tensor k = dense_rows(keys.transpose(0, 1).unsqueeze(0));
  const at::Tensor v = dense_rows(values.transpose(0, 1).unsqueeze(0));
  // Pages whose numbers are no neighbours are written as a copy, which takes their place.
  const at::Tensor k_to = dense_rows(k_pages), v_to = dense_rows(v_pages);
  CacheWriteParams params{};
  params.k = strides_of(k);
  params.v = strides_of(v);
  params.k_pages = strides_of(k_to.transpose(1, 2));
  params.v_pages = strides_of(v_to.transpose(1, 2));
  params.slot_stride = slots.stride(0);
  params.slots = k_to.size(0) * k_to.size(1);
  params.heads = static_cast<uint32_t>(k.size(1));
  params.head_dim = static_cast<uint32_t>(k.size(3));
  params.value_dim = static_cast<uint32_t>(v.size(3));
  params.page_size = static_cast<uint32_t>(k_to.size(1));
  Launch launch{"paged_cache_write",
                std::string("paged_cache_write_") + metal_type(k.scalar_type()) +
                    (slots.scalar_type() == at::kInt ? "_int" : "_long"),
                {is_aligned(k) && is_aligned(v) && is_aligned(k_to) && is_aligned(v_to)},
                {},
                0};
  const int64_t vectors = k.size(1) * ((k.size(3) + 3) / 4 + (v.size(3) + 3) / 4);
  const ElementwiseGeometry geometry = elementwise_geometry(vectors, max_threads(launch));
  launch.threads = geometry.threads;
  launch.threadgroups = {geometry.groups, static_cast<uint64_t>(k.size(2)), 1};
  dispatch(launch, {k, v, k_to, v_to, slots, params});
  finish(k_pages, k_to);
  finish(v_pages, v_to);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) { m.impl("paged_cache_write", &paged_cache_write); }

}  // namespace torch_metalk
