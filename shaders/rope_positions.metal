// Rotary position embedding that calculates its angles from positions, forward, and backward with the other sign.
#include <metal_stdlib>

using namespace metal;

#include "rope.h"

constant bool offsets [[function_constant(2)]];  // one position for each batch element, of its first row

// Angles in units of 2^-64 turns: the 64-bit product wraps around as an angle does, so that nothing is lost at large
// positions. 24 bits of what is left make the float32, which is exact to 4e-7 of a radian.
struct Positions {
  device const int* positions;
  constant ulong* turns;  // what one position adds, for each pair
  constant RopeParams& p;

  Turn operator()(uint batch, uint position, uint i) const {
    int place = positions[batch * p.angle_batch + position * p.angle_position];
    if (offsets) {
      place += int(position);
    }
    float4 half_turns = 0.0f;
    for (uint k = 0; k < 4 && i + k < p.pairs; ++k) {
      const ulong fraction = ulong(long(place)) * turns[i + k];
      half_turns[k] = float(int(fraction >> 32)) * 4.656612873e-10f;  // 2^-31
    }
    return {cospi(half_turns), sinpi(half_turns)};
  }
};

template <typename T>
[[kernel]] void rope_positions(device const T* x [[buffer(0)]],  // [batch, heads, positions, width] by strides
                               device T* y [[buffer(1)]],        // the same
                               device const int* positions [[buffer(2)]],  // [batch] or [batch, positions]
                               constant ulong* turns [[buffer(3)]],        // [pairs]
                               constant RopeParams& p [[buffer(4)]],
                               uint2 group [[threadgroup_position_in_grid]],  // chunk of a batch element, batch element
                               uint2 threads [[threads_per_threadgroup]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  const Positions angles = {positions, turns, p};
  rotate(x, y, x, y, angles, p, group.x * threads.x + thread_index, group.y);
}

#define INSTANTIATE(T) \
  template [[host_name("rope_positions_" #T)]] [[kernel]] decltype(rope_positions<T>) rope_positions<T>;

INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
