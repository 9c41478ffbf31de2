// Root mean square layer normalisation, forward and backward (Zhang and Sennrich, NeurIPS 2019).
//
// T is the type of x, W of the weight, O of y: the eager twin in ops/rms_norm.py has the rules. One threadgroup works
// on a row at a time, each thread on vectors of 4 neighbouring columns; sums are float32 and in a fixed order.
#include <metal_stdlib>

#include "load_store.h"
#include "params.h"
#include "reduce.h"

using namespace metal;

constant bool has_weight [[function_constant(0)]];
constant bool round_before_weight [[function_constant(1)]];
constant bool vectorized [[function_constant(2)]];  // rows start at multiples of 4 elements and hold one
constant bool wants_dx [[function_constant(3)]];
constant bool wants_dweight [[function_constant(4)]];
constant bool also_float32 [[function_constant(5)]];  // y a second time, as it was rounded, for the CPU's float32
constant bool two_vectors [[function_constant(6)]];   // of a row in one pass: 8 columns a thread instead of 4

constant uint vectors = two_vectors ? 2 : 1;
constant constexpr uint max_vectors = 2;

constant constexpr uint max_simdgroups = 32;

// mean(x^2) + eps -> 1 / sqrt
inline float reciprocal_norm(float sum_of_squares, constant RMSNormParams& p) {
  return precise::rsqrt(sum_of_squares / float(p.columns) + p.eps);
}

template <typename W>
inline float4 factor4(device const W* weight, uint i, constant RMSNormParams& p) {
  return has_weight ? load4(weight, i, p.columns, vectorized) + p.weight_offset : float4(1.0f);
}

template <typename T, typename W>
inline float4 normalize4(float4 x, float rstd, device const W* weight, uint i, constant RMSNormParams& p) {
  float4 normalized = x * rstd;
  if (round_before_weight) {
    normalized = float4(vec<T, 4>(normalized));
  }
  return normalized * factor4(weight, i, p);
}

// Rows of at most 8 columns a thread: x stays in registers between the two uses.
template <typename T, typename W, typename O>
[[kernel]] void rms_norm_single_row(device const T* x [[buffer(0)]],        // [rows, columns], rows x_stride apart
                                    device const W* weight [[buffer(1)]],   // [columns]; unbound without weight
                                    device O* y [[buffer(2)]],              // [rows, columns]
                                    device float* rstd [[buffer(3)]],       // [rows]
                                    device float* y_float32 [[buffer(4)]],  // [rows, columns]; unbound if not wanted
                                    constant RMSNormParams& p [[buffer(5)]],
                                    uint row [[threadgroup_position_in_grid]],
                                    uint thread_index [[thread_position_in_threadgroup]],
                                    uint threads [[threads_per_threadgroup]],
                                    uint lane [[thread_index_in_simdgroup]],
                                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                                    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  device const T* x_row = x + row * p.x_stride;
  float4 values[max_vectors];
  float squares = 0.0f;
  for (uint v = 0; v < vectors; ++v) {
    const uint i = 4 * (thread_index + v * threads);
    values[v] = load4(x_row, i, p.columns, vectorized);
    squares += dot(values[v], values[v]);
  }
  const float r = reciprocal_norm(threadgroup_sum(squares, partial, lane, simdgroup, simdgroups), p);
  device O* y_row = y + ulong(row) * p.columns;
  device float* y_float32_row = y_float32 + ulong(row) * p.columns;
  for (uint v = 0; v < vectors; ++v) {
    const uint i = 4 * (thread_index + v * threads);
    const float4 normalized = normalize4<T>(values[v], r, weight, i, p);
    store4(y_row, i, p.columns, vectorized, normalized);
    if (also_float32) {
      store4(y_float32_row, i, p.columns, vectorized, float4(vec<O, 4>(normalized)));
    }
  }
  if (thread_index == 0) {
    rstd[row] = r;
  }
}

