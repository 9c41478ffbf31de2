// Reductions over a simdgroup and a threadgroup, always in the same order.
#pragma once

#include <metal_stdlib>

struct Sum {
  static float identity() { return 0.0f; }
  static float over_simdgroup(float value) { return metal::simd_sum(value); }
};

// NaN loses against a number.
struct Max {
  static float identity() { return -INFINITY; }
  static float over_simdgroup(float value) { return metal::simd_max(value); }
};

// `value` reduced over all threads of the threadgroup, in each of them. `partial` holds one float per simdgroup. The
// caller's next use of `partial` needs a barrier before it.
template <typename Operation>
inline float threadgroup_reduce(float value, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
  value = Operation::over_simdgroup(value);
  if (simdgroups == 1) {
    return value;
  }
  if (lane == 0) {
    partial[simdgroup] = value;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return Operation::over_simdgroup(lane < simdgroups ? partial[lane] : Operation::identity());
}

inline float threadgroup_sum(float value, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
  return threadgroup_reduce<Sum>(value, partial, lane, simdgroup, simdgroups);
}

inline float threadgroup_max(float value, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
  return threadgroup_reduce<Max>(value, partial, lane, simdgroup, simdgroups);
}
