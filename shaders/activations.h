// Activations of gated units with their derivatives, four at a time in float32.
#pragma once

#include <metal_stdlib>

// value(x) and derivative(x) of one x.
struct Activated {
  float4 value;
  float4 derivative;
};

// 1 / (1 + exp(-x)) and 1 minus that, both accurate where they are small; exp never overflows.
struct Sigmoid {
  float4 value;
  float4 complement;
};

inline Sigmoid sigmoid(float4 x) {
  const float4 e = metal::exp(-metal::abs(x));
  const float4 large = 1.0f / (1.0f + e), small = e * large;
  return {metal::select(large, small, x < 0.0f), metal::select(small, large, x < 0.0f)};
}

struct SiLU {
  static float4 value(float4 x) { return x * sigmoid(x).value; }

  static Activated both(float4 x) {
    const Sigmoid s = sigmoid(x);
    return {x * s.value, s.value * (1.0f + x * s.complement)};
  }
};

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv:1606.08415). Written as
// x sigmoid(2 u), which keeps its accuracy where 1 + tanh(u) cancels.
struct GELUTanh {
  static Sigmoid cumulative(float4 x) { return sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

  static float4 value(float4 x) { return x * cumulative(x).value; }

  static Activated both(float4 x) {
    const Sigmoid s = cumulative(x);
    const float4 slope = 1.5957691216f * (1.0f + 0.134145f * x * x);
    // Where one factor has become 0 the product is 0 even if the slope has overflowed.
    const float4 bell = s.value * s.complement;
    return {x * s.value, s.value + metal::select(x * bell * slope, float4(0.0f), bell == 0.0f)};
  }
};

// x Phi(x), Phi the cumulative distribution of the normal distribution. Metal has no error function. With
// z = |x| / sqrt(2), erf(z) is an odd polynomial below 1 (error 1.2e-9) and erfc(z) exp(z^2) is t times a polynomial
// in t = 1 / (1 + 0.4 z) above (relative error 7.3e-8). Both interpolate at Chebyshev nodes.
struct GELUExact {
  static float4 polynomial_erf(float4 z) {
    const float4 s = z * z;
    float4 p = 7.87587506e-5f;
    p = p * s - 8.01686429e-4f;
    p = p * s + 5.18908742e-3f;
    p = p * s - 2.68542120e-2f;
    p = p * s + 1.12835947e-1f;
    p = p * s - 3.76126267e-1f;
    p = p * s + 1.12837917f;
    return p * z;
  }

  static float4 scaled_erfc(float4 z) {
    const float4 t = 1.0f / (1.0f + 0.4f * z);
    float4 p = -1.18409699e-1f;
    p = p * t + 2.49409366e-1f;
    p = p * t + 1.93238154e-3f;
    p = p * t + 2.16609887e-1f;
    p = p * t + 1.97696859e-1f;
    p = p * t + 2.26862495e-1f;
    p = p * t + 2.25616366e-1f;
    return p * t;
  }

  static float4 phi(float4 x, float4 bell) {
    const float4 z = 0.70710678119f * metal::abs(x);
    const float4 upper = metal::select(0.5f * scaled_erfc(z) * bell, 0.5f - 0.5f * polynomial_erf(z), z < 1.0f);
    return metal::select(1.0f - upper, upper, x < 0.0f);
  }

  static float4 value(float4 x) { return x * phi(x, metal::exp(-0.5f * x * x)); }

  static Activated both(float4 x) {
    const float4 bell = metal::exp(-0.5f * x * x);
    const float4 cumulative = phi(x, bell);
    const float4 density = 0.39894228040f * bell;
    return {x * cumulative, cumulative + metal::select(x * density, float4(0.0f), bell == 0.0f)};
  }
};
