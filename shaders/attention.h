// What every kind of attention does with the product of a query and a key: which keys are seen, scores, weights.
#pragma once

#include <metal_stdlib>

#include "params.h"
#include "softmax.h"

// A range of keys, or of queries.
struct Span {
  uint first, end;

  bool has(uint i) const { return i >= first && i < end; }
};

inline Span clamped(long first, long end, uint count) {
  const Span span = {uint(metal::clamp(first, long(0), long(count))), uint(metal::clamp(end, long(0), long(count)))};
  return span;
}

// The keys that a query at this position sees, and the positions that see this key, which is `key` places behind
// position 0. Both ends grow with the argument.
inline Span keys_of(long position, uint keys, constant AttentionScoring& s) {
  return clamped(position - s.before, position + s.after + 1, keys);
}
inline Span queries_of(long key, uint queries, constant AttentionScoring& s) {
  return clamped(key - s.after, key + s.before + 1, queries);
}

// What the mask adds to the score of an element, by its offset; -inf hides it.
inline float mask_bias(device const bool* seen, device const float* bias, ulong offset, constant AttentionScoring& s) {
  switch (s.mask) {
    case ATTENTION_MASK_BOOL:
      return seen[offset] ? 0.0f : -INFINITY;
    case ATTENTION_MASK_FLOAT:
      return bias[offset];
    default:
      return 0.0f;
  }
}

// The score of a product without what the mask adds, and its slope by the product in natural units.
struct Score {
  float value, slope;

  Score(float product, constant AttentionScoring& s) {
    value = product * s.scale;
    slope = s.slope;
    if (s.softcap != 0.0f) {
      const float t = metal::tanh(value);
      value = s.softcap * t;
      slope *= 1.0f - t * t;
    }
  }

  // -inf hides even a score that is NaN.
  float masked(float bias) const { return bias == -INFINITY ? -INFINITY : value + bias; }
};

// exp2 with the logarithm of e folded into scores where nothing is added to them: a number of a mask may be the least
// of float, which must not overflow.
inline float weight(float score, float shift, constant AttentionScoring& s) {
  return metal::exp2((score - shift) * s.exponent);
}
