// The rotation of rotary position embedding, whatever its angles come from. A thread turns four pairs of one position,
// or passes on four of the components behind them, in several heads of one or two tensors.
#pragma once

#include <metal_stdlib>

#include "load_store.h"
#include "params.h"

constant bool vectorized [[function_constant(0)]];   // heads and what they hold start at multiples of 4 elements
constant bool interleaved [[function_constant(1)]];  // pairs of neighbours; else of components half the width apart

constant constexpr uint heads_per_thread = 4;

struct Turn {
  float4 cos;
  float4 sin;
};

// Pairs i to i + 3 of one head.
template <typename T>
inline void turn_pairs(device const T* x, device T* y, uint i, Turn turn, constant RopeParams& p) {
  if (interleaved) {
    const uint width = 2 * p.pairs;
    const float4 low = load4(x, 2 * i, width, vectorized), high = load4(x, 2 * i + 4, width, vectorized);
    const float4 first = float4(low.xz, high.xz), second = float4(low.yw, high.yw);
    const float4 turned = first * turn.cos - second * turn.sin, other = second * turn.cos + first * turn.sin;
    store4(y, 2 * i, width, vectorized, float4(turned.x, other.x, turned.y, other.y));
    store4(y, 2 * i + 4, width, vectorized, float4(turned.z, other.z, turned.w, other.w));
  } else {
    const float4 first = load4(x, i, p.pairs, vectorized), second = load4(x + p.pairs, i, p.pairs, vectorized);
    store4(y, i, p.pairs, vectorized, first * turn.cos - second * turn.sin);
    store4(y + p.pairs, i, p.pairs, vectorized, second * turn.cos + first * turn.sin);
  }
}

// `angles(batch, position, i)` gives the turns of pairs i to i + 3.
template <typename T, typename Angles>
inline void rotate(device const T* x0,
                   device T* y0,
                   device const T* x1,
                   device T* y1,
                   Angles angles,
                   constant RopeParams& p,
                   uint index,
                   uint batch) {
  const uint turned_vectors = (p.pairs + 3) / 4;
  const uint vectors = turned_vectors + (p.untouched + 3) / 4;
  const uint heads = p.heads[0] + p.heads[1];
  const uint chunks = (heads + heads_per_thread - 1) / heads_per_thread;
  const uint vector = index % vectors;
  const uint chunk = index / vectors % chunks;
  const uint position = index / vectors / chunks;
  if (position >= p.positions) {
    return;
  }
  const bool turns = vector < turned_vectors;
  Turn turn;
  if (turns) {
    turn = angles(batch, position, 4 * vector);
    turn.sin *= p.sign;
  }
  for (uint head = chunk * heads_per_thread; head < min((chunk + 1) * heads_per_thread, heads); ++head) {
    const bool in_first = head < p.heads[0];
    constant RopeTensor& t = p.tensors[in_first ? 0 : 1];
    const ulong h = in_first ? head : head - p.heads[0];
    device const T* x = (in_first ? x0 : x1) + batch * t.x_batch + h * t.x_head + position * t.x_position;
    device T* y = (in_first ? y0 : y1) + batch * t.y_batch + h * t.y_head + position * t.y_position;
    if (turns) {
      turn_pairs(x, y, 4 * vector, turn, p);
    } else {
      const uint i = 4 * (vector - turned_vectors);
      store4(y + 2 * p.pairs, i, p.untouched, vectorized, load4(x + 2 * p.pairs, i, p.untouched, vectorized));
    }
  }
}
