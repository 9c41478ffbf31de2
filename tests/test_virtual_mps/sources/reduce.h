#pragma once
#include <metal_stdlib>

static constant constexpr const int SIMD_SIZE = 32;

template <typename T, typename U>
inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

METAL_FUNC float threadgroup_sum(float v, threadgroup float* local_sums, uint lane, uint group) {
  v = metal::simd_sum(v);
  if (group == 0) {
    local_sums[lane] = 0;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (lane == 0) {
    local_sums[group] = v;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return metal::simd_sum(local_sums[lane]);
}
