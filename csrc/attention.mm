#include "attention.h"

#include <algorithm>
#include <cmath>

namespace torch_metalk {

AttentionMask attention_mask(const AttentionOptions& options, at::IntArrayRef scores_shape) {
  if (!options.mask) {
    return {};
  }
  const at::Tensor mask = options.mask->expand(scores_shape);
  if (mask.scalar_type() == at::kBool) {
    return {mask, std::nullopt};
  }
  // Before broadcasting: a copy holds each number once.
  return {std::nullopt, options.mask->to(at::kFloat).expand(scores_shape)};
}

AttentionScoring attention_scoring(const AttentionOptions& options, const AttentionMask& mask) {
  // Wider than any sequence, and no sum of a few of them overflows.
  constexpr int64_t unrestricted = int64_t{1} << 40;
  const double log2e = 1 / std::log(2.0);
  AttentionScoring scoring{};
  const int64_t window = std::min(options.sliding_window.value_or(unrestricted), unrestricted) - 1;
  scoring.before = window;
  scoring.after = options.is_causal ? 0 : window;
  if (const auto& strided = mask.seen ? mask.seen : mask.bias) {
    scoring.mask = mask.seen ? ATTENTION_MASK_BOOL : ATTENTION_MASK_FLOAT;
    scoring.mask_batch = strided->stride(0);
    scoring.mask_head = strided->stride(1);
    scoring.mask_query = strided->stride(2);
    scoring.mask_key = strided->stride(3);
  }
  const double units = mask.bias ? 1 : log2e;
  scoring.natural = static_cast<float>(1 / units);
  scoring.exponent = static_cast<float>(log2e / units);
  scoring.scale = static_cast<float>(options.softcap ? options.scale / *options.softcap : options.scale * units);
  scoring.softcap = static_cast<float>(options.softcap ? *options.softcap * units : 0);
  scoring.slope = static_cast<float>(options.scale);
  return scoring;
}

}  // namespace torch_metalk
