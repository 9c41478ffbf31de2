// What PyTorch's own headers offer to a shader.
#include <c10/metal/atomic.h>
#include <c10/metal/expm1f.h>
#include <c10/metal/igamma.h>
#include <c10/metal/indexing.h>
#include <c10/metal/random.h>
#include <c10/metal/reduction_utils.h>
#include <c10/metal/special_math.h>
#include <c10/metal/utils.h>
#include <metal_stdlib>

using namespace metal;

kernel void special(
    const device float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  device float* at = y + i * 12;
  at[0] = c10::metal::erf(x[i]);
  at[1] = c10::metal::erfinv(x[i] / 10);
  at[2] = c10::metal::log_gamma(x[i]);
  at[3] = c10::metal::digamma(x[i]);
  at[4] = c10::metal::i0(x[i]);
  at[5] = c10::metal::i1e(x[i]);
  at[6] = c10::metal::sinc(x[i]);
  at[7] = c10::metal::expm1f(x[i]);
  at[8] = c10::metal::log1p(x[i]);
  at[9] = c10::metal::bessel_j0_forward(x[i]);
  at[10] = c10::metal::zeta(x[i] + 1, 2.0f);
  at[11] = c10::metal::spherical_bessel_j0(x[i]);
}

kernel void gamma_ratio(
    const device float* a [[buffer(0)]],
    const device float* x [[buffer(1)]],
    device float* y [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = calc_igamma<float>(a[i], x[i]);
}

template <typename T>
kernel void reductions(
    const device T* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint i [[thread_position_in_threadgroup]],
    uint n [[threads_per_threadgroup]]) {
  threadgroup float shared[32];
  threadgroup float largest[32];
  float sum = c10::metal::threadgroup_sum(shared, float(x[i]), i, n);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float top = c10::metal::threadgroup_max(largest, float(x[i]), i, n);
  if (i == 0) {
    y[0] = sum;
    y[1] = top;
  }
}
template [[host_name("reductions_half")]] kernel void reductions<half>(
    const device half* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint i [[thread_position_in_threadgroup]],
    uint n [[threads_per_threadgroup]]);

template <typename T>
kernel void scatter_add(
    const device T* x [[buffer(0)]],
    const device int* where [[buffer(1)]],
    device c10::metal::AtomicType_t<T>* y [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  c10::metal::AtomicType<T>::atomic_add(y, where[i], x[i]);
}
#define SCATTER(T)                                                                       \
  template [[host_name("scatter_add_" #T)]] kernel void scatter_add<T>(                  \
      const device T* x [[buffer(0)]],                                                   \
      const device int* where [[buffer(1)]],                                             \
      device c10::metal::AtomicType_t<T>* y [[buffer(2)]],                               \
      uint i [[thread_position_in_grid]]);
SCATTER(float) SCATTER(half) SCATTER(int) SCATTER(short)

kernel void random(device float* y [[buffer(0)]], constant long2& seed [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = c10::metal::rand(seed.x, seed.y + i);
}

struct square_functor {
  template <typename T>
  inline T operator()(const T x) {
    return x * x;
  }
};
REGISTER_UNARY_OP(square, float, float);
REGISTER_UNARY_OP(square, half, half);

struct add_functor {
  template <typename T>
  inline T operator()(const T a, const T b) {
    return a + b;
  }
};
REGISTER_BINARY_OP(add, float, float);
REGISTER_BINARY_OP(add, half, half);
