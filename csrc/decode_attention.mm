#include "decode_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "geometry.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

constexpr int64_t kMostComponents = 256;  // of a key or value

// Numbers that kernels read as int32, side by side; those that do not fit become such that are out of range too.
std::optional<at::Tensor> as_int32(const std::optional<at::Tensor>& t, int64_t out_of_range) {
  if (!t) {
    return t;
  }
  return (t->scalar_type() == at::kInt ? *t : t->clamp(-1, out_of_range).to(at::kInt)).contiguous();
}

// Keys that a sequence has room for.
int64_t room(const DecodeCache& cache) {
  const int64_t page_size = cache.k.size(2);
  return cache.table ? cache.table->size(1) * page_size : page_size;
}

}  // namespace

bool decode_serves(const at::Tensor& q, const at::Tensor& v) {
  return q.size(3) <= kMostComponents && v.size(3) <= kMostComponents;
}

void attend_to_cache(const at::Tensor& queries,
                     const DecodeCache& cache,
                     const AttentionOptions& options,
                     const at::Tensor& o,
                     const at::Tensor& lse) {
  TORCH_INTERNAL_ASSERT(o.transpose(1, 2).is_contiguous() && lse.is_contiguous());
  const at::Tensor q = dense_rows(queries), k = dense_rows(cache.k), v = dense_rows(cache.v);
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2), kv_heads = k.size(1), value_dim = v.size(3);
  const int64_t page_size = k.size(2), keys = room(cache);
  const std::optional<at::Tensor> lengths = as_int32(cache.lengths, keys), table = as_int32(cache.table, k.size(0));
  const AttentionMask mask = attention_mask(options, {batch, heads, rows, keys});

  DecodeParams params{};
  params.scoring = attention_scoring(options, mask);
  params.position = options.lower_right ? keys - rows : 0;
  params.q = strides_of(q);
  params.k = strides_of(k);
  params.v = strides_of(v);
  if (table) {
    params.table_pages = static_cast<uint32_t>(table->size(1));
    while (int64_t{1} << params.page_bits < page_size) {
      ++params.page_bits;
    }
  }
  params.kv_heads = static_cast<uint32_t>(kv_heads);
  params.group = static_cast<uint32_t>(heads / kv_heads);
  params.queries = static_cast<uint32_t>(rows);
  params.keys = static_cast<uint32_t>(keys);
  params.head_dim = static_cast<uint32_t>(k.size(3));
  params.value_dim = static_cast<uint32_t>(value_dim);
  params.pages = static_cast<uint32_t>(k.size(0));
  params.has_lengths = lengths.has_value();
  params.aligned_o = value_dim % 4 == 0;
  const DecodePlan plan = plan_decode(batch, kv_heads, params.group * rows, keys, value_dim, is_large_chip());
  params.row_blocks = plan.row_blocks;
  params.chunks = plan.chunks;
  params.share = plan.share;
  params.lanes = plan.lanes;

  const bool join = plan.chunks > 1;
  at::Tensor partial_o, statistics;
  if (join) {
    const auto floats = q.options().dtype(at::kFloat);
    partial_o = at::empty({plan.chunks, batch, heads, rows, value_dim}, floats);
    statistics = at::empty({plan.chunks, batch, heads, rows, 2}, floats);
  }
  const std::string type = metal_type(q.scalar_type());
  Launch launch{"decode_attention",
                "decode_attention_" + type + "_" + std::to_string(plan.rows),
                {is_aligned(q) && is_aligned(k) && is_aligned(v), table.has_value()},
                {plan.chunks, static_cast<uint64_t>(kv_heads) * plan.row_blocks, static_cast<uint64_t>(batch)},
                kDecodeThreads};
  dispatch(launch, {q, k, v, mask.seen, mask.bias, lengths, table, o, lse, partial_o, statistics, params});
  if (join) {
    Launch sum{"decode_attention", "decode_attention_join_" + type, {}, {static_cast<uint64_t>(lse.numel()), 1, 1}, 0};
    sum.threads = whole_simdgroups((value_dim + 3) / 4, kMostComponents / 4, max_threads(sum));
    sum.after_previous = true;
    dispatch(sum, {partial_o, statistics, o, lse, params});
  }
}

std::tuple<at::Tensor, at::Tensor> attend_to_cache(const at::Tensor& q,
                                                   const DecodeCache& cache,
                                                   const AttentionOptions& options) {
  const at::Tensor o = at::empty({q.size(0), q.size(2), q.size(1), cache.v.size(3)}, q.options()).transpose(1, 2);
  const at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  if (o.numel() == 0 || room(cache) == 0) {
    return {o.zero_(), lse.zero_()};
  }
  attend_to_cache(q, cache, options, o, lse);
  return {o, lse};
}

void check_decode_queries(const char* op, const at::Tensor& q, const char* v_name, const at::Tensor& v) {
  CHECK_VALUE(q.size(2) <= kMostDecodeQueries, op, "q", c10::str("of ", q.size(2), " queries"), "at most ",
              kMostDecodeQueries, "; attention takes more");
  CHECK_VALUE(q.size(3) <= kMostComponents, op, "q", c10::str("of head dim ", q.size(3)), "at most ", kMostComponents);
  CHECK_VALUE(v.size(-1) <= kMostComponents, op, v_name, c10::str("of head dim ", v.size(-1)), "at most ",
              kMostComponents);
}

void check_pages(const char* op, const at::Tensor& k_pages, const at::Tensor& v_pages) {
  CHECK_VALUE(k_pages.dim() == 4, op, "k_pages", shape_of(k_pages), "rank 4, [pages, page_size, Hkv, D]");
  const int64_t page_size = k_pages.size(1);
  CHECK_VALUE(page_size == 8 || page_size == 16 || page_size == 32, op, "k_pages", c10::str("of page size ", page_size),
              "8, 16, 32");
  CHECK_VALUE(v_pages.dim() == 4 && v_pages.sizes().slice(0, 3) == k_pages.sizes().slice(0, 3), op, "v_pages",
              shape_of(v_pages), "[", k_pages.size(0), ", ", page_size, ", ", k_pages.size(2), ", Dv], from k_pages");
}

void check_index(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape, const at::Tensor& q) {
  CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, op, name, dtype_of(t), "int32, int64");
  check_device(op, name, t, q);
  CHECK_VALUE(t.sizes() == shape, op, name, shape_of(t), "a tensor of shape ", tuple(shape));
}

namespace {

std::tuple<at::Tensor, at::Tensor> decode_attention(const at::Tensor& q,
                                                    const at::Tensor& k,
                                                    const at::Tensor& v,
                                                    const std::optional<at::Tensor>& lengths,
                                                    const std::optional<at::Tensor>& mask,
                                                    double scale,
                                                    std::optional<int64_t> sliding_window,
                                                    std::optional<double> softcap) {
  const char* op = "decode_attention";
  const AttentionOptions options{mask, true, true, scale, sliding_window, softcap};
  check_attention(op, q, k, v, options);
  check_decode_queries(op, q, "v", v);
  if (lengths) {
    check_index(op, "lengths", *lengths, {q.size(0)}, q);
  }
  return attend_to_cache(q, {k, v, lengths}, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) { m.impl("decode_attention", &decode_attention); }

}  // namespace torch_metalk