// Rows of any length: x is read twice.
template <typename T, typename W, typename O>
[[kernel]] void rms_norm_looped(device const T* x [[buffer(0)]],        // [rows, columns], rows x_stride apart
                                device const W* weight [[buffer(1)]],   // [columns]; unbound without weight
                                device O* y [[buffer(2)]],              // [rows, columns]
                                device float* rstd [[buffer(3)]],       // [rows]
                                device float* y_float32 [[buffer(4)]],  // [rows, columns]; unbound if not wanted
                                constant RMSNormParams& p [[buffer(5)]],
                                uint row [[threadgroup_position_in_grid]],
                                uint thread_index [[thread_position_in_threadgroup]],
                                uint threads [[threads_per_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]],
                                uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  device const T* x_row = x + row * p.x_stride;
  float squares = 0.0f;
  for (uint i = 4 * thread_index; i < p.columns; i += 4 * threads) {
    const float4 values = load4(x_row, i, p.columns, vectorized);
    squares += dot(values, values);
  }
  const float r = reciprocal_norm(threadgroup_sum(squares, partial, lane, simdgroup, simdgroups), p);
  device O* y_row = y + ulong(row) * p.columns;
  device float* y_float32_row = y_float32 + ulong(row) * p.columns;
  for (uint i = 4 * thread_index; i < p.columns; i += 4 * threads) {
    const float4 values = load4(x_row, i, p.columns, vectorized);
    const float4 normalized = normalize4<T>(values, r, weight, i, p);
    store4(y_row, i, p.columns, vectorized, normalized);
    if (also_float32) {
      store4(y_float32_row, i, p.columns, vectorized, float4(vec<O, 4>(normalized)));
    }
  }
  if (thread_index == 0) {
    rstd[row] = r;
  }
}

