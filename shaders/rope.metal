// Rotary position embedding from given cosines and sines (Su et al., arXiv:2104.09864): one tensor or two, forward, and
// backward with the other sign. T is the type of x, C of the tables.
#include <metal_stdlib>

using namespace metal;

#include "rope.h"

template <typename C>
struct Tables {
  device const C* cos;
  device const C* sin;
  constant RopeParams& p;

  Turn operator()(uint batch, uint position, uint i) const {
    const ulong row = batch * p.angle_batch + position * p.angle_position;
    return {load4(cos + row, i, p.pairs, vectorized), load4(sin + row, i, p.pairs, vectorized)};
  }
};

template <typename T, typename C>
[[kernel]] void rope(device const T* x0 [[buffer(0)]],   // [batch, heads, positions, width] by strides
                     device T* y0 [[buffer(1)]],         // the same
                     device const T* x1 [[buffer(2)]],   // a second tensor, or unbound with heads[1] = 0
                     device T* y1 [[buffer(3)]],         // and its result
                     device const C* cos [[buffer(4)]],  // [1 or batch, positions, 2 pairs] by strides; half is read
                     device const C* sin [[buffer(5)]],  // the same
                     constant RopeParams& p [[buffer(6)]],
                     uint2 group [[threadgroup_position_in_grid]],  // chunk of a batch element, batch element
                     uint2 threads [[threads_per_threadgroup]],
                     uint thread_index [[thread_index_in_threadgroup]]) {
  const Tables<C> tables = {cos, sin, p};
  rotate(x0, y0, x1, y1, tables, p, group.x * threads.x + thread_index, group.y);
}

#define INSTANTIATE(T, C) template [[host_name("rope_" #T "_" #C)]] [[kernel]] decltype(rope<T, C>) rope<T, C>;

//          x       cos, sin
INSTANTIATE(float, float)
INSTANTIATE(half, half)
INSTANTIATE(half, float)
INSTANTIATE(bfloat, bfloat)
INSTANTIATE(bfloat, float)
