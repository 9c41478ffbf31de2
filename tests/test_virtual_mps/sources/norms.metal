// Row reductions in the style of MLX: N_READS elements a thread, one row a threadgroup or a loop over it.
#include <metal_common>
#include <metal_simdgroup>

#include "reduce.h"

using namespace metal;

constant bool has_w [[function_constant(20)]];

template <typename T, int N_READS = 4>
[[kernel]] void rms_single_row(
    const device T* x,
    const device T* w,
    device T* out,
    constant float& eps,
    constant uint& axis_size,
    constant uint& w_stride,
    uint gid [[threadgroup_position_in_grid]],
    uint lid [[thread_position_in_threadgroup]],
    uint simd_lane_id [[thread_index_in_simdgroup]],
    uint simd_group_id [[simdgroup_index_in_threadgroup]]) {
  threadgroup float local_inv_mean[1];
  threadgroup float local_sums[SIMD_SIZE];
  float acc = 0;
  x += gid * size_t(axis_size) + lid * N_READS;
  w += w_stride * lid * N_READS;
  if (lid * N_READS + N_READS <= axis_size) {
    for (int i = 0; i < N_READS; i++) {
      float xi = x[i];
      acc += xi * xi;
    }
  } else {
    for (int i = 0; i < N_READS; i++) {
      if ((lid * N_READS + i) < axis_size) {
        float xi = x[i];
        acc += xi * xi;
      }
    }
  }
  acc = threadgroup_sum(acc, local_sums, simd_lane_id, simd_group_id);
  if (simd_group_id == 0 && simd_lane_id == 0) {
    local_inv_mean[0] = metal::precise::rsqrt(acc / axis_size + eps);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out += gid * size_t(axis_size) + lid * N_READS;
  for (int i = 0; i < N_READS; i++) {
    if ((lid * N_READS + i) < axis_size) {
      T weight = has_w ? w[w_stride * i] : T(1);
      out[i] = weight * static_cast<T>(x[i] * local_inv_mean[0]);
    }
  }
}

template <typename T, typename AccT = float, int N_READS = 4>
[[kernel]] void softmax_looped(
    const device T* in,
    device T* out,
    constant int& axis_size,
    uint gid [[threadgroup_position_in_grid]],
    uint lid [[thread_position_in_threadgroup]],
    uint lsize [[threads_per_threadgroup]],
    uint simd_lane_id [[thread_index_in_simdgroup]],
    uint simd_group_id [[simdgroup_index_in_threadgroup]]) {
  in += gid * size_t(axis_size);
  threadgroup AccT local_max[SIMD_SIZE];
  threadgroup AccT local_normalizer[SIMD_SIZE];
  AccT prevmax;
  AccT maxval = -numeric_limits<AccT>::infinity();
  AccT normalizer = 0;
  for (int r = 0; r < static_cast<int>(ceildiv(axis_size, N_READS * lsize)); r++) {
    int offset = r * lsize * N_READS + lid * N_READS;
    AccT vals[N_READS];
    for (int i = 0; i < N_READS; i++) {
      vals[i] = (offset + i < axis_size) ? AccT(in[offset + i]) : -numeric_limits<AccT>::infinity();
    }
    prevmax = maxval;
    for (int i = 0; i < N_READS; i++) {
      maxval = (maxval < vals[i]) ? vals[i] : maxval;
    }
    normalizer = prevmax == -INFINITY ? 0 : normalizer * fast::exp(prevmax - maxval);
    for (int i = 0; i < N_READS; i++) {
      normalizer += maxval == -INFINITY ? 0 : fast::exp(vals[i] - maxval);
    }
  }
  prevmax = maxval;
  maxval = simd_max(maxval);
  normalizer *= prevmax == -INFINITY ? 0 : fast::exp(prevmax - maxval);
  normalizer = simd_sum(normalizer);
  prevmax = maxval;
  if (simd_lane_id == 0) {
    local_max[simd_group_id] = maxval;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  maxval = simd_max(simd_lane_id * SIMD_SIZE < lsize ? local_max[simd_lane_id] : -INFINITY);
  normalizer *= fast::exp(prevmax - maxval);
  if (simd_lane_id == 0) {
    local_normalizer[simd_group_id] = normalizer;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  normalizer = simd_sum(simd_lane_id * SIMD_SIZE < lsize ? local_normalizer[simd_lane_id] : 0);
  normalizer = 1 / normalizer;
  out += gid * size_t(axis_size);
  for (int r = 0; r < static_cast<int>(ceildiv(axis_size, N_READS * lsize)); r++) {
    int offset = r * lsize * N_READS + lid * N_READS;
    for (int i = 0; i < N_READS; i++) {
      if (offset + i < axis_size) {
        out[offset + i] = T(fast::exp(in[offset + i] - maxval) * normalizer);
      }
    }
  }
}

// clang-format off
#define instantiate_kernel(name, func, ...) \
  template [[host_name(name)]] [[kernel]] decltype(func<__VA_ARGS__>) func<__VA_ARGS__>;
#define instantiate_rows(name, itype)                          \
  instantiate_kernel("rms" #name, rms_single_row, itype)       \
  instantiate_kernel("looped_softmax_" #name, softmax_looped, itype)

instantiate_rows(float32, float)
instantiate_rows(float16, half)
instantiate_rows(bfloat16, bfloat) // clang-format on
