// Softmax over the last dimension with scale and mask, forward and backward. One threadgroup works on a row; statistics
// are float32 and in a fixed order. What a mask hides is not read where position hides it, and written as 0.
//
// T is the type of x and y, M of the mask: bool, T, or float.
#include <metal_stdlib>

#include "load_store.h"
#include "params.h"
#include "reduce.h"
#include "softmax.h"

using namespace metal;

constant bool vectorized [[function_constant(0)]];  // rows start at multiples of 4 elements
constant bool has_mask [[function_constant(1)]];
constant bool causal [[function_constant(2)]];
constant bool two_vectors [[function_constant(3)]];  // of a row in one pass: 8 columns a thread instead of 4

constant uint vectors = two_vectors ? 2 : 1;

inline float masked(float score, bool visible) { return visible ? score : -INFINITY; }

// -inf hides even a score that is NaN.
template <typename M>
inline float masked(float score, M bias) {
  return float(bias) == -INFINITY ? -INFINITY : score + float(bias);
}

// Keys from here on are hidden by position.
inline uint visible_keys(uint query, constant SoftmaxParams& p) {
  return causal ? uint(clamp(long(query) + p.causal_shift + 1, long(0), long(p.keys))) : p.keys;
}

template <typename M>
inline device const M* mask_row(device const M* mask, uint row, constant SoftmaxParams& p) {
  const uint query = row % p.queries, head = row / p.queries % p.heads, batch = row / p.queries / p.heads;
  return mask + batch * p.mask_batch + head * p.mask_head + query * p.mask_query;
}

// The scores of a row, with scale and mask.
template <typename T, typename M>
struct MaskedScores {
  device const T* x;
  device const M* mask;
  uint end;
  constant SoftmaxParams& p;

  float4 at(uint i) const {
    float4 scores = load4(x, i, end, vectorized) * p.scale;
    for (uint k = 0; k < 4; ++k) {
      if (i + k >= end) {
        scores[k] = -INFINITY;
      } else if (has_mask) {
        scores[k] = masked(scores[k], mask[(i + k) * p.mask_key]);
      }
    }
    return scores;
  }
  float4 weights(float4 scores, float shift) const { return exp(scores - shift); }
};

template <typename T, typename M>
inline MaskedScores<T, M> scores_of(device const T* x, device const M* mask, uint row, constant SoftmaxParams& p) {
  const MaskedScores<T, M> scores = {x + row * p.x_stride, has_mask ? mask_row(mask, row, p) : mask,
                                     visible_keys(row % p.queries, p), p};
  return scores;
}

