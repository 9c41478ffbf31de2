// activation(gate) * up and its gradients. Each thread works on two vectors of four neighbours, a threadgroup's width
// apart, so that neighbouring threads touch neighbouring vectors. Rows may lie any distance apart: halves of one fused
// projection are read, and their gradients written, in place.
#pragma once

#include <metal_stdlib>

#include "activations.h"
#include "load_store.h"
#include "params.h"

constant bool vectorized [[function_constant(0)]];  // every row starts at a multiple of 4 elements
constant bool wants_dgate [[function_constant(1)]];
constant bool wants_dup [[function_constant(2)]];

constant constexpr uint vectors_per_thread = 2;

// The first element of vector k of this thread.
inline uint element(uint k, uint2 group, uint2 threads, uint thread_index) {
  return 4 * ((vectors_per_thread * group.x + k) * threads.x + thread_index);
}

template <typename T, typename Activation>
[[kernel]] void gated_forward(device const T* gate [[buffer(0)]],  // [rows, columns], rows gate_stride apart
                              device const T* up [[buffer(1)]],    // [rows, columns], rows up_stride apart
                              device T* y [[buffer(2)]],           // [rows, columns]
                              constant GatedParams& p [[buffer(3)]],
                              uint2 group [[threadgroup_position_in_grid]],  // chunk of columns, row
                              uint2 threads [[threads_per_threadgroup]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong row = group.y;
  for (uint k = 0; k < vectors_per_thread; ++k) {
    const uint i = element(k, group, threads, thread_index);
    if (i < p.columns) {
      const float4 value = Activation::value(load4(gate + row * p.gate_stride, i, p.columns, vectorized));
      const float4 factor = load4(up + row * p.up_stride, i, p.columns, vectorized);
      store4(y + row * p.columns, i, p.columns, vectorized, value * factor);
    }
  }
}

template <typename T, typename Activation>
[[kernel]] void gated_backward(device const T* dy [[buffer(0)]],    // [rows, columns], rows dy_stride apart
                               device const T* gate [[buffer(1)]],  // [rows, columns], rows gate_stride apart
                               device const T* up [[buffer(2)]],    // [rows, columns], rows up_stride apart
                               device T* dgate [[buffer(3)]],       // rows gradient_stride apart; unbound if not wanted
                               device T* dup [[buffer(4)]],         // rows gradient_stride apart; unbound if not wanted
                               constant GatedParams& p [[buffer(5)]],
                               uint2 group [[threadgroup_position_in_grid]],  // chunk of columns, row
                               uint2 threads [[threads_per_threadgroup]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong row = group.y;
  for (uint k = 0; k < vectors_per_thread; ++k) {
    const uint i = element(k, group, threads, thread_index);
    if (i < p.columns) {
      const float4 incoming = load4(dy + row * p.dy_stride, i, p.columns, vectorized);
      const Activated gated = Activation::both(load4(gate + row * p.gate_stride, i, p.columns, vectorized));
      if (wants_dgate) {
        const float4 factor = load4(up + row * p.up_stride, i, p.columns, vectorized);
        store4(dgate + row * p.gradient_stride, i, p.columns, vectorized, incoming * factor * gated.derivative);
      }
      if (wants_dup) {
        store4(dup + row * p.gradient_stride, i, p.columns, vectorized, incoming * gated.value);
      }
    }
  }
}

#define INSTANTIATE_GATED_KERNEL(name, kernel, T, Activation) \
  template [[host_name(name "_" #T)]] [[kernel]] decltype(kernel<T, Activation>) kernel<T, Activation>;

#define INSTANTIATE_GATED(name, T, Activation)                 \
  INSTANTIATE_GATED_KERNEL(name, gated_forward, T, Activation) \
  INSTANTIATE_GATED_KERNEL(name "_backward", gated_backward, T, Activation)