// dx = rstd * (g - x * rstd^2 * mean(g * x)) with g = dy * (weight + offset), and sums of dy * x * rstd over the rows
// of this threadgroup. Rows of at most 8 columns a thread: everything stays in registers.
template <typename T, typename W, typename O>
[[kernel]] void rms_norm_backward_single_row(device const O* dy [[buffer(0)]],  // [rows, columns], rows dy_stride apart
                                             device const T* x [[buffer(1)]],   // [rows, columns], rows x_stride apart
                                             device const W* weight [[buffer(2)]],  // [columns]; unbound without weight
                                             device const float* rstd [[buffer(3)]],  // [rows]
                                             device T* dx [[buffer(4)]],  // [rows, columns]; unbound if not wanted
                                             device float* partial_dweight
                                             [[buffer(5)]],  // [threadgroups, columns]; unbound if not wanted
                                             constant RMSNormParams& p [[buffer(6)]],
                                             uint group [[threadgroup_position_in_grid]],
                                             uint thread_index [[thread_position_in_threadgroup]],
                                             uint threads [[threads_per_threadgroup]],
                                             uint lane [[thread_index_in_simdgroup]],
                                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                                             uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  float4 factor[max_vectors], dweight[max_vectors];
  for (uint v = 0; v < vectors; ++v) {
    factor[v] = factor4(weight, 4 * (thread_index + v * threads), p);
    dweight[v] = 0.0f;
  }
  const uint first = group * p.rows_per_group;
  for (uint row = first; row < min(first + p.rows_per_group, p.rows); ++row) {
    device const O* dy_row = dy + row * p.dy_stride;
    device const T* x_row = x + row * p.x_stride;
    const float r = rstd[row];
    float4 g[max_vectors], values[max_vectors];
    float products = 0.0f;
    for (uint v = 0; v < vectors; ++v) {
      const uint i = 4 * (thread_index + v * threads);
      const float4 incoming = load4(dy_row, i, p.columns, vectorized);
      values[v] = load4(x_row, i, p.columns, vectorized);
      dweight[v] += incoming * (values[v] * r);
      g[v] = incoming * factor[v];
      products += dot(g[v], values[v]);
    }
    if (wants_dx) {
      const float sum = threadgroup_sum(products, partial, lane, simdgroup, simdgroups);
      // rstd once with the sum and twice behind it: its cube alone can overflow.
      const float mean = sum * r / float(p.columns) * r * r;
      device T* dx_row = dx + ulong(row) * p.columns;
      for (uint v = 0; v < vectors; ++v) {
        const uint i = 4 * (thread_index + v * threads);
        store4(dx_row, i, p.columns, vectorized, g[v] * r - values[v] * mean);
      }
      // The next row writes `partial` again.
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  if (wants_dweight) {
    for (uint v = 0; v < vectors; ++v) {
      const uint i = 4 * (thread_index + v * threads);
      store4(partial_dweight + ulong(group) * p.columns, i, p.columns, vectorized, dweight[v]);
    }
  }
}

// The same for rows of any length: x and dy are read twice, and once more for the sums over rows.
template <typename T, typename W, typename O>
[[kernel]] void rms_norm_backward_looped(device const O* dy [[buffer(0)]],      // [rows, columns], rows dy_stride apart
                                         device const T* x [[buffer(1)]],       // [rows, columns], rows x_stride apart
                                         device const W* weight [[buffer(2)]],  // [columns]; unbound without weight
                                         device const float* rstd [[buffer(3)]],  // [rows]
                                         device T* dx [[buffer(4)]],  // [rows, columns]; unbound if not wanted
                                         device float* partial_dweight
                                         [[buffer(5)]],  // [threadgroups, columns]; unbound if not wanted
                                         constant RMSNormParams& p [[buffer(6)]],
                                         uint group [[threadgroup_position_in_grid]],
                                         uint thread_index [[thread_position_in_threadgroup]],
                                         uint threads [[threads_per_threadgroup]],
                                         uint lane [[thread_index_in_simdgroup]],
                                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[max_simdgroups];
  const uint first = group * p.rows_per_group;
  const uint last = min(first + p.rows_per_group, p.rows);
  if (wants_dx) {
    for (uint row = first; row < last; ++row) {
      device const O* dy_row = dy + row * p.dy_stride;
      device const T* x_row = x + row * p.x_stride;
      const float r = rstd[row];
      float products = 0.0f;
      for (uint i = 4 * thread_index; i < p.columns; i += 4 * threads) {
        const float4 g = load4(dy_row, i, p.columns, vectorized) * factor4(weight, i, p);
        products += dot(g, load4(x_row, i, p.columns, vectorized));
      }
      const float sum = threadgroup_sum(products, partial, lane, simdgroup, simdgroups);
      const float mean = sum * r / float(p.columns) * r * r;
      device T* dx_row = dx + ulong(row) * p.columns;
      for (uint i = 4 * thread_index; i < p.columns; i += 4 * threads) {
        const float4 g = load4(dy_row, i, p.columns, vectorized) * factor4(weight, i, p);
        const float4 values = load4(x_row, i, p.columns, vectorized);
        store4(dx_row, i, p.columns, vectorized, g * r - values * mean);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  if (wants_dweight) {
    for (uint i = 4 * thread_index; i < p.columns; i += 4 * threads) {
      float4 dweight = 0.0f;
      for (uint row = first; row < last; ++row) {
        const float4 incoming = load4(dy + row * p.dy_stride, i, p.columns, vectorized);
        dweight += incoming * (load4(x + row * p.x_stride, i, p.columns, vectorized) * rstd[row]);
      }
      store4(partial_dweight + ulong(group) * p.columns, i, p.columns, vectorized, dweight);
    }
  }
}

// Adds the partial sums of the weight's gradient, in the order of the threadgroups that made them.
template <typename W>
[[kernel]] void rms_norm_dweight(device const float* partial_dweight [[buffer(0)]],  // [groups, columns]
                                 device W* dweight [[buffer(1)]],                    // [columns]
                                 constant uint& columns [[buffer(2)]],
                                 constant uint& groups [[buffer(3)]],
                                 uint column [[thread_position_in_grid]]) {
  if (column >= columns) {
    return;
  }
  float sum = 0.0f;
  for (uint group = 0; group < groups; ++group) {
    sum += partial_dweight[ulong(group) * columns + column];
  }
  dweight[column] = W(sum);
}

#define INSTANTIATE_KERNEL(kernel, T, W, O) \
  template [[host_name(#kernel "_" #T "_" #W "_" #O)]] [[kernel]] decltype(kernel<T, W, O>) kernel<T, W, O>;

#define INSTANTIATE(T, W, O)                                \
  INSTANTIATE_KERNEL(rms_norm_single_row, T, W, O)          \
  INSTANTIATE_KERNEL(rms_norm_looped, T, W, O)              \
  INSTANTIATE_KERNEL(rms_norm_backward_single_row, T, W, O) \
  INSTANTIATE_KERNEL(rms_norm_backward_looped, T, W, O)

//          x       weight  y
INSTANTIATE(float, float, float)
INSTANTIATE(half, half, half)
INSTANTIATE(half, float, float)
INSTANTIATE(half, float, half)
INSTANTIATE(bfloat, bfloat, bfloat)
INSTANTIATE(bfloat, float, float)
INSTANTIATE(bfloat, float, bfloat)

#define INSTANTIATE_DWEIGHT(W) \
  template [[host_name("rms_norm_dweight_" #W)]] [[kernel]] decltype(rms_norm_dweight<W>) rms_norm_dweight<W>;

INSTANTIATE_DWEIGHT(float)
INSTANTIATE_DWEIGHT(half)
INSTANTIATE_DWEIGHT(bfloat)
