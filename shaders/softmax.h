// Softmax of a row by one threadgroup, whatever its scores are made of. Statistics are float32 and in a fixed order.
//
// Scores gives what a row consists of: `at(i)`, scores i to i + 3, -inf where hidden or behind the end; `end`, from
// where on all are hidden; `weights(scores, shift)`, the exponentials of scores less `shift`.
#pragma once

#include <metal_stdlib>

#include "load_store.h"
#include "reduce.h"

// Of a row in one pass each thread takes one or two vectors of 4 columns.
constant constexpr uint max_vectors = 2;

// A thread of a threadgroup, and what its threads exchange.
struct RowThread {
  uint index, threads, lane, simdgroup, simdgroups;

  float max(float value, threadgroup float* partial) const {
    return threadgroup_max(value, partial, lane, simdgroup, simdgroups);
  }
  float sum(float value, threadgroup float* partial) const {
    return threadgroup_sum(value, partial, lane, simdgroup, simdgroups);
  }
};
// Of a threadgroup.
constant constexpr uint max_simdgroups = 32;

inline float max4(float4 v) { return metal::max(metal::max(v.x, v.y), metal::max(v.z, v.w)); }
inline float sum4(float4 v) { return metal::dot(v, float4(1.0f)); }

// What to subtract from scores of this maximum: of a row that sees nothing it is -inf, and its weights are 0.
inline float shift_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }
inline float4 quotient(float4 weights, float sum) { return sum == 0.0f ? float4(0.0f) : weights / sum; }

struct SoftmaxStatistics {
  float shift, sum;
};

// Rows that fit into the registers of the threads, `vectors` of them each.
template <typename Scores, typename T>
inline SoftmaxStatistics softmax_of_row(Scores scores,
                                        device T* y,
                                        uint columns,
                                        bool vectorized,
                                        uint vectors,
                                        RowThread own,
                                        threadgroup float* partial_max,
                                        threadgroup float* partial_sum) {
  float4 values[max_vectors];
  float maximum = -INFINITY;
  for (uint k = 0; k < vectors; ++k) {
    values[k] = scores.at(4 * (k * own.threads + own.index));
    maximum = metal::max(maximum, max4(values[k]));
  }
  const float shift = shift_of(own.max(maximum, partial_max));
  float sum = 0.0f;
  for (uint k = 0; k < vectors; ++k) {
    values[k] = scores.weights(values[k], shift);
    sum += sum4(values[k]);
  }
  sum = own.sum(sum, partial_sum);
  for (uint k = 0; k < vectors; ++k) {
    store4(y, 4 * (k * own.threads + own.index), columns, vectorized, quotient(values[k], sum));
  }
  const SoftmaxStatistics statistics = {shift, sum};
  return statistics;
}

// Rows of any length: they are read twice. Each thread keeps the sum for the maximum it has seen so far (Milakov and
// Gimelshein, arXiv:1805.02867).
template <typename Scores, typename T>
inline SoftmaxStatistics softmax_of_long_row(Scores scores,
                                             device T* y,
                                             uint columns,
                                             bool vectorized,
                                             RowThread own,
                                             threadgroup float* partial_max,
                                             threadgroup float* partial_sum) {
  float maximum = -INFINITY, sum = 0.0f;
  for (uint i = 4 * own.index; i < scores.end; i += 4 * own.threads) {
    const float4 values = scores.at(i);
    const float larger = metal::max(maximum, max4(values));
    sum = sum * scores.weights(float4(maximum), shift_of(larger)).x + sum4(scores.weights(values, shift_of(larger)));
    maximum = larger;
  }
  const float shift = shift_of(own.max(maximum, partial_max));
  sum = own.sum(sum * scores.weights(float4(maximum), shift).x, partial_sum);
  for (uint i = 4 * own.index; i < columns; i += 4 * own.threads) {
    store4(y, i, columns, vectorized, quotient(scores.weights(scores.at(i), shift), sum));
  }
  const SoftmaxStatistics statistics = {shift, sum};
  return statistics;
}
