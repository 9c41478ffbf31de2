// Attention of few queries to a cache of keys and values: what decode_attention, paged_attention, and attention where
// it keeps nothing, have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "attention.h"

namespace torch_metalk {

// Where the keys and values of sequences lie.
struct DecodeCache {
  at::Tensor k, v;  // [B, Hkv, K, D] and [B, Hkv, K, Dv]; with a table [pages, Hkv, page_size, D] and Dv; any strides
  std::optional<at::Tensor> lengths = std::nullopt;  // int32 or int64 [B]: keys that are there, K at most
  // int32 or int64 [B, pages of a sequence], the page size being a power of two. Keys in a page that does not exist are
  // hidden.
  std::optional<at::Tensor> table = std::nullopt;
};

// Whether the kernels take heads of q's and v's width.
bool decode_serves(const at::Tensor& q, const at::Tensor& v);

// What `attention` gives for q [B, H, Q, D], with sums in float32: o [B, H, Q, Dv], laid out as [B, Q, H, Dv], and lse,
// float32 [B, H, Q]. There is at least one query and one key. Where sequences have lengths their last query is at their
// last key.
void attend_to_cache(const at::Tensor& q,
                     const DecodeCache& cache,
                     const AttentionOptions& options,
                     const at::Tensor& o,
                     const at::Tensor& lse);

// The same with new o and lse, zero where there are no keys.
std::tuple<at::Tensor, at::Tensor> attend_to_cache(const at::Tensor& q,
                                                   const DecodeCache& cache,
                                                   const AttentionOptions& options);

// What decode_attention and paged_attention check of their queries; and operators of a cache of its pages, and indices.
void check_decode_queries(const char* op, const at::Tensor& q, const char* v_name, const at::Tensor& v);
void check_pages(const char* op, const at::Tensor& k_pages, const at::Tensor& v_pages);
void check_index(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape, const at::Tensor& q);

}  // namespace torch_metalk
