// What the operators of attention share on the host: options, checks, and how scores are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../shaders/params.h"

namespace torch_metalk {

// The operator's arguments behind v, in order.
struct AttentionOptions {
  std::optional<at::Tensor> mask;  // bool or floating, of rank 2 or 4, broadcast to [B, H, Q, K]
  bool is_causal = false;
  bool lower_right = false;
  double scale = 1;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;

  bool restricts() const { return mask || is_causal || sliding_window; }
};

// What operators check of their options, and of q, k and v [B, H, N, D] with their mask.
void check_scoring(const char* op, const AttentionOptions& options);
void check_attention(
    const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options);

// Kernels read heads of any strides, whose numbers are neighbours.
at::Tensor dense_rows(const at::Tensor& t);
AttentionTensor strides_of(const at::Tensor& t);

// Whether every row of a tensor starts at a multiple of four elements.
bool is_aligned(const at::Tensor& t);

// A mask as kernels take it, [B, H, Q, K] by strides: at most one of both is there.
struct AttentionMask {
  std::optional<at::Tensor> seen;  // bool
  std::optional<at::Tensor> bias;  // float32
};

AttentionMask attention_mask(const AttentionOptions& options, at::IntArrayRef scores_shape);

// A query at position i sees keys by causality and window; `mask` gives strides and kind. The position of a query is
// the caller's business.
AttentionScoring attention_scoring(const AttentionOptions& options, const AttentionMask& mask);

}  // namespace torch_metalk
