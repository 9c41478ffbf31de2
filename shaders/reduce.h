// Sums over a simdgroup and a threadgroup, always in the same order.
#pragma once

#include <metal_stdlib>

// The sum of `value` over all threads of the threadgroup, in each of them. `partial` holds one float per simdgroup. The
// caller's next use of `partial` needs a barrier before it.
inline float threadgroup_sum(float value, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
  value = metal::simd_sum(value);
  if (simdgroups == 1) {
    return value;
  }
  if (lane == 0) {
    partial[simdgroup] = value;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return metal::simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
}