// Rows of at most 8 columns a thread: scores stay in registers.
template <typename T, typename M>
[[kernel]] void softmax_single_row(device const T* x [[buffer(0)]],  // [rows, keys], rows x_stride apart
                                   device const M* mask
                                   [[buffer(1)]],              // [batch, heads, queries, keys] by strides, or unbound
                                   device T* y [[buffer(2)]],  // [rows, keys]
                                   constant SoftmaxParams& p [[buffer(3)]],
                                   uint row [[threadgroup_position_in_grid]],
                                   uint thread_index [[thread_position_in_threadgroup]],
                                   uint threads [[threads_per_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial_max[max_simdgroups], partial_sum[max_simdgroups];
  const RowThread row_thread = {thread_index, threads, lane, simdgroup, simdgroups};
  softmax_of_row(scores_of(x, mask, row, p), y + ulong(row) * p.keys, p.keys, vectorized, vectors, row_thread,
                 partial_max, partial_sum);
}

// Rows of any length: x and mask are read twice.
template <typename T, typename M>
[[kernel]] void softmax_looped(device const T* x [[buffer(0)]],  // [rows, keys], rows x_stride apart
                               device const M* mask
                               [[buffer(1)]],              // [batch, heads, queries, keys] by strides, or unbound
                               device T* y [[buffer(2)]],  // [rows, keys]
                               constant SoftmaxParams& p [[buffer(3)]],
                               uint row [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_position_in_threadgroup]],
                               uint threads [[threads_per_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial_max[max_simdgroups], partial_sum[max_simdgroups];
  const RowThread row_thread = {thread_index, threads, lane, simdgroup, simdgroups};
  softmax_of_long_row(scores_of(x, mask, row, p), y + ulong(row) * p.keys, p.keys, vectorized, row_thread, partial_max,
                      partial_sum);
}

// Terms of sum(dy * y). Where y is 0 nothing counts, not even a dy that is not finite.
inline float4 weighted(float4 dy, float4 y) { return select(dy * y, float4(0.0f), y == 0.0f); }

inline float4 gradient(float4 dy, float4 y, float sum, float scale) {
  return select(y * (dy - sum) * scale, float4(0.0f), y == 0.0f);
}

template <typename T>
[[kernel]] void softmax_backward_single_row(device const T* dy [[buffer(0)]],  // [rows, keys], rows x_stride apart
                                            device const T* y [[buffer(1)]],   // [rows, keys], rows y_stride apart
                                            device T* dx [[buffer(2)]],        // [rows, keys]
                                            constant SoftmaxParams& p [[buffer(3)]],
                                            uint row [[threadgroup_position_in_grid]],
                                            uint thread_index [[thread_position_in_threadgroup]],
                                            uint threads [[threads_per_threadgroup]],
                                            uint lane [[thread_index_in_simdgroup]],
                                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  float4 incoming[max_vectors], values[max_vectors];
  float sum = 0.0f;
  for (uint k = 0; k < vectors; ++k) {
    const uint i = 4 * (k * threads + thread_index);
    incoming[k] = load4(dy + row * p.x_stride, i, p.keys, vectorized);
    values[k] = load4(y + row * p.y_stride, i, p.keys, vectorized);
    sum += sum4(weighted(incoming[k], values[k]));
  }
  sum = threadgroup_sum(sum, partial, lane, simdgroup, simdgroups);
  for (uint k = 0; k < vectors; ++k) {
    const uint i = 4 * (k * threads + thread_index);
    store4(dx + ulong(row) * p.keys, i, p.keys, vectorized, gradient(incoming[k], values[k], sum, p.scale));
  }
}

// The same for rows of any length: dy and y are read twice.
template <typename T>
[[kernel]] void softmax_backward_looped(device const T* dy [[buffer(0)]],  // [rows, keys], rows x_stride apart
                                        device const T* y [[buffer(1)]],   // [rows, keys], rows y_stride apart
                                        device T* dx [[buffer(2)]],        // [rows, keys]
                                        constant SoftmaxParams& p [[buffer(3)]],
                                        uint row [[threadgroup_position_in_grid]],
                                        uint thread_index [[thread_position_in_threadgroup]],
                                        uint threads [[threads_per_threadgroup]],
                                        uint lane [[thread_index_in_simdgroup]],
                                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                                        uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  device const T* dy_row = dy + row * p.x_stride;
  device const T* y_row = y + row * p.y_stride;
  float sum = 0.0f;
  for (uint i = 4 * thread_index; i < p.keys; i += 4 * threads) {
    sum += sum4(weighted(load4(dy_row, i, p.keys, vectorized), load4(y_row, i, p.keys, vectorized)));
  }
  sum = threadgroup_sum(sum, partial, lane, simdgroup, simdgroups);
  for (uint i = 4 * thread_index; i < p.keys; i += 4 * threads) {
    const float4 incoming = load4(dy_row, i, p.keys, vectorized), values = load4(y_row, i, p.keys, vectorized);
    store4(dx + ulong(row) * p.keys, i, p.keys, vectorized, gradient(incoming, values, sum, p.scale));
  }
}

#define INSTANTIATE_KERNEL(kernel, T, M) \
  template [[host_name(#kernel "_" #T "_" #M)]] [[kernel]] decltype(kernel<T, M>) kernel<T, M>;

#define INSTANTIATE(T, M)                      \
  INSTANTIATE_KERNEL(softmax_single_row, T, M) \
  INSTANTIATE_KERNEL(softmax_looped, T, M)

//          x       mask
INSTANTIATE(float, bool)
INSTANTIATE(float, float)
INSTANTIATE(half, bool)
INSTANTIATE(half, half)
INSTANTIATE(half, float)
INSTANTIATE(bfloat, bool)
INSTANTIATE(bfloat, bfloat)
INSTANTIATE(bfloat, float)

#define INSTANTIATE_BACKWARD_KERNEL(kernel, T) \
  template [[host_name(#kernel "_" #T)]] [[kernel]] decltype(kernel<T>) kernel<T>;

#define INSTANTIATE_BACKWARD(T)                               \
  INSTANTIATE_BACKWARD_KERNEL(softmax_backward_single_row, T) \
  INSTANTIATE_BACKWARD_KERNEL(softmax_backward_looped, T)

INSTANTIATE_BACKWARD(float)
INSTANTIATE_BACKWARD(half)
INSTANTIATE_BACKWARD(bfloat)
