#include <metal_stdlib>
using namespace metal;

template <typename T>
[[kernel]] void square(device const T* x [[buffer(0)]], device T* out [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  out[i] = x[i] * x[i];
}

#define INSTANTIATE(name, type) \
  template [[host_name("square_" #name)]] [[kernel]] void square<type>(device const type*, device type*, uint);

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
