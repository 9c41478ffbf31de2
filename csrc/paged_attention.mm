#include <torch/library.h>

#include "checks.h"
#include "decode_attention.h"
#include "layout.h"

namespace torch_metalk {
namespace {

std::tuple<at::Tensor, at::Tensor> paged_attention(const at::Tensor& q,
                                                   const at::Tensor& k_pages,
                                                   const at::Tensor& v_pages,
                                                   const at::Tensor& block_tables,
                                                   const at::Tensor& context_lens,
                                                   double scale,
                                                   std::optional<int64_t> sliding_window,
                                                   std::optional<double> softcap) {
  const char* op = "paged_attention";
  const AttentionOptions options{std::nullopt, true, true, scale, sliding_window, softcap};
  check_scoring(op, options);
  check_tensor(op, "q", q, q);
  check_tensor(op, "k_pages", k_pages, q);
  check_tensor(op, "v_pages", v_pages, q);
  check_same_dtype(op, "k_pages", k_pages, "q", q);
  check_same_dtype(op, "v_pages", v_pages, "q", q);
  CHECK_VALUE(q.dim() == 4, op, "q", shape_of(q), "rank 4, [B, H, Q, D]");
  check_pages(op, k_pages, v_pages);
  CHECK_VALUE(k_pages.size(3) == q.size(3), op, "k_pages", c10::str("of head dim ", k_pages.size(3)), "that of q, ",
              q.size(3));
  check_decode_queries(op, q, "v_pages", v_pages);
  const int64_t heads = q.size(1), kv_heads = k_pages.size(2);
  CHECK_VALUE(heads == 0 || (kv_heads && heads % kv_heads == 0), op, "k_pages", c10::str("of ", kv_heads, " heads"),
              "a number that divides the ", heads, " heads of q");
  CHECK_VALUE(block_tables.dim() == 2, op, "block_tables", shape_of(block_tables), "rank 2, [B, pages of a sequence]");
  check_index(op, "block_tables", block_tables, {q.size(0), block_tables.size(1)}, q);
  check_index(op, "context_lens", context_lens, {q.size(0)}, q);
  CHECK_VALUE(block_tables.size(1) * k_pages.size(1) <= kMaxCount && k_pages.size(0) <= kMaxCount, op, "block_tables",
              shape_of(block_tables), "at most 2^31 - 1 pages, and keys of a sequence");
  return attend_to_cache(q, {k_pages.transpose(1, 2), v_pages.transpose(1, 2), context_lens, block_tables}, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) { m.impl("paged_attention", &paged_attention); }

}  // namespace torch_metalk
